"""PatchTokens -> Tokens: prepend class token and registers, add the position embedding."""

import torch
from torch import Tensor

from vitascope.shapes import PatchTokens, PrefixTokens, Tokens


def concat_prefix_tokens(class_token: Tensor | None, register_tokens: Tensor | None) -> PrefixTokens | None:
    """Return the class token, then the registers; None if the model has neither."""
    parts = [part for part in (class_token, register_tokens) if part is not None]
    return torch.cat(parts, dim=1) if parts else None


def prepend_prefix_and_add_positions(
    patch_tokens: PatchTokens, prefix_tokens: PrefixTokens | None, position_table: Tensor | None
) -> Tokens:
    """Concatenate prefix and patches and add positions. A table of patch length is added to the patches only."""
    if position_table is not None and position_table.shape[1] == patch_tokens.shape[1]:
        patch_tokens, position_table = patch_tokens + position_table, None
    tokens = (
        patch_tokens
        if prefix_tokens is None
        else torch.cat([prefix_tokens.expand(patch_tokens.shape[0], -1, -1), patch_tokens], dim=1)
    )
    return tokens if position_table is None else tokens + position_table
