"""Images and a matrix each -> images turned, sheared, stretched, moved; bilinear, with black coming in."""

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
