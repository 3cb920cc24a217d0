"""Corrupt images (pixels from 0 to 1): noise, blur, shift and lower contrast, each with a level."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from vitascope.shapes import Images

Spoil = Callable[[Images, float, int], Images]  # images, level, a seed


def add_noise(images: Images, level: float, seed: int) -> Images:
    """Add Gaussian noise; `level` is its standard deviation (pixels go from 0 to 1)."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed)).to(images.device)
    return (images + level * noise).clamp(0, 1)


def blur(images: Images, level: float, seed: int) -> Images:  # noqa: ARG001 - nothing is drawn
    """Apply a Gaussian blur; `level` is its standard deviation in pixels."""
    from torchvision.transforms.v2 import functional as tv  # seconds to import

    half = min(math.ceil(3 * level), min(images.shape[2:]) - 1)
    return tv.gaussian_blur(images, [2 * half + 1, 2 * half + 1], [level, level])


def shift(images: Images, level: float, seed: int) -> Images:  # noqa: ARG001
    """Shift by `level` pixels, cycling through the four directions; edge pixels are repeated."""
    step = int(level)
    wide = F.pad(images, (step, step, step, step), mode="replicate")
    height, width = images.shape[2:]
    moved = images.clone()
    for side, (down, right) in enumerate(((step, 2 * step), (step, 0), (2 * step, step), (0, step))):
        moved[side::4] = wide[side::4, :, down : down + height, right : right + width]
    return moved


def fade(images: Images, level: float, seed: int) -> Images:  # noqa: ARG001
    """Reduce the contrast by this fraction: pixels move towards the image's mean."""
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return mean + (1 - level) * (images - mean)


@dataclass(frozen=True)
class Corruption:
    spoil: Spoil
    levels: tuple[float, ...]
    unit: str
    short_unit: str  # for tables
    in_pixels: bool = False  # of a 32-pixel image; larger images get larger levels

    def levels_for(self, size: tuple[int, int]) -> list[float]:
        factor = max(1, round(min(size) / 32)) if self.in_pixels else 1
        return [level * factor for level in self.levels]


CORRUPTIONS = {
    "noise": Corruption(
        add_noise, (0.05, 0.1, 0.15, 0.2), "noise standard deviation (pixels 0 to 1)", "std, pixels 0 to 1"
    ),
    "blur": Corruption(blur, (0.5, 1.0, 1.5, 2.0), "blur standard deviation in pixels", "std, pixels", in_pixels=True),
    "shift": Corruption(shift, (1, 2, 3, 4), "shift in pixels", "pixels", in_pixels=True),
    "contrast": Corruption(fade, (0.2, 0.4, 0.6, 0.8), "fraction of contrast removed", "fraction removed"),
}
