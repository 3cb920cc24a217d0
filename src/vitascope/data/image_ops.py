"""Change the colours of images, and warp them: each image of a batch by its own factor or matrix."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.sampling import RandomDraws
from vitascope.shapes import Images

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's convert("L")


def to_grayscale(images: Images) -> Float[Tensor, "batch one height width"]:
    """One channel, or the images themselves where they have one."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def adjust_brightness(images: Images, factor: Tensor) -> Images:
    return (images * _add_pixel_axes(factor)).clamp(0, 1)


def adjust_contrast(images: Images, factor: Tensor) -> Images:
    """Away from, or towards, the image's mean grey."""
    middle = to_grayscale(images).mean(dim=(1, 2, 3), keepdim=True)
    return (middle + (images - middle) * _add_pixel_axes(factor)).clamp(0, 1)


def adjust_saturation(images: Images, factor: Tensor) -> Images:
    """Away from, or towards, each pixel's own grey; grey images stay."""
    plain = to_grayscale(images)
    return (plain + (images - plain) * _add_pixel_axes(factor)).clamp(0, 1)


def rotate_hue(images: Images, turn_fraction: Tensor) -> Images:
    """Turn colours about the grey axis by a share of the full circle (Rodrigues' formula); grey images stay."""
    if images.shape[1] == 1:
        return images
    cosine, sine = (_add_pixel_axes(part(turn_fraction * (2 * math.pi))) for part in (torch.cos, torch.sin))
    middle = images.mean(dim=1, keepdim=True)
    beside = (images.roll(1, dims=1) - images.roll(-1, dims=1)) / math.sqrt(3)  # the cross product with the grey axis
    return (middle + cosine * (images - middle) + sine * beside).clamp(0, 1)


def grayscale_selected(images: Images, is_selected: Tensor) -> Images:
    return torch.where(_add_pixel_axes(is_selected), to_grayscale(images), images)


def solarize_selected(images: Images, is_selected: Tensor) -> Images:
    """Solarize the chosen images: what is brighter than one half becomes as dark as it was bright."""
    return torch.where(_add_pixel_axes(is_selected) & (images >= 0.5), 1 - images, images)


def apply_colour_jitter(images: Images, draws: RandomDraws) -> Images:
    """Brightness, contrast, saturation, hue, and some without colour or solarized, as far as they were drawn."""
    steps = {
        "brightness": adjust_brightness,
        "contrast": adjust_contrast,
        "saturation": adjust_saturation,
        "hue": rotate_hue,
    }
    steps |= {"grey": grayscale_selected, "solarize": solarize_selected}
    for name, change in steps.items():
        if name in draws:
            images = change(images, draws[name])
    return images


def _add_pixel_axes(values_per_image: Tensor) -> Tensor:
    return values_per_image[:, None, None, None]


def warp_images(images: Images, angles: Tensor, shears: Tensor, scales: Tensor, shifts: Tensor) -> Images:
    """Per image: `turn` in radians, `stretch` a factor, `shear` and `move` along (x, y), in widths and heights."""
    height, width = images.shape[2:]
    cosine, sine = torch.cos(angles) / scales, torch.sin(angles) / scales
    # Where each output pixel comes from, in coordinates from -1 to 1; height/width keeps angles on oblong images.
    across = torch.stack([cosine, (sine + shears[:, 0]) * height / width, -2 * shifts[:, 0]], dim=1)
    down = torch.stack([(shears[:, 1] - sine) * width / height, cosine, -2 * shifts[:, 1]], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode="zeros", align_corners=False)


def rotate_and_scale(images: Images, angles_and_scales: Float[Tensor, "batch two"]) -> Images:
    """`draw` per image: an angle in radians and a factor."""
    still = torch.zeros_like(angles_and_scales)
    return warp_images(images, angles_and_scales[:, 0], still, angles_and_scales[:, 1], still)


def crop_and_resize(
    images: Images,
    draws: Float[Tensor, "batch four"],
    area_range: tuple[float, float],
    output_size: tuple[int, int] | None = None,
) -> Float[Tensor, "batch channel rows columns"]:
    """A rectangle of each image, enlarged to `size` (or to the image's own): its share of the area from … to, its sides
    in a ratio between 3/4 and 4/3 as far as they fit. `draw` per image, from 0 to 1: area, ratio, row, column."""
    share = area_range[0] + draws[:, 0] * (area_range[1] - area_range[0])
    ratio = torch.exp((2 * draws[:, 1] - 1) * math.log(4 / 3))
    width, height = (share * ratio).sqrt().clamp(max=1), (share / ratio).sqrt().clamp(max=1)
    still = torch.zeros_like(share)
    # The middle of the rectangle in coordinates from -1 to 1, such that all of it lies inside.
    across = torch.stack([width, still, (2 * draws[:, 3] - 1) * (1 - width)], dim=1)
    down = torch.stack([still, height, (2 * draws[:, 2] - 1) * (1 - height)], dim=1)
    shape = [*images.shape[:2], *(output_size or images.shape[2:])]
    grid = F.affine_grid(torch.stack([across, down], dim=1), shape, align_corners=False).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
