"""PatchTokens -> Tokens: put the class token and the registers in front, add the positions."""

import torch
from torch import Tensor

from vitascope.shapes import PatchTokens, Prefix, Tokens


def join_prefix(class_token: Tensor | None, registers: Tensor | None) -> Prefix | None:
    """Class token first, then registers; nothing where the model has neither."""
    parts = [part for part in (class_token, registers) if part is not None]
    return torch.cat(parts, dim=1) if parts else None


def assemble(patches: PatchTokens, prefix: Prefix | None, positions: Tensor | None) -> Tokens:
    """Prefix and patches in one sequence. A table as long as the patches alone leaves the prefix without positions."""
    if positions is not None and positions.shape[1] == patches.shape[1]:
        patches, positions = patches + positions, None
    tokens = patches if prefix is None else torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)
    return tokens if positions is None else tokens + positions
