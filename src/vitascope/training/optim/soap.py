"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv 2409.11321, algorithm 3).

For the matrices of the blocks; AdamW trains the rest. It uses train.lr, train.betas (the paper's: 0.95 and 0.95) and
train.weight_decay. The second beta is also that of the preconditioner.
"""

from typing import Any

import torch
from torch import Tensor

from vitascope.recipe.train import TrainConfig
from vitascope.training.optim.adamw import AdamW
from vitascope.training.optim.optimizer import (
    MakeGroups,
    NamedParams,
    Optimizer,
    ParamGroup,
    make_empty_group_settings,
    split_block_matrices,
)

PRECONDITION_STEPS = 10  # steps between two updates of the eigenbasis
EPS = 1e-8


class Soap(Optimizer):
    """SOAP, for weight matrices only. A group counts its steps as a number, because each tenth step is different."""

    is_capturable = False

    def __init__(
        self, param_groups: list[ParamGroup], lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(param_groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "step": 0})

    @classmethod
    def build(cls, named_params: NamedParams, config: TrainConfig, make_groups: MakeGroups) -> list[Optimizer]:
        """SOAP for the matrices of the blocks, AdamW for the rest."""
        matrices, rest = split_block_matrices(named_params)
        soap = [cls(make_groups(matrices, make_empty_group_settings), config.lr, config.betas)] if matrices else []
        return [*AdamW.build(rest, config, make_groups), *soap]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._init_state_or_update_matrix(param, param.grad, group)
            group["step"] += 1

    def _init_state_or_update_matrix(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one matrix. The first step only sets the eigenbasis, as in the authors' code."""
        state = self.state[weight]  # pyright: ignore[reportArgumentType]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            state["left"], state["right"] = (weight.new_zeros(size, size) for size in weight.shape)
            _update_preconditioners_in_place(state, gradient, group["betas"][1])
            state["left_basis"], state["right_basis"] = (_compute_eigenbasis(state[side]) for side in ("left", "right"))
            return
        _apply_adam_in_eigenbasis(weight, gradient, state, group)
        _update_preconditioners_in_place(state, gradient, group["betas"][1])
        if group["step"] % PRECONDITION_STEPS == 0:
            for side in ("left", "right"):
                state[f"{side}_basis"] = _refine_eigenbasis(state[side], state[f"{side}_basis"])


def _apply_adam_in_eigenbasis(
    weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
) -> None:
    """Rotate gradient and momentum into the eigenbasis, apply Adam, and rotate the step back."""
    (beta1, beta2), step, left, right = group["betas"], group["step"], state["left_basis"], state["right_basis"]
    rotated_gradient = left.T @ gradient @ right
    momentum = state["exp_avg"].lerp_(gradient, 1 - beta1)
    variance = state["exp_avg_sq"].mul_(beta2).addcmul_(rotated_gradient, rotated_gradient, value=1 - beta2)
    scale = (variance / (1 - beta2**step)).sqrt() + EPS
    update = left @ ((left.T @ momentum @ right) / (1 - beta1**step) / scale) @ right.T
    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


def _update_preconditioners_in_place(state: dict[str, Tensor], gradient: Tensor, beta: float) -> None:
    """Average G Gᵀ and Gᵀ G, Shampoo's preconditioners of rows and columns."""
    state["left"].lerp_(gradient @ gradient.T, 1 - beta)
    state["right"].lerp_(gradient.T @ gradient, 1 - beta)


def _compute_eigenbasis(preconditioner: Tensor) -> Tensor:
    """Return the eigenvectors as columns, the largest eigenvalue first, as the power iteration orders them."""
    return torch.linalg.eigh(preconditioner).eigenvectors.flip(1)


def _refine_eigenbasis(preconditioner: Tensor, basis: Tensor) -> Tensor:
    """Improve the eigenvectors by one step of power iteration and a QR decomposition (algorithm 4)."""
    return torch.linalg.qr(preconditioner @ basis).Q
