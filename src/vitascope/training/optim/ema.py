"""Weights over many steps -> their exponential average, which often answers better than the last step's."""

# pyright: reportPrivateImportUsage=false

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

ModelT = TypeVar("ModelT", bound=nn.Module)


class AveragedModel(Generic[ModelT]):
    """A copy of the model whose weights follow by `decay` per step; early on faster, so that the start is forgotten."""

    def __init__(self, model: ModelT) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, decay: float | Tensor) -> None:
        averaged: list[Tensor] = list(self.model.parameters())
        weights: list[Tensor] = list(model.parameters())
        apart = torch._foreach_sub(weights, averaged)
        torch._foreach_mul_(apart, 1 - decay)  # a share on the device would make of a lerp one kernel per weight
        torch._foreach_add_(averaged, apart)


def compute_ema_decay(step: int, max_decay: float) -> float:
    """`step` counts from 0. The decay grows as (1 + step) / (10 + step) until it reaches its value."""
    return min(max_decay, (1 + step) / (10 + step))
