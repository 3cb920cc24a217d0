"""A step's number -> the share of the peak rate: up in a line, then down by cosine or in a line."""

import math

from vitascope.recipe.train import TrainConfig


def rate_factor(step: int, steps: int, config: TrainConfig) -> float:
    """Warm-up reaches 1 at its last step; the schedule's last step is just above `final_lr`."""
    warm = round(config.warmup * steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    falling = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[config.schedule]
    return config.final_lr + (1 - config.final_lr) * falling
