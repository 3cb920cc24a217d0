"""Where each patch stands, as an angle that turns its queries and keys: 2-d rotary positions (Su et al. 2021)."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from vitascope.shapes import Heads, Rotation


def rotation(grid: tuple[int, int], width: int, base: float, prefix_tokens: int = 0) -> Rotation:
    """Cosines and sines, token × pair of features: half of the pairs turn with the row, half with the column.

    Feature pairs (0, 1), (2, 3), … turn together. Prefix tokens are not turned.
    """
    places = torch.meshgrid(torch.arange(grid[0]).double(), torch.arange(grid[1]).double(), indexing="ij")
    angles = torch.stack(places)[..., None] * frequencies(width, base)
    angles = rearrange(angles, "side row column band -> (row column) (side band)")
    return torch.stack([_pad(angles.cos(), prefix_tokens, 1.0), _pad(angles.sin(), prefix_tokens, 0.0)]).float()


def frequencies(width: int, base: float) -> Tensor:
    """Of one side's pairs: base^(-i / (width/4)), radians per patch, the fastest first."""
    return base ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))


def rotate(heads: Heads, table: Rotation) -> Heads:
    """Turn each pair of features by its token's angle, in the table's precision."""
    first, second = rearrange(heads, "batch head token (band pair) -> pair batch head token band", pair=2)
    cosine, sine = table
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return rearrange(turned, "pair batch head token band -> batch head token (band pair)").to(heads.dtype)


def _pad(table: Tensor, rows: int, value: float) -> Tensor:
    return F.pad(table, (0, 0, rows, 0), value=value)
