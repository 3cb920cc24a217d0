"""Tokens -> Tokens: a learned factor per feature, near zero at first (Touvron et al. 2021, CaiT)."""

import torch
from torch import nn

from vitascope.shapes import Tokens


class LayerScale(nn.Module):
    def __init__(self, embed_dim: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.full((embed_dim,), float(start)))

    def forward(self, tokens: Tokens) -> Tokens:
        return (tokens * self.gamma).to(tokens.dtype)

    def extra_repr(self) -> str:
        return f"start={self.start:g}"
