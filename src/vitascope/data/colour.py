"""Images between 0 and 1 -> the same scenes in other light, each image by its own factor."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from vitascope.data.draws import Draws
from vitascope.shapes import Images

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow's convert("L")


def grey(images: Images) -> Float[Tensor, "batch one height width"]:
    """One channel, or the images themselves where they have one."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, dim=1)
    return LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue


def brighten(images: Images, factor: Tensor) -> Images:
    return (images * _per_image(factor)).clamp(0, 1)


def change_contrast(images: Images, factor: Tensor) -> Images:
    """Away from, or towards, the image's mean grey."""
    middle = grey(images).mean(dim=(1, 2, 3), keepdim=True)
    return (middle + (images - middle) * _per_image(factor)).clamp(0, 1)


def saturate(images: Images, factor: Tensor) -> Images:
    """Away from, or towards, each pixel's own grey; grey images stay."""
    plain = grey(images)
    return (plain + (images - plain) * _per_image(factor)).clamp(0, 1)


def turn_hue(images: Images, share: Tensor) -> Images:
    """Turn colours about the grey axis by a share of the full circle (Rodrigues' formula); grey images stay."""
    if images.shape[1] == 1:
        return images
    cosine, sine = (_per_image(part(share * (2 * math.pi))) for part in (torch.cos, torch.sin))
    middle = images.mean(dim=1, keepdim=True)
    beside = (images.roll(1, dims=1) - images.roll(-1, dims=1)) / math.sqrt(3)  # the cross product with the grey axis
    return (middle + cosine * (images - middle) + sine * beside).clamp(0, 1)


def lose_colour(images: Images, chosen: Tensor) -> Images:
    return torch.where(_per_image(chosen), grey(images), images)


def invert_bright(images: Images, chosen: Tensor) -> Images:
    """Solarize the chosen images: what is brighter than one half becomes as dark as it was bright."""
    return torch.where(_per_image(chosen) & (images >= 0.5), 1 - images, images)


def jitter(images: Images, draws: Draws) -> Images:
    """Brightness, contrast, saturation, hue, and some without colour or solarized, as far as they were drawn."""
    steps = {"brightness": brighten, "contrast": change_contrast, "saturation": saturate, "hue": turn_hue}
    steps |= {"grey": lose_colour, "solarize": invert_bright}
    for name, change in steps.items():
        if name in draws:
            images = change(images, draws[name])
    return images


def _per_image(factor: Tensor) -> Tensor:
    return factor[:, None, None, None]
