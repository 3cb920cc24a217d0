"""Base class of the optimizers: parameter groups and a state per parameter, and how a run builds them.

`torch.optim` is not used: its first optimizer imports the compiler `torch._dynamo`, which takes seconds.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

from torch import Tensor, nn

if TYPE_CHECKING:
    from vitascope.recipe.train import TrainConfig

ParamGroup = dict[str, Any]  # "params" and the group's settings
NamedParams = list[tuple[str, nn.Parameter]]


class OptimizerStateDict(TypedDict):
    """The state for a checkpoint, as in PyTorch; parameters are counted from 0."""

    state: dict[int, dict[str, Tensor]]
    param_groups: list[ParamGroup]


class MakeGroups(Protocol):
    """Group parameters with the same learning rate factor, weight decay and further settings, given the name."""

    def __call__(
        self, named_params: NamedParams, make_settings: Callable[[str], dict[str, Any]]
    ) -> list[ParamGroup]: ...


class SplitParams(NamedTuple):
    """Trainable parameters in two parts."""

    block_matrices: NamedParams
    rest: NamedParams


def split_block_matrices(named_params: NamedParams) -> SplitParams:
    """Separate the weight matrices of the transformer blocks from the other parameters."""
    return SplitParams(
        [item for item in named_params if is_block_matrix(*item)],
        [item for item in named_params if not is_block_matrix(*item)],
    )


def is_block_matrix(param_name: str, weight: nn.Parameter) -> bool:
    return ".blocks." in f".{param_name}" and weight.ndim == 2


def make_empty_group_settings(_param_name: str) -> dict[str, Any]:
    """Return no further settings, for `MakeGroups`."""
    return {}


class Optimizer:
    """Parameter groups and a state per parameter, with the layout of `torch.optim.Optimizer`."""

    is_capturable: bool = True  # whether a CUDA graph can record the step: it never waits for the device

    def __init__(self, param_groups: list[ParamGroup], defaults: Mapping[str, Any]) -> None:
        self.param_groups: list[ParamGroup] = [{**defaults, **group} for group in param_groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)

    @classmethod
    def build(cls, named_params: NamedParams, config: "TrainConfig", make_groups: MakeGroups) -> "list[Optimizer]":
        """Create the optimizers of all trainable parameters of a model. Reject settings that do not work."""
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    @property
    def params(self) -> list[nn.Parameter]:
        """All parameters, in the order that state dicts count them."""
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def state_dict(self) -> OptimizerStateDict:
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
