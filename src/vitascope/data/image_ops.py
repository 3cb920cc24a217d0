"""Colour and geometric transforms of image batches, with separate parameters for each image."""

import math

import torch
from jaxtyping import Float
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
