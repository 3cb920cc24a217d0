"""RandAugment (Cubuk et al. 2020) for a batch of images from 0 to 1, with torchvision's operations.

Each image draws its operations from torchvision's list of 14; magnitude 9 of 30 means 30 % of each range. Shifts,
shears and rotations are bilinear and filled with black (torchvision: nearest).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.image_ops import adjust_brightness, adjust_contrast, adjust_saturation, rotate_shear_scale_shift
from vitascope.shapes import Images

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation"),
    *("contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
AFFINE_OPERATIONS = OPERATIONS[1:6]


def apply_randaugment(images: Images, operation_indices: Tensor, signs: Tensor, magnitude: float) -> Images:
    """Apply one operation per image and round. `operation_indices` and `signs`: image × round; `magnitude`: 0 to 30."""
    images = images.clone()
    for step in range(operation_indices.shape[1]):
        masks = {name: operation_indices[:, step] == index for index, name in enumerate(OPERATIONS)}
        images = _apply_randaugment_round(images, masks, signs[:, step] * (magnitude / 30), magnitude / 30)
    return images


def _apply_randaugment_round(
    images: Images, masks_by_operation: dict[str, Bool[Tensor, "batch"]], signed_strengths: Tensor, strength: float
) -> Images:
    """Apply to each image the operation whose mask selects it."""
    is_affine = torch.stack([masks_by_operation[name] for name in AFFINE_OPERATIONS]).any(0)
    images = _transform_selected_images_maybe_in_place(
        images,
        is_affine,
        shear_shift_rotate,
        torch.stack([torch.where(masks_by_operation[name], signed_strengths, 0.0) for name in AFFINE_OPERATIONS], 1),
    )
    for name, transform in (
        ("brightness", adjust_brightness),
        ("saturation", adjust_saturation),
        ("contrast", adjust_contrast),
    ):
        images = _transform_selected_images_maybe_in_place(
            images, masks_by_operation[name], transform, 1 + 0.9 * signed_strengths
        )
    images = _transform_selected_images_maybe_in_place(
        images, masks_by_operation["sharpness"], adjust_sharpness, 1 + 0.9 * signed_strengths
    )
    images = _transform_selected_images_maybe_in_place(
        images, masks_by_operation["posterize"], lambda selected: posterize(selected, 8 - round(4 * strength))
    )
    images = _transform_selected_images_maybe_in_place(
        images, masks_by_operation["solarize"], lambda selected: solarize(selected, 1 - strength)
    )
    images = _transform_selected_images_maybe_in_place(images, masks_by_operation["autocontrast"], autocontrast)
    return _transform_selected_images_maybe_in_place(images, masks_by_operation["equalize"], equalize)


def _transform_selected_images_maybe_in_place(
    images: Images, is_selected: Tensor, transform: Callable[..., Images], *transform_args: Tensor
) -> Images:
    """Apply `transform` to the selected images.

    On a GPU it is computed for all images, because a CUDA graph needs fixed shapes. On a CPU it is applied in place."""
    if images.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.where(is_selected[:, None, None, None], transform(images, *transform_args), images)
    indices = is_selected.nonzero()[:, 0]
    if len(indices) == 0:
        return images
    images[indices] = transform(images[indices], *(values[indices] for values in transform_args))
    return images


def shear_shift_rotate(images: Images, signed_strengths: Tensor) -> Images:
    """Shear by 0.3, shift by 150/331, rotate by 30°, times the signed strengths (image × AFFINE_OPERATIONS)."""
    shears, shifts, angles = (
        signed_strengths[:, :2] * 0.3,
        signed_strengths[:, 2:4] * (150 / 331),
        signed_strengths[:, 4] * math.radians(30),
    )
    return rotate_shear_scale_shift(images, angles, shears, torch.ones_like(angles), shifts)


def solarize(images: Images, threshold: float) -> Images:
    """Invert pixels at or above the threshold."""
    return torch.where(images * 255 >= 255 * threshold, 1 - images, images)


def adjust_sharpness(images: Images, factor: Tensor) -> Images:
    """Scale the difference from a blurred copy (Pillow's SMOOTH kernel); the border pixels are unchanged."""
    blurred = images.clone()
    neighbour_sum = F.avg_pool2d(images, 3, stride=1) * 9
    blurred[:, :, 1:-1, 1:-1] = (neighbour_sum + 4 * images[:, :, 1:-1, 1:-1]) / 13
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
