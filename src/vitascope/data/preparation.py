"""Stored bytes -> what the model sees: right size and channels, between 0 and 1, normalised; varied while training."""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.augment import erase, vary_pixels, vary_stored
from vitascope.data.colour import grey
from vitascope.data.config import AugmentConfig
from vitascope.data.draws import Draws
from vitascope.data.mixing import Target, mix, unmixed
from vitascope.data.source import Labels, UInt8Images
from vitascope.shapes import Images


@dataclass(frozen=True)
class Preparation:
    """The same for training, evaluation and prediction; `mean` and `std` are per channel of the training images."""

    size: tuple[int, int]  # rows, columns
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: UInt8Images) -> Images:
        """Without variation."""
        return self.normalise(self.fit(images))

    def varied(self, images: UInt8Images, labels: Labels, draws: Draws, policy: AugmentConfig) -> tuple[Images, Target]:
        """With variation, and mixed."""
        pixels = self.view(images, draws, policy)
        return mix(pixels, labels, draws["mix"]) if "mix" in draws else (pixels, unmixed(labels))

    def view(
        self, images: UInt8Images, draws: Draws, policy: AugmentConfig, crop_size: tuple[int, int] | None = None
    ) -> Images:
        """One variation: mirror and move, cut out, RandAugment and colour, normalise, erase."""
        pixels = self.fit(vary_stored(images, draws, policy))
        pixels = self.normalise(vary_pixels(pixels, draws, policy, crop_size))
        if "erase" in draws:
            pixels = erase(pixels, draws["erase"], policy.erase or 0.0, policy.erase_area or 0.0)
        return pixels

    def fit(self, images: UInt8Images) -> Images:
        """Floats between 0 and 1 with the model's size and channels."""
        return self._sized(images.float() / 255)

    def turned_into(self, other: "Preparation", images: Tensor) -> Images:
        """Images prepared this way -> as if they had been prepared the other way."""
        if other == self:
            return images
        mean, std = (_column(values, images.dtype, images.device) for values in (self.mean, self.std))
        return other.normalise(other._sized(images * std + mean))

    def _sized(self, pixels: Tensor) -> Images:
        if tuple(pixels.shape[2:]) != self.size:
            pixels = F.interpolate(pixels, size=self.size, mode="bilinear", antialias=True, align_corners=False)
        channels = len(self.mean)
        if pixels.shape[1] == channels:
            return pixels
        return grey(pixels) if channels == 1 else pixels.expand(-1, channels, -1, -1)

    def normalise(self, pixels: Images) -> Images:
        mean, std = (_column(values, pixels.dtype, pixels.device) for values in (self.mean, self.std))
        return (pixels - mean) / std

    def undone(self, images: Images) -> Images:
        """Back to 0…1, for pictures."""
        mean, std = (_column(values, images.dtype, images.device) for values in (self.mean, self.std))
        return (images * std + mean).clamp(0, 1)


@dataclass(frozen=True)
class Placed(Preparation):
    """With its numbers as tensors: compiled for one split of the images, it serves those of any other."""

    centre: Tensor = field(compare=False)
    width: Tensor = field(compare=False)

    @classmethod
    def of(cls, other: Preparation, device: str) -> "Placed":
        centre, width = (_column(values, torch.float32, torch.device(device)) for values in (other.mean, other.std))
        return cls(other.size, other.mean, other.std, centre, width)

    def normalise(self, pixels: Images) -> Images:
        return (pixels - self.centre) / self.width


@cache
def _column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """channel × 1 × 1, made once per device: making it anew would hold up a GPU at every step."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]
