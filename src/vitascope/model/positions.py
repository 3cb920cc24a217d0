"""Where each token stands, as a table that is added to the tokens: learned, sinusoidal, 2-d sin-cos."""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.shapes import PositionTable


def sinusoidal(length: int, width: int) -> PositionTable:
    """(position, feature): sin and cos of position / 10000^(2i/width), interleaved (Vaswani et al. 2017, 3.5)."""
    if width % 2:
        raise UserError(f"Sinusoidal positions pair sines with cosines: width={width} must be even.")
    angles = _angles(torch.arange(length), width // 2)
    return rearrange([angles.sin(), angles.cos()], "part position pair -> position (pair part)")


def sincos2d(grid: tuple[int, int], width: int) -> PositionTable:
    """(position, feature): sin and cos of the column, then of the row (as in He et al. 2022)."""
    if width % 4:
        raise UserError(
            f"2-d sin-cos positions need sines and cosines for two axes: width={width} must be a multiple of 4."
        )
    row, column = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    across, down = _angles(column.flatten(), width // 4), _angles(row.flatten(), width // 4)
    return torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], dim=1)


def position_table(config: ModelConfig) -> nn.Parameter | Tensor | None:
    """What is added to the tokens, 1 × token × feature: a parameter (learned), a fixed table, or nothing."""
    prefix = 0 if config.no_embed_class else config.num_prefix_tokens
    match config.absolute_positions:
        case "learned":
            return nn.Parameter(torch.empty(1, prefix + config.num_patches, config.embed_dim))
        case "sinusoidal":
            return sinusoidal(prefix + config.num_patches, config.embed_dim).float()[None]
        case "sincos2d":
            table = sincos2d(config.grid, config.embed_dim).float()
            return F.pad(table, (0, 0, prefix, 0))[None]  # class and register tokens stand nowhere: zeros
        case _:
            return None


def resample(table: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], prefix_tokens: int = 0) -> Tensor:
    """1 × token × feature for one grid -> the same for another: bicubic, antialiased, prefix rows kept (as timm)."""
    if table.ndim != 3 or table.shape[1] != prefix_tokens + old_grid[0] * old_grid[1]:
        raise UserError(
            f"A table for a {old_grid[0]}×{old_grid[1]} grid and {prefix_tokens} prefix tokens has shape "
            f"[1, {prefix_tokens + old_grid[0] * old_grid[1]}, feature]; this one has {list(table.shape)}."
        )
    if old_grid == new_grid:
        return table
    prefix, patches = table[:, :prefix_tokens], table[:, prefix_tokens:]
    picture = rearrange(patches, "one (row column) feature -> one feature row column", row=old_grid[0])
    picture = F.interpolate(picture.float(), size=new_grid, mode="bicubic", antialias=True)
    resized = rearrange(picture, "one feature row column -> one (row column) feature").to(table.dtype)
    return torch.cat([prefix, resized], dim=1)


def _angles(positions: Tensor, bands: int) -> Tensor:
    """position / 10000^(i/bands), in float64 so that long tables stay exact."""
    frequencies = 10000.0 ** (-torch.arange(bands, dtype=torch.float64) / bands)
    return positions.double()[:, None] * frequencies
