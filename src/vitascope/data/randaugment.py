"""Images between 0 and 1 -> RandAugment (Cubuk et al. 2020) in torchvision's dialect, for a whole batch at once.

Each image draws its operations from torchvision's list of 14; magnitude 9 of 30 means 30 % of each range. Shifts,
shears and rotations are bilinear, with black coming in (torchvision: nearest).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.image_ops import adjust_brightness, adjust_contrast, adjust_saturation, warp_images
from vitascope.shapes import Images

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation"),
    *("contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
AFFINE_OPERATIONS = OPERATIONS[1:6]


def apply_randaugment(images: Images, operation_indices: Tensor, signs: Tensor, magnitude: float) -> Images:
    """`operation` and `sign`: image × round; `magnitude` of 30."""
    images = images.clone()
    for turn in range(operation_indices.shape[1]):
        chosen = {name: operation_indices[:, turn] == number for number, name in enumerate(OPERATIONS)}
        images = _apply_one_round(images, chosen, signs[:, turn] * (magnitude / 30), magnitude / 30)
    return images


def _apply_one_round(
    images: Images, masks_by_operation: dict[str, Tensor], signed_strengths: Tensor, strength: float
) -> Images:
    moved = torch.stack([masks_by_operation[name] for name in AFFINE_OPERATIONS]).any(0)
    images = _apply_to_selected(
        images,
        moved,
        shear_shift_rotate,
        torch.stack([torch.where(masks_by_operation[name], signed_strengths, 0.0) for name in AFFINE_OPERATIONS], 1),
    )
    for name, change in (
        ("brightness", adjust_brightness),
        ("saturation", adjust_saturation),
        ("contrast", adjust_contrast),
    ):
        images = _apply_to_selected(images, masks_by_operation[name], change, 1 + 0.9 * signed_strengths)
    images = _apply_to_selected(images, masks_by_operation["sharpness"], adjust_sharpness, 1 + 0.9 * signed_strengths)
    images = _apply_to_selected(
        images, masks_by_operation["posterize"], lambda some: posterize(some, 8 - round(4 * strength))
    )
    images = _apply_to_selected(images, masks_by_operation["solarize"], lambda some: solarize(some, 1 - strength))
    images = _apply_to_selected(images, masks_by_operation["autocontrast"], autocontrast)
    return _apply_to_selected(images, masks_by_operation["equalize"], equalize)


def _apply_to_selected(
    images: Images, is_selected: Tensor, transform: Callable[..., Images], *transform_args: Tensor
) -> Images:
    """`change` to the images that are `chosen`. On a GPU to all, then selected: a recorded step has the same shapes
    every time. A CPU changes those alone, in place."""
    if images.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.where(is_selected[:, None, None, None], transform(images, *transform_args), images)
    where = is_selected.nonzero()[:, 0]
    if len(where) == 0:
        return images
    images[where] = transform(images[where], *(amount[where] for amount in transform_args))
    return images


def shear_shift_rotate(images: Images, signed_strengths: Tensor) -> Images:
    """Shear by 0.3, shift by 150/331 of the width, rotate by 30°, times the signed strengths (image × MOVES)."""
    shear, shift, turn = (
        signed_strengths[:, :2] * 0.3,
        signed_strengths[:, 2:4] * (150 / 331),
        signed_strengths[:, 4] * math.radians(30),
    )
    return warp_images(images, turn, shear, torch.ones_like(turn), shift)


def solarize(images: Images, threshold: float) -> Images:
    """Bright pixels are turned over."""
    return torch.where(images * 255 >= 255 * threshold, 1 - images, images)


def adjust_sharpness(images: Images, factor: Tensor) -> Images:
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
