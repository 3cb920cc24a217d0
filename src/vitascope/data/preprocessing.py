"""Convert stored images to model input: resize, convert channels, scale to 0…1, normalise; augment for training."""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.augment import (
    MixedBatch,
    apply_mixup_or_cutmix,
    crop_warp_and_jitter_pixels,
    erase_rectangles,
    flip_and_shift_as_drawn,
    make_unmixed_labels,
)
from vitascope.data.config import AugmentConfig
from vitascope.data.dataset import ImageSize, Labels, UInt8Images
from vitascope.data.image_ops import to_grayscale
from vitascope.data.sampling import RandomDraws
from vitascope.shapes import Images


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing for training, evaluation and prediction. `mean` and `std`: of the training images, per channel."""

    size: ImageSize
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: UInt8Images) -> Images:
        """Resize and normalise, without augmentation."""
        return self.normalize(self.scale_and_resize(images))

    def augment_and_mix(
        self, images: UInt8Images, labels: Labels, draws: RandomDraws, policy: AugmentConfig
    ) -> MixedBatch:
        """Augment the images, then apply MixUp or CutMix."""
        pixels = self.augment(images, draws, policy)
        if "mix" in draws:
            return apply_mixup_or_cutmix(pixels, labels, draws["mix"])
        return MixedBatch(pixels, make_unmixed_labels(labels))

    def augment(
        self, images: UInt8Images, draws: RandomDraws, policy: AugmentConfig, crop_size: ImageSize | None = None
    ) -> Images:
        """Augment the images: flip and shift, crop, RandAugment and colour, normalise, erase."""
        pixels = self.scale_and_resize(flip_and_shift_as_drawn(images, draws, policy))
        pixels = self.normalize(crop_warp_and_jitter_pixels(pixels, draws, policy, crop_size))
        if "erase" in draws:
            pixels = erase_rectangles(pixels, draws["erase"], policy.erase or 0.0, policy.erase_area or 0.0)
        return pixels

    def scale_and_resize(self, images: UInt8Images) -> Images:
        """Return floats from 0 to 1 with the model's size and channels."""
        return self._resize_and_convert_channels(images.float() / 255)

    def convert_preprocessed_images(self, target: "Preprocessing", images: Tensor) -> Images:
        """Convert images preprocessed with this object to what `target` would have produced."""
        if target == self:
            return images
        mean, std = (_make_channel_tensor(values, images.dtype, images.device) for values in (self.mean, self.std))
        return target.normalize(target._resize_and_convert_channels(images * std + mean))

    def _resize_and_convert_channels(self, pixels: Tensor) -> Images:
        """Resize the pixels and convert them to the model's channels."""
        if tuple(pixels.shape[2:]) != self.size:
            pixels = F.interpolate(pixels, size=self.size, mode="bilinear", antialias=True, align_corners=False)
        channels = len(self.mean)
        if pixels.shape[1] == channels:
            return pixels
        return to_grayscale(pixels) if channels == 1 else pixels.expand(-1, channels, -1, -1)

    def normalize(self, pixels: Images) -> Images:
        """Subtract the mean and divide by the standard deviation, per channel."""
        mean, std = (_make_channel_tensor(values, pixels.dtype, pixels.device) for values in (self.mean, self.std))
        return (pixels - mean) / std

    def denormalize(self, images: Images) -> Images:
        """Return pixels from 0 to 1, for figures."""
        mean, std = (_make_channel_tensor(values, images.dtype, images.device) for values in (self.mean, self.std))
        return (images * std + mean).clamp(0, 1)


@dataclass(frozen=True)
class DevicePreprocessing(Preprocessing):
    """Preprocessing with mean and std as tensors, so that compiled code is not specialised to their values."""

    mean_tensor: Tensor = field(compare=False)
    std_tensor: Tensor = field(compare=False)

    @classmethod
    def from_preprocessing(cls, preprocessing: Preprocessing, device: str) -> "DevicePreprocessing":
        """Copy mean and std to the device."""
        mean, std = (
            _make_channel_tensor(values, torch.float32, torch.device(device))
            for values in (preprocessing.mean, preprocessing.std)
        )
        return cls(preprocessing.size, preprocessing.mean, preprocessing.std, mean, std)

    def normalize(self, pixels: Images) -> Images:
        return (pixels - self.mean_tensor) / self.std_tensor


@cache
def _make_channel_tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values as channel × 1 × 1, cached per device: a new tensor would block the GPU at every step."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None]
