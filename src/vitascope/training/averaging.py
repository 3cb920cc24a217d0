"""Weights over many steps -> their exponential average, which often answers better than the last step's."""

import copy

import torch
from torch import Tensor, nn


class Average:
    """A copy of the model whose weights follow by `decay` per step; early on faster, so that the start is forgotten."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def follow(self, model: nn.Module, step: int) -> None:
        """`step` counts from 0. The decay grows as (1 + step) / (10 + step) until it reaches its value."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averaged: list[Tensor] = list(self.model.parameters())
        weights: list[Tensor] = list(model.parameters())
        torch._foreach_lerp_(averaged, weights, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
