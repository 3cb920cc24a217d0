"""Gradients of matrices -> steps of one size in every direction: Muon (Jordan et al. 2024), batched over equal shapes.

The momentum is orthogonalised by five Newton-Schulz steps; the packed qkv projection counts as three matrices.
"""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict

import torch
from torch import Tensor, nn

from vitascope.training.optim.adamw import Optimizer, ParamGroup

NEWTON_SCHULZ_COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # quintic; singular values land in about [0.7, 1.2], not exactly at 1
NEWTON_SCHULZ_STEPS = 5
GPU_DTYPE = (
    torch.bfloat16
)  # what is iterated in there; rounding shows: 1e-7 of a weight becomes a tenth of some updates


def orthogonalise(matrices: Tensor) -> Tensor:
    """(matrix, row, column): each matrix's singular values are brought near 1; zero stays zero."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(Optimizer):
    """For weight matrices only. `parts` names how many matrices a parameter packs along its first axis."""

    def __init__(self, param_groups: list[ParamGroup], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(param_groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1})

    @torch.no_grad()
    def step(self) -> None:
        learnt = [(group, [one for one in group["params"] if one.grad is not None]) for group in self.param_groups]
        learnt = [(group, weights) for group, weights in learnt if weights]
        updates, parts = [], []
        for group, weights in learnt:
            updates += self._update_nesterov_momentum(weights, group["momentum"])
            parts += [group["parts"]] * len(weights)
        steps = iter(orthogonalise_updates(updates, parts))
        for group, weights in learnt:
            own = torch._foreach_mul([next(steps) for _ in weights], group["lr"])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(weights, own)

    def _update_nesterov_momentum(self, weights: list[nn.Parameter], momentum: float) -> list[Tensor]:
        """Nesterov: the gradients pulled towards the averages that already contain them."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        averages = [self.state[weight]["momentum"] for weight in weights]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        return list(torch._foreach_lerp(gradients, averages, momentum))


def num_packed_matrices(param_name: str) -> int:
    """How many matrices a parameter packs along its first axis: the qkv projection three."""
    return 3 if param_name.endswith("qkv.weight") else 1


def orthogonalise_updates(updates: list[Tensor], matrices_per_update: list[int]) -> list[Tensor]:
    """All matrices of one shape in one batch, whatever parameter and group they are of, the tall ones laid on their
    side; scaled by √(rows/columns) where taller than wide (Jordan). An update may be a stack of matrices: many
    models'."""
    alike: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for place, (update, count) in enumerate(zip(updates, matrices_per_update, strict=True)):
        rows, columns = update.shape[-2] // count, update.shape[-1]
        alike[min(rows, columns), max(rows, columns)][rows > columns].append(place)
    result = list(updates)
    for (short, long), (wide, tall) in alike.items():
        lying = [updates[place].reshape(-1, short, long) for place in wide]
        lying += [updates[place].reshape(-1, long, short).mT for place in tall]
        stacked, sizes = torch.cat(lying), [len(one) for one in lying]
        low = GPU_DTYPE if stacked.is_cuda else stacked.dtype
        steps = orthogonalise(stacked.to(low)).to(stacked.dtype)
        flat, upright = steps.split([sum(sizes[: len(wide)]), sum(sizes[len(wide) :])])
        upright = upright.mT.contiguous().mul_((long / short) ** 0.5)
        pieces = [*flat.split(sizes[: len(wide)]), *upright.split(sizes[len(wide) :])]
        for place, step in zip([*wide, *tall], pieces, strict=True):
            result[place] = step.reshape(updates[place].shape)
    return result
