"""Stored bytes -> what the model sees: right size and channels, between 0 and 1, normalised; varied while training."""

from dataclasses import dataclass

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
        """With variation: mirror and move, RandAugment and colour, normalise, erase, mix."""
        pixels = self.fit(vary_stored(images, draws, policy))
        pixels = self.normalise(vary_pixels(pixels, draws, policy))
        if "erase" in draws:
            pixels = erase(pixels, draws["erase"], policy.erase or 0.0, policy.erase_area or 0.33)
        return mix(pixels, labels, draws["mix"]) if "mix" in draws else (pixels, unmixed(labels))

    def fit(self, images: UInt8Images) -> Images:
        """Floats between 0 and 1 with the model's size and channels."""
        pixels = images.float() / 255
        if tuple(pixels.shape[2:]) != self.size:
            pixels = F.interpolate(pixels, size=self.size, mode="bilinear", antialias=True, align_corners=False)
        channels = len(self.mean)
        if pixels.shape[1] == channels:
            return pixels
        return grey(pixels) if channels == 1 else pixels.expand(-1, channels, -1, -1)

    def normalise(self, pixels: Images) -> Images:
        return (pixels - self._column(self.mean, pixels)) / self._column(self.std, pixels)

    def undone(self, images: Images) -> Images:
        """Back to 0…1, for pictures."""
        return (images * self._column(self.std, images) + self._column(self.mean, images)).clamp(0, 1)

    def _column(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]
