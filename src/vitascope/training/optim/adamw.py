"""AdamW (Loshchilov & Hutter 2019) through PyTorch's fused kernel.

Updates and state dicts are those of `torch.optim.AdamW(fused=True)`, bit by bit.
"""

# pyright: reportPrivateImportUsage=false

import torch
from torch import Tensor, nn

from vitascope.recipe.train import TrainConfig
from vitascope.training.optim.optimizer import MakeGroups, NamedParams, Optimizer, ParamGroup, make_empty_group_settings


class AdamW(Optimizer):
    """AdamW for parameters on one device. The learning rate may be a tensor there, so that a CUDA graph can read it."""

    def __init__(
        self, param_groups: list[ParamGroup], lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(param_groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay})

    @classmethod
    def build(cls, named_params: NamedParams, config: TrainConfig, make_groups: MakeGroups) -> list[Optimizer]:
        return [cls(make_groups(named_params, make_empty_group_settings), config.lr, config.betas)]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            states = [self._get_or_init_state(param) for param in params]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _get_or_init_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), device=param.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state
