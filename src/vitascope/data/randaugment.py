"""Images between 0 and 1 -> RandAugment (Cubuk et al. 2020) in torchvision's dialect, for a whole batch at once.

Each image draws its operations from torchvision's list of 14; magnitude 9 of 30 means 30 % of each range. Shifts,
shears and rotations are bilinear, with black coming in (torchvision: nearest).
"""

import math

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


def randaugment(images: Images, operation: Tensor, sign: Tensor, magnitude: float) -> Images:
    """`operation` and `sign`: image × round; `magnitude` of 30."""
    for turn in range(operation.shape[1]):
        chosen = {name: operation[:, turn] == number for number, name in enumerate(OPERATIONS)}
        images = _one_round(images, chosen, sign[:, turn] * (magnitude / 30), magnitude / 30)
    return images


def _one_round(images: Images, chosen: dict[str, Tensor], signed: Tensor, strength: float) -> Images:
    images = move(images, chosen, signed)
    for name, change in (("brightness", brighten), ("saturation", saturate), ("contrast", change_contrast)):
        images = _where(chosen[name], change(images, 1 + 0.9 * signed), images)
    images = _where(chosen["sharpness"], sharpen(images, 1 + 0.9 * signed), images)
    images = _where(chosen["posterize"], posterize(images, 8 - round(4 * strength)), images)
    images = _where(chosen["solarize"], torch.where(images * 255 >= 255 * (1 - strength), 1 - images, images), images)
    images = _where(chosen["autocontrast"], autocontrast(images), images)
    return _where(chosen["equalize"], equalize(images), images)


def move(images: Images, chosen: dict[str, Tensor], signed: Tensor) -> Images:
    """Shear by 0.3, shift by 150/331 of the width, rotate by 30°, times the signed strength."""
    amount = {name: torch.where(mask, signed, 0.0) for name, mask in chosen.items()}
    shear = torch.stack([amount["shear_x"], amount["shear_y"]], dim=1) * 0.3
    shift = torch.stack([amount["translate_x"], amount["translate_y"]], dim=1) * (150 / 331)
    moved = warp(images, amount["rotate"] * math.radians(30), shear, torch.ones_like(signed), shift)
    still = sum(chosen[name] for name in OPERATIONS[1:6]) == 0
    return _where(torch.as_tensor(still), images, moved)


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


def _where(chosen: Tensor, changed: Images, images: Images) -> Images:
    return torch.where(chosen[:, None, None, None], changed, images)
