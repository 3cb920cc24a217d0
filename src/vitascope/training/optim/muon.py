"""Muon (Jordan et al. 2024), batched over matrices of equal shape: all singular values of an update are near 1.

The momentum is orthogonalised by five Newton-Schulz steps; the packed qkv projection counts as three matrices.
"""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict

import torch
from torch import Tensor, nn

from vitascope.recipe.train import TrainConfig
from vitascope.training.optim.adamw import AdamW
from vitascope.training.optim.optimizer import MakeGroups, NamedParams, Optimizer, ParamGroup, split_block_matrices

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic; singular values become about 0.7 to 1.2
NEWTON_SCHULZ_STEPS = 5
GPU_DTYPE = torch.bfloat16  # of the iteration; changing a weight by 1e-7 can change some updates by a tenth


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of each matrix (matrix × row × column) near 1; zero stays zero."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(Optimizer):
    """Muon, for weight matrices only. A group's `parts`: how many matrices a parameter packs along its first axis."""

    def __init__(self, param_groups: list[ParamGroup], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(param_groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1})

    @classmethod
    def build(cls, named_params: NamedParams, config: TrainConfig, make_groups: MakeGroups) -> list[Optimizer]:
        """Muon for the matrices of the blocks, AdamW for the rest."""
        matrices, rest = split_block_matrices(named_params)
        optimizers = AdamW.build(rest, config, make_groups)
        if matrices:
            groups = make_groups(matrices, lambda name: {"parts": count_packed_matrices(name)})
            optimizers.append(cls(groups, config.muon_lr, config.momentum, 0.0))
        return optimizers

    @torch.no_grad()
    def step(self) -> None:
        groups = [
            (group, [param for param in group["params"] if param.grad is not None]) for group in self.param_groups
        ]
        groups = [(group, weights) for group, weights in groups if weights]
        updates, parts = [], []
        for group, weights in groups:
            updates += self._update_momentum_and_compute_nesterov_updates(weights, group["momentum"])
            parts += [group["parts"]] * len(weights)
        steps = iter(orthogonalise_and_scale_updates(updates, parts))
        for group, weights in groups:
            scaled_steps = torch._foreach_mul([next(steps) for _ in weights], group["lr"])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(weights, scaled_steps)

    def _update_momentum_and_compute_nesterov_updates(
        self, weights: list[nn.Parameter], momentum: float
    ) -> list[Tensor]:
        """Update the momentum and return the Nesterov updates: gradients interpolated towards the new momentum."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        averages = [self.state[weight]["momentum"] for weight in weights]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        return list(torch._foreach_lerp(gradients, averages, momentum))


def count_packed_matrices(param_name: str) -> int:
    """Return how many matrices a parameter packs along its first axis: 3 for the qkv projection, else 1."""
    return 3 if param_name.endswith("qkv.weight") else 1


def orthogonalise_and_scale_updates(updates: list[Tensor], matrices_per_update: list[int]) -> list[Tensor]:
    """Orthogonalise all updates, with all matrices of one shape in one batch; tall matrices are transposed.

    Matrices taller than wide are scaled by √(rows/columns) (Jordan). An update may be a stack of matrices, one per
    batched model."""
    indices_by_shape: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for index, (update, count) in enumerate(zip(updates, matrices_per_update, strict=True)):
        rows, columns = update.shape[-2] // count, update.shape[-1]
        indices_by_shape[min(rows, columns), max(rows, columns)][rows > columns].append(index)
    result = list(updates)
    for (short, long), (wide, tall) in indices_by_shape.items():
        matrices = [updates[index].reshape(-1, short, long) for index in wide]
        matrices += [updates[index].reshape(-1, long, short).mT for index in tall]
        stacked, sizes = torch.cat(matrices), [len(stack) for stack in matrices]
        dtype = GPU_DTYPE if stacked.is_cuda else stacked.dtype
        steps = orthogonalise(stacked.to(dtype)).to(stacked.dtype)
        wide_steps, tall_steps = steps.split([sum(sizes[: len(wide)]), sum(sizes[len(wide) :])])
        tall_steps = tall_steps.mT.contiguous().mul_((long / short) ** 0.5)
        pieces = [*wide_steps.split(sizes[: len(wide)]), *tall_steps.split(sizes[len(wide) :])]
        for index, step in zip([*wide, *tall], pieces, strict=True):
            result[index] = step.reshape(updates[index].shape)
    return result
