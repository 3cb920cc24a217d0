"""Stored bytes -> what the model sees: right size and channels, between 0 and 1, normalised; varied while training."""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.augment import (
    MixedLabels,
    augment_pixels,
    erase_rectangles,
    flip_and_shift,
    make_unmixed_labels,
    mix_images_and_labels,
)
from vitascope.data.config import AugmentConfig
from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.image_ops import to_grayscale
from vitascope.data.sampling import RandomDraws
from vitascope.shapes import Images


@dataclass(frozen=True)
class Preprocessing:
    """The same for training, evaluation and prediction; `mean` and `std` are per channel of the training images."""

    size: tuple[int, int]  # rows, columns
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: UInt8Images) -> Images:
        """Without variation."""
        return self.normalize(self.scale_and_resize(images))

    def augment_and_mix(
        self, images: UInt8Images, labels: Labels, draws: RandomDraws, policy: AugmentConfig
    ) -> tuple[Images, MixedLabels]:
        """With variation, and mixed."""
        pixels = self.augment(images, draws, policy)
        return (
            mix_images_and_labels(pixels, labels, draws["mix"])
            if "mix" in draws
            else (pixels, make_unmixed_labels(labels))
        )

    def augment(
        self, images: UInt8Images, draws: RandomDraws, policy: AugmentConfig, crop_size: tuple[int, int] | None = None
    ) -> Images:
        """One variation: mirror and move, cut out, RandAugment and colour, normalise, erase."""
        pixels = self.scale_and_resize(flip_and_shift(images, draws, policy))
        pixels = self.normalize(augment_pixels(pixels, draws, policy, crop_size))
        if "erase" in draws:
            pixels = erase_rectangles(pixels, draws["erase"], policy.erase or 0.0, policy.erase_area or 0.0)
        return pixels

    def scale_and_resize(self, images: UInt8Images) -> Images:
        """Floats between 0 and 1 with the model's size and channels."""
        return self._match_size_and_channels(images.float() / 255)

    def convert_preprocessed(self, target: "Preprocessing", images: Tensor) -> Images:
        """Images prepared this way -> as if they had been prepared the other way."""
        if target == self:
            return images
        mean, std = (_make_channel_tensor(values, images.dtype, images.device) for values in (self.mean, self.std))
        return target.normalize(target._match_size_and_channels(images * std + mean))

    def _match_size_and_channels(self, pixels: Tensor) -> Images:
        if tuple(pixels.shape[2:]) != self.size:
            pixels = F.interpolate(pixels, size=self.size, mode="bilinear", antialias=True, align_corners=False)
        channels = len(self.mean)
        if pixels.shape[1] == channels:
            return pixels
        return to_grayscale(pixels) if channels == 1 else pixels.expand(-1, channels, -1, -1)

    def normalize(self, pixels: Images) -> Images:
        mean, std = (_make_channel_tensor(values, pixels.dtype, pixels.device) for values in (self.mean, self.std))
        return (pixels - mean) / std

    def denormalize(self, images: Images) -> Images:
        """Back to 0…1, for pictures."""
        mean, std = (_make_channel_tensor(values, images.dtype, images.device) for values in (self.mean, self.std))
        return (images * std + mean).clamp(0, 1)


@dataclass(frozen=True)
class DevicePreprocessing(Preprocessing):
    """With its numbers as tensors: compiled for one split of the images, it serves those of any other."""

    mean_tensor: Tensor = field(compare=False)
    std_tensor: Tensor = field(compare=False)

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing, device: str) -> "DevicePreprocessing":
        centre, width = (
            _make_channel_tensor(values, torch.float32, torch.device(device))
            for values in (preprocessing.mean, preprocessing.std)
        )
        return cls(preprocessing.size, preprocessing.mean, preprocessing.std, centre, width)

    def normalize(self, pixels: Images) -> Images:
        return (pixels - self.mean_tensor) / self.std_tensor


@cache
def _make_channel_tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """channel × 1 × 1, made once per device: making it anew would hold up a GPU at every step."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]
