"""Colour and geometric transforms of image batches, with separate parameters for each image, and RandAugment.

RandAugment (Cubuk et al. 2020) is for images from 0 to 1, with torchvision's operations. Each image draws its
operations from torchvision's list of 14; magnitude 9 of 30 means 30 % of each range. Shifts, shears and rotations are
bilinear and filled with black (torchvision: nearest).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.dataset import ImageSize
from vitascope.data.sampling import RandomDraws
from vitascope.shapes import Images

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's convert("L")


def to_grayscale(images: Images) -> Float[Tensor, "batch 1 height width"]:
    """Return one channel; images with one channel are unchanged."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def adjust_brightness(images: Images, factor: Tensor) -> Images:
    """Multiply the pixels by a factor per image."""
    return (images * _add_pixel_axes(factor)).clamp(0, 1)


def adjust_contrast(images: Images, factor: Tensor) -> Images:
    """Scale the difference from the image's mean gray value by a factor per image."""
    mean_gray = to_grayscale(images).mean(dim=(1, 2, 3), keepdim=True)
    return (mean_gray + (images - mean_gray) * _add_pixel_axes(factor)).clamp(0, 1)


def adjust_saturation(images: Images, factor: Tensor) -> Images:
    """Scale the difference from each pixel's gray value by a factor per image; gray images are unchanged."""
    gray = to_grayscale(images)
    return (gray + (images - gray) * _add_pixel_axes(factor)).clamp(0, 1)


def rotate_hue(images: Images, turn_fraction: Tensor) -> Images:
    """Rotate colours about the gray axis by a fraction of a turn (Rodrigues' formula); gray images are unchanged."""
    if images.shape[1] == 1:
        return images
    cosine, sine = (_add_pixel_axes(function(turn_fraction * (2 * math.pi))) for function in (torch.cos, torch.sin))
    mean_gray = images.mean(dim=1, keepdim=True)
    cross_product = (images.roll(1, dims=1) - images.roll(-1, dims=1)) / math.sqrt(3)  # with the gray axis
    return (mean_gray + cosine * (images - mean_gray) + sine * cross_product).clamp(0, 1)


def grayscale_selected(images: Images, is_selected: Tensor) -> Images:
    """Convert the selected images to grayscale; the number of channels is unchanged."""
    return torch.where(_add_pixel_axes(is_selected), to_grayscale(images), images)


def solarize_selected(images: Images, is_selected: Tensor) -> Images:
    """Solarize the selected images: invert pixels of 0.5 and above."""
    return torch.where(_add_pixel_axes(is_selected) & (images >= 0.5), 1 - images, images)


def apply_drawn_colour_changes(images: Images, draws: RandomDraws) -> Images:
    """Apply those of brightness, contrast, saturation, hue, grayscale and solarization that have draws."""
    steps = {
        "brightness": adjust_brightness,
        "contrast": adjust_contrast,
        "saturation": adjust_saturation,
        "hue": rotate_hue,
    }
    steps |= {"grayscale": grayscale_selected, "solarize": solarize_selected}
    for name, transform in steps.items():
        if name in draws:
            images = transform(images, draws[name])
    return images


def _add_pixel_axes(values_per_image: Tensor) -> Tensor:
    return values_per_image[:, None, None, None]


def rotate_shear_scale_shift(images: Images, angles: Tensor, shears: Tensor, scales: Tensor, shifts: Tensor) -> Images:
    """Warp each image: `angles` in radians, `shears` along (x, y), `scales`, `shifts` in widths and heights."""
    height, width = images.shape[2:]
    cosine, sine = torch.cos(angles) / scales, torch.sin(angles) / scales
    # Source coordinates of each output pixel, from -1 to 1; height/width preserves angles in non-square images.
    across = torch.stack([cosine, (sine + shears[:, 0]) * height / width, -2 * shifts[:, 0]], dim=1)
    down = torch.stack([(shears[:, 1] - sine) * width / height, cosine, -2 * shifts[:, 1]], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode="zeros", align_corners=False)


def rotate_and_scale(images: Images, angles_and_scales: Float[Tensor, "batch angle_scale"]) -> Images:
    """Rotate each image by its angle in radians, and scale it by its factor."""
    zeros = torch.zeros_like(angles_and_scales)
    return rotate_shear_scale_shift(images, angles_and_scales[:, 0], zeros, angles_and_scales[:, 1], zeros)


def crop_and_resize(
    images: Images,
    draws: Float[Tensor, "batch area_ratio_row_column"],
    area_range: tuple[float, float],
    output_size: ImageSize | None = None,
) -> Float[Tensor, "batch channel output_height output_width"]:
    """Crop a random rectangle of each image and resize it to `output_size`, by default to the image's size.

    Its area is a fraction of the image within `area_range`; its aspect ratio is between 3/4 and 4/3, limited by the
    image. `draws` per image, from 0 to 1: area, ratio, row, column."""
    area = area_range[0] + draws[:, 0] * (area_range[1] - area_range[0])
    ratio = torch.exp((2 * draws[:, 1] - 1) * math.log(4 / 3))
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    zeros = torch.zeros_like(area)
    # Centre of the rectangle in coordinates from -1 to 1; the rectangle lies inside the image.
    across = torch.stack([width, zeros, (2 * draws[:, 3] - 1) * (1 - width)], dim=1)
    down = torch.stack([zeros, height, (2 * draws[:, 2] - 1) * (1 - height)], dim=1)
    shape = [*images.shape[:2], *(output_size or images.shape[2:])]
    grid = F.affine_grid(torch.stack([across, down], dim=1), shape, align_corners=False).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


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
        images = _apply_one_operation_per_image(images, masks, signs[:, step] * (magnitude / 30), magnitude / 30)
    return images


def _apply_one_operation_per_image(
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
