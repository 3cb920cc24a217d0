"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

It uses train.lr, train.betas and train.weight_decay. An update changes every weight by the learning rate, so it needs a
rate 3 to 10 times smaller than AdamW's and a larger decay. The paper's betas are 0.9 and 0.99.
"""

# pyright: reportPrivateImportUsage=false

import torch

from vitascope.recipe.train import TrainConfig
from vitascope.training.optim.optimizer import MakeGroups, NamedParams, Optimizer, ParamGroup, make_empty_group_settings


class Lion(Optimizer):
    """Lion. Its only state is one momentum per parameter."""

    def __init__(
        self, param_groups: list[ParamGroup], lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(param_groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @classmethod
    def build(cls, named_params: NamedParams, config: TrainConfig, make_groups: MakeGroups) -> list[Optimizer]:
        return [cls(make_groups(named_params, make_empty_group_settings), config.lr, config.betas)]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            gradients, (beta1, beta2) = [param.grad for param in params], group["betas"]
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            momenta = [self.state[param]["exp_avg"] for param in params]
            updates = torch._foreach_mul(momenta, beta1)
            torch._foreach_add_(updates, gradients, alpha=1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(updates, group["lr"])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(params, updates)
            torch._foreach_mul_(momenta, beta2)
            torch._foreach_add_(momenta, gradients, alpha=1 - beta2)
