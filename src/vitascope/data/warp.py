"""Images and a matrix each -> images turned, sheared, stretched, moved; bilinear, with black coming in."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitascope.shapes import Images


def warp(images: Images, turn: Tensor, shear: Tensor, stretch: Tensor, move: Tensor) -> Images:
    """Per image: `turn` in radians, `stretch` a factor, `shear` and `move` along (x, y), in widths and heights."""
    height, width = images.shape[2:]
    cosine, sine = torch.cos(turn) / stretch, torch.sin(turn) / stretch
    # Where each output pixel comes from, in coordinates from -1 to 1; height/width keeps angles on oblong images.
    across = torch.stack([cosine, (sine + shear[:, 0]) * height / width, -2 * move[:, 0]], dim=1)
    down = torch.stack([(shear[:, 1] - sine) * width / height, cosine, -2 * move[:, 1]], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode="zeros", align_corners=False)


def turn_and_stretch(images: Images, draw: Float[Tensor, "batch two"]) -> Images:
    """`draw` per image: an angle in radians and a factor."""
    still = torch.zeros_like(draw)
    return warp(images, draw[:, 0], still, draw[:, 1], still)


def cut_out(
    images: Images, draw: Float[Tensor, "batch four"], area: tuple[float, float], size: tuple[int, int] | None = None
) -> Float[Tensor, "batch channel rows columns"]:
    """A rectangle of each image, enlarged to `size` (or to the image's own): its share of the area from … to, its sides
    in a ratio between 3/4 and 4/3 as far as they fit. `draw` per image, from 0 to 1: area, ratio, row, column."""
    share = area[0] + draw[:, 0] * (area[1] - area[0])
    ratio = torch.exp((2 * draw[:, 1] - 1) * math.log(4 / 3))
    width, height = (share * ratio).sqrt().clamp(max=1), (share / ratio).sqrt().clamp(max=1)
    still = torch.zeros_like(share)
    # The middle of the rectangle in coordinates from -1 to 1, such that all of it lies inside.
    across = torch.stack([width, still, (2 * draw[:, 3] - 1) * (1 - width)], dim=1)
    down = torch.stack([still, height, (2 * draw[:, 2] - 1) * (1 - height)], dim=1)
    shape = [*images.shape[:2], *(size or images.shape[2:])]
    grid = F.affine_grid(torch.stack([across, down], dim=1), shape, align_corners=False).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
