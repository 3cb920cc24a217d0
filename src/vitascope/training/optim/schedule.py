"""A step's number -> what changes from step to step: the rate, the average's decay, and what an objective needs."""

import math

from torch import Tensor

from vitascope.recipe.schema import Recipe
from vitascope.recipe.train import TrainConfig
from vitascope.training.optim.ema import compute_ema_decay

ScheduleValues = dict[str, float | Tensor]  # numbers, or tensors on the device where the step is recorded


def compute_lr_factor(step: int, num_steps: int, config: TrainConfig) -> float:
    """Warm-up reaches 1 at its last step; the schedule's last step is just above `final_lr`."""
    warm = round(config.warmup * num_steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, num_steps - warm)
    falling = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[config.schedule]
    return config.final_lr + (1 - config.final_lr) * falling


def compute_schedule_values(step: int, num_steps: int, recipe: Recipe) -> dict[str, float]:
    """By name. `rate` is a share of the peak; `decay` is the average's."""
    train, dino, done = recipe.train, recipe.dino, step / max(1, num_steps)
    values = {"rate": compute_lr_factor(step, num_steps, train), "decay": compute_ema_decay(step, train.ema)}
    if train.final_weight_decay is not None:
        values["weight_decay"] = interpolate_cosine(train.weight_decay, train.final_weight_decay, done)
    if train.objective == "dino":
        warm = min(1.0, done / dino.teacher_warmup) if dino.teacher_warmup else 1.0
        rise = dino.final_teacher_temperature - dino.teacher_temperature
        values["decay"] = interpolate_cosine(dino.teacher_momentum, 1.0, done)
        values["teacher_temperature"] = dino.teacher_temperature + warm * rise
        values["last_layer"] = float(step >= round(dino.freeze_last * num_steps))
    return values


def interpolate_cosine(start: float, end: float, progress: float) -> float:
    """From `start` to `end`, slowly at both ends."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
