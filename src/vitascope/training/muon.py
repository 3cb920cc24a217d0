"""Gradients of matrices -> steps of one size in every direction: Muon (Jordan et al. 2024), batched over equal shapes.

The momentum is orthogonalised by five Newton-Schulz steps; the packed qkv projection counts as three matrices.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic; singular values land in about [0.7, 1.2], not exactly at 1
STEPS = 5
ON_GPU = torch.bfloat16  # what is iterated in there; rounding shows: 1e-7 of a weight becomes a tenth of some updates


def orthogonalise(matrices: Tensor) -> Tensor:
    """(matrix, row, column): each matrix's singular values are brought near 1; zero stays zero."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For weight matrices only. `parts` names how many matrices a parameter packs along its first axis."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            updates = [self._momentum(weight, weight.grad, group["momentum"]) for weight in weights]
            for weight, update in zip(weights, orthogonalised(updates, group["parts"]), strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * group["lr"])

    def _momentum(self, weight: nn.Parameter, gradient: Tensor, decay: float) -> Tensor:
        """Nesterov: the gradient pulled towards the average that already contains it."""
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        average = state["momentum"].lerp_(gradient, 1 - decay)
        return torch.lerp(gradient, average, decay)


def parts_of(name: str) -> int:
    """How many matrices a parameter packs along its first axis: the qkv projection three."""
    return 3 if name.endswith("qkv.weight") else 1


def orthogonalised(updates: list[Tensor], parts: int) -> list[Tensor]:
    """All matrices of one shape in one batch; scaled by √(rows/columns) where taller than wide (Jordan). An update may
    be a stack of matrices: many models'."""
    shapes: dict[torch.Size, list[int]] = defaultdict(list)
    for index, update in enumerate(updates):
        shapes[update.shape].append(index)
    result = list(updates)
    for shape, places in shapes.items():
        rows, columns = shape[-2] // parts, shape[-1]
        stacked = torch.stack([updates[place] for place in places]).view(-1, rows, columns)
        low = ON_GPU if stacked.is_cuda else stacked.dtype
        steps = orthogonalise(stacked.to(low)).to(stacked.dtype) * max(1.0, rows / columns) ** 0.5
        for place, step in zip(places, steps.view(len(places), *shape), strict=True):
            result[place] = step
    return result
