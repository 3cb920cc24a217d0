"""Position embeddings (learned, sinusoidal, 2-d sine-cosine) and 2-d rotary positions."""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.shapes import HeadTokens, PositionTable, RotaryTable


def make_sinusoidal_table(num_positions: int, width: int) -> PositionTable:
    """(position, feature): sin and cos of position / 10000^(2i/width), interleaved (Vaswani et al. 2017, 3.5)."""
    if width % 2:
        raise UserError(f"Sinusoidal positions pair sines with cosines: width={width} must be even.")
    angles = _compute_sinusoid_angles(torch.arange(num_positions), width // 2)
    return rearrange([angles.sin(), angles.cos()], "part position pair -> position (pair part)")


def make_sincos2d_table(grid: tuple[int, int], width: int) -> PositionTable:
    """(position, feature): sin and cos of the column, then of the row (as in He et al. 2022)."""
    if width % 4:
        raise UserError(
            f"2-d sin-cos positions need sines and cosines for two axes: width={width} must be a multiple of 4."
        )
    row, column = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    across, down = (
        _compute_sinusoid_angles(column.flatten(), width // 4),
        _compute_sinusoid_angles(row.flatten(), width // 4),
    )
    return torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], dim=1)


def make_absolute_position_table_if_any(config: ModelConfig) -> nn.Parameter | Tensor | None:
    """Return the position embedding, 1 × token × feature: a parameter (learned), a fixed table, or None."""
    prefix = 0 if config.no_embed_class else config.num_prefix_tokens
    match config.absolute_positions:
        case "learned":
            return nn.Parameter(torch.empty(1, prefix + config.num_patches, config.embed_dim))
        case "sinusoidal":
            return make_sinusoidal_table(prefix + config.num_patches, config.embed_dim).float()[None]
        case "sincos2d":
            table = make_sincos2d_table(config.grid, config.embed_dim).float()
            return F.pad(table, (0, 0, prefix, 0))[None]  # class and register tokens have no position: zeros
        case _:
            return None


def resample_position_table(
    table: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], num_prefix_tokens: int = 0
) -> Tensor:
    """Resample a table, 1 × token × feature, to another grid: bicubic, antialiased, prefix rows unchanged (as timm)."""
    if table.ndim != 3 or table.shape[1] != num_prefix_tokens + old_grid[0] * old_grid[1]:
        raise UserError(
            f"A table for a {old_grid[0]}×{old_grid[1]} grid and {num_prefix_tokens} prefix tokens has shape "
            f"[1, {num_prefix_tokens + old_grid[0] * old_grid[1]}, feature]; this one has {list(table.shape)}."
        )
    if old_grid == new_grid:
        return table
    prefix, patches = table[:, :num_prefix_tokens], table[:, num_prefix_tokens:]
    feature_maps = rearrange(patches, "one (row column) feature -> one feature row column", row=old_grid[0])
    feature_maps = F.interpolate(feature_maps.float(), size=new_grid, mode="bicubic", antialias=True)
    resized = rearrange(feature_maps, "one feature row column -> one (row column) feature").to(table.dtype)
    return torch.cat([prefix, resized], dim=1)


def _compute_sinusoid_angles(positions: Tensor, num_frequencies: int) -> Tensor:
    """Return position / 10000^(i / num_frequencies), in float64 so that long tables are exact."""
    frequencies = 10000.0 ** (-torch.arange(num_frequencies, dtype=torch.float64) / num_frequencies)
    return positions.double()[:, None] * frequencies


def make_rotary_table(grid: tuple[int, int], head_width: int, base: float, num_prefix_tokens: int = 0) -> RotaryTable:
    """Return cosines and sines, token × pair of features: half of the pairs rotate with the row, half with the column.

    The pairs are the features (0, 1), (2, 3), … Prefix tokens are not rotated.
    """
    coordinates = torch.meshgrid(torch.arange(grid[0]).double(), torch.arange(grid[1]).double(), indexing="ij")
    angles = torch.stack(coordinates)[..., None] * compute_rotary_frequencies(head_width, base)
    angles = rearrange(angles, "side row column band -> (row column) (side band)")
    return torch.stack(
        [_prepend_rows(angles.cos(), num_prefix_tokens, 1.0), _prepend_rows(angles.sin(), num_prefix_tokens, 0.0)]
    ).float()


def compute_rotary_frequencies(head_width: int, base: float) -> Tensor:
    """Return the frequencies of one axis: base^(-i / (head_width/4)), in radians per patch, the fastest first."""
    return base ** (-torch.arange(head_width // 4, dtype=torch.float64) / (head_width // 4))


def apply_rotary_positions(heads: HeadTokens, rotary_table: RotaryTable) -> HeadTokens:
    """Rotate each pair of features by its token's angle, in the table's precision."""
    first, second = rearrange(heads, "batch head token (band pair) -> pair batch head token band", pair=2)
    cosine, sine = rotary_table
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return rearrange(rotated, "pair batch head token band -> batch head token (band pair)").to(heads.dtype)


def _prepend_rows(table: Tensor, num_rows: int, fill_value: float) -> Tensor:
    return F.pad(table, (0, 0, num_rows, 0), value=fill_value)
