"""PatchTokens -> Tokens: put the class token and the registers in front, add the positions."""

import torch
from torch import Tensor

from vitascope.shapes import PatchTokens, PrefixTokens, Tokens


def concat_prefix_tokens(class_token: Tensor | None, register_tokens: Tensor | None) -> PrefixTokens | None:
    """Class token first, then registers; nothing where the model has neither."""
    parts = [part for part in (class_token, register_tokens) if part is not None]
    return torch.cat(parts, dim=1) if parts else None


def assemble_tokens(
    patch_tokens: PatchTokens, prefix_tokens: PrefixTokens | None, position_table: Tensor | None
) -> Tokens:
    """Prefix and patches in one sequence. A table as long as the patches alone leaves the prefix without positions."""
    if position_table is not None and position_table.shape[1] == patch_tokens.shape[1]:
        patch_tokens, position_table = patch_tokens + position_table, None
    tokens = (
        patch_tokens
        if prefix_tokens is None
        else torch.cat([prefix_tokens.expand(patch_tokens.shape[0], -1, -1), patch_tokens], dim=1)
    )
    return tokens if position_table is None else tokens + position_table
