"""AdamW (Loshchilov & Hutter 2019) through PyTorch's fused kernel, and the optimizer base class that Muon shares.

`torch.optim` is not used: its first optimizer imports the compiler `torch._dynamo`, which takes seconds.
Updates and state dicts are those of `torch.optim.AdamW(fused=True)`, bit by bit.
"""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ParamGroup = dict[str, Any]  # "params" and the group's settings


class Optimizer:
    """Parameter groups and a state per parameter, with the layout of `torch.optim.Optimizer`."""

    def __init__(self, param_groups: list[ParamGroup], defaults: Mapping[str, Any]) -> None:
        self.param_groups: list[ParamGroup] = [{**defaults, **group} for group in param_groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)

    def step(self) -> None:
        raise NotImplementedError

    @property
    def params(self) -> list[nn.Parameter]:
        """All parameters, in the order that state dicts count them."""
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state with parameters as indices, as in PyTorch. Tensors are not copied."""
        indices = {param: index for index, param in enumerate(self.params)}
        groups = [group | {"params": [indices[param] for param in group["params"]]} for group in self.param_groups]
        return {"state": {indices[param]: state for param, state in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the saved tensors to the devices of their parameters."""
        self.param_groups = [
            old | {"params": group["params"]}
            for group, old in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        params = self.params
        self.state.clear()
        for index, state in state_dict["state"].items():
            device = params[index].device
            self.state[params[index]] = {name: tensor.to(device, copy=True) for name, tensor in state.items()}


class AdamW(Optimizer):
    """AdamW for parameters on one device. The learning rate may be a tensor there, so that a CUDA graph can read it."""

    def __init__(
        self, param_groups: list[ParamGroup], lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(param_groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay})

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
