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
    return torch.einsum("bchw,c->bhw", images, images.new_tensor(LUMA))[:, None]


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
    angle = share * (2 * math.pi)
    cosine, sine = torch.cos(angle)[:, None, None], torch.sin(angle)[:, None, None]
    identity = torch.eye(3, device=images.device)
    cross = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=images.device) / math.sqrt(3)
    turn = cosine * identity + sine * cross + (1 - cosine) / 3
    return torch.einsum("boc,bchw->bohw", turn.to(images.dtype), images).clamp(0, 1)


def jitter(images: Images, draws: Draws) -> Images:
    """Brightness, contrast, saturation, hue, as far as they were drawn."""
    steps = {"brightness": brighten, "contrast": change_contrast, "saturation": saturate, "hue": turn_hue}
    for name, change in steps.items():
        if name in draws:
            images = change(images, draws[name])
    return images


def _per_image(factor: Tensor) -> Tensor:
    return factor[:, None, None, None]
