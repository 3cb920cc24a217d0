"""Values that change from step to step, such as the learning rate, and the moving average of the weights (EMA).

The exponential moving average is often more accurate than the last weights.
"""

import copy
import math
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from vitascope.recipe.choices import load_objective
from vitascope.recipe.schema import Recipe
from vitascope.recipe.train import TrainConfig

# pyright: reportPrivateImportUsage=false


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


ScheduleValues = dict[str, float | Tensor]
"""Values of one step by name: lr_factor and ema_decay, where used weight_decay, and those of the objective. Numbers, or
tensors on the device in a captured step."""


def compute_lr_factor(step: int, num_steps: int, config: TrainConfig) -> float:
    """Return the learning rate as a fraction of its peak. `step` counts from 0.

    Warm-up reaches 1 at its last step; the last step of the schedule is just above `final_lr`."""
    warm = round(config.warmup * num_steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    falling = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[config.schedule]
    return config.final_lr + (1 - config.final_lr) * falling


def compute_schedule_values(step: int, num_steps: int, recipe: Recipe) -> dict[str, float]:
    """Return the values of a step by name (see `ScheduleValues`)."""
    train, done = recipe.train, step / max(1, num_steps)
    values = {"lr_factor": compute_lr_factor(step, num_steps, train), "ema_decay": compute_ema_decay(step, train.ema)}
    if train.final_weight_decay is not None:
        values["weight_decay"] = interpolate_cosine(train.weight_decay, train.final_weight_decay, done)
    return values | load_objective(train.objective).compute_own_schedule_values(step, num_steps, recipe)


def interpolate_cosine(start: float, end: float, progress: float) -> float:
    """Return the value between `start` and `end` on half a cosine wave. `progress`: 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
