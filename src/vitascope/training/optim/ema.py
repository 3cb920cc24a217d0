"""Exponential moving average (EMA) of the weights, which is often more accurate than the last weights."""

# pyright: reportPrivateImportUsage=false

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

ModelT = TypeVar("ModelT", bound=nn.Module)


class AveragedModel(Generic[ModelT]):
    """A copy of the model whose weights are the exponential moving average of the trained weights."""

    def __init__(self, model: ModelT) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module, decay: float | Tensor) -> None:
        averaged: list[Tensor] = list(self.model.parameters())
        weights: list[Tensor] = list(model.parameters())
        differences = torch._foreach_sub(weights, averaged)
        torch._foreach_mul_(
            differences, 1 - decay
        )  # with a tensor as weight, _foreach_lerp_ would launch one kernel per parameter
        torch._foreach_add_(averaged, differences)


def compute_ema_decay(step: int, max_decay: float) -> float:
    """Return the decay of a step, counted from 0: (1 + step) / (10 + step), at most `max_decay`."""
    return min(max_decay, (1 + step) / (10 + step))
