"""Images between 0 and 1 -> RandAugment (Cubuk et al. 2020) in torchvision's dialect, for a whole batch at once.

Each image draws its operations from torchvision's list of 14; magnitude 9 of 30 means 30 % of each range. Shifts,
shears and rotations are bilinear, with black coming in (torchvision: nearest).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.colour import brighten, change_contrast, saturate
from vitascope.data.warp import warp
from vitascope.shapes import Images

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation"),
    *("contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
MOVES = OPERATIONS[1:6]


def randaugment(images: Images, operation: Tensor, sign: Tensor, magnitude: float) -> Images:
    """`operation` and `sign`: image × round; `magnitude` of 30."""
    images = images.clone()
    for turn in range(operation.shape[1]):
        chosen = {name: operation[:, turn] == number for number, name in enumerate(OPERATIONS)}
        images = _one_round(images, chosen, sign[:, turn] * (magnitude / 30), magnitude / 30)
    return images


def _one_round(images: Images, chosen: dict[str, Tensor], signed: Tensor, strength: float) -> Images:
    moved = torch.stack([chosen[name] for name in MOVES]).any(0)
    images = _changed(images, moved, move, torch.stack([torch.where(chosen[name], signed, 0.0) for name in MOVES], 1))
    for name, change in (("brightness", brighten), ("saturation", saturate), ("contrast", change_contrast)):
        images = _changed(images, chosen[name], change, 1 + 0.9 * signed)
    images = _changed(images, chosen["sharpness"], sharpen, 1 + 0.9 * signed)
    images = _changed(images, chosen["posterize"], lambda some: posterize(some, 8 - round(4 * strength)))
    images = _changed(images, chosen["solarize"], lambda some: solarize(some, 1 - strength))
    images = _changed(images, chosen["autocontrast"], autocontrast)
    return _changed(images, chosen["equalize"], equalize)


def _changed(images: Images, chosen: Tensor, change: Callable[..., Images], *amounts: Tensor) -> Images:
    """`change` to the images that are `chosen`. On a GPU to all, then selected: a recorded step has the same shapes
    every time. A CPU changes those alone, in place."""
    if images.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.where(chosen[:, None, None, None], change(images, *amounts), images)
    where = chosen.nonzero()[:, 0]
    if len(where) == 0:
        return images
    images[where] = change(images[where], *(amount[where] for amount in amounts))
    return images


def move(images: Images, amounts: Tensor) -> Images:
    """Shear by 0.3, shift by 150/331 of the width, rotate by 30°, times the signed strengths (image × MOVES)."""
    shear, shift, turn = amounts[:, :2] * 0.3, amounts[:, 2:4] * (150 / 331), amounts[:, 4] * math.radians(30)
    return warp(images, turn, shear, torch.ones_like(turn), shift)


def solarize(images: Images, threshold: float) -> Images:
    """Bright pixels are turned over."""
    return torch.where(images * 255 >= 255 * threshold, 1 - images, images)


def sharpen(images: Images, factor: Tensor) -> Images:
    """Away from a blurred copy (Pillow's SMOOTH kernel); the outermost pixels stay."""
    blurred = images.clone()
    around = F.avg_pool2d(images, 3, stride=1) * 9
    blurred[:, :, 1:-1, 1:-1] = (around + 4 * images[:, :, 1:-1, 1:-1]) / 13
    return (blurred + (images - blurred) * factor[:, None, None, None]).clamp(0, 1)


def posterize(images: Images, bits: int) -> Images:
    """Keep the highest bits of each byte."""
    step = 2 ** (8 - bits)
    return (images * 255).round().div(step, rounding_mode="floor") * step / 255


def autocontrast(images: Images) -> Images:
    """Stretch each channel to the full range."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-6), images)


def equalize(images: Images) -> Images:
    """Flatten each channel's histogram, by Pillow's rule."""
    batch, channels, height, width = images.shape
    levels = (images * 255).round().long().view(batch * channels, -1)
    counts = torch.zeros(batch * channels, 256, device=images.device).scatter_add_(
        1, levels, torch.ones_like(levels).float()
    )
    last = counts.gather(1, levels.amax(1, keepdim=True))
    step = ((height * width - last) / 255).floor()
    table = ((counts.cumsum(1) - counts + (step / 2).floor()) / step.clamp(min=1)).floor().clamp(0, 255)
    flat = torch.where(step > 0, table.gather(1, levels), levels.float())
    return (flat / 255).view_as(images).to(images.dtype)
