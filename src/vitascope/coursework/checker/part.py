"""The interface of a part: how to call the user's code, and how to compute the correct result."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitascope.coursework.checker.reference import ReferenceOptions, SimulatedMistake

NamedTensors = dict[str, Tensor]
ALONE = "The output of an image is independent of the other images in the batch"
NOT_ALONE = "The output of an image depends on the other images in the batch"
LARGE_MASKED_SCORES = "masked keys with large scores have no effect"  # name of a case


@dataclass(frozen=True)
class Case:
    """Sizes and a kind of mask; if `required` is False, a failure is reported but does not count."""

    name: str
    sizes: Mapping[str, int]
    mask_kind: str | None = None
    required: bool = True
    tiny: bool = False  # small whole numbers, to be read in an example


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def make_tiny_attention_cases(sizes: list[tuple[int, int, int]], mask_kind: str | None) -> list[Case]:
    """Return small cases for examples; sizes are (width, heads, tokens)."""
    return [
        Case(
            f"{_format_count(tokens, 'token')} of width {width}, {_format_count(heads, 'head')}",
            {"batch": 1, "width": width, "heads": heads, "rows": 1, "columns": tokens},
            mask_kind,
            tiny=True,
        )
        for width, heads, tokens in sizes
    ]


@dataclass(frozen=True)
class CallConvention:
    """One way to call the user's code: the assumptions, as text and as settings."""

    assumptions: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


class PartChecker(ABC):
    """A user's function or class, taken for one of the parts."""

    part: str
    name: str
    training: bool = False
    max_variants_per_mistake: int | None = None  # of each mistake, tried in pairs; a large part cannot afford all
    dtype: torch.dtype = torch.float64

    @abstractmethod
    def list_cases(self) -> list[Case]:
        """Many sizes, the most telling first."""

    @abstractmethod
    def make_inputs(self, case: Case) -> NamedTensors:
        """The leaves of the computation, float64."""

    @abstractmethod
    def list_convention_groups(self) -> list[list[CallConvention]]:
        """Ways to call it; the first group that runs is what the user meant."""

    @abstractmethod
    def run_user_code(self, convention: CallConvention, case: Case, inputs: NamedTensors) -> Tensor:
        """The user's result, axes in our order."""

    @abstractmethod
    def run_reference(
        self, convention: CallConvention, case: Case, inputs: NamedTensors, options: ReferenceOptions
    ) -> Tensor:
        """The same by the reference, with some mistakes switched on."""

    def as_passed(self, way: CallConvention, case: Case, inputs: NamedTensors) -> NamedTensors:
        """The inputs in the shapes in which the user's code gets them."""
        return inputs

    def as_returned(self, way: CallConvention, case: Case, result: Tensor) -> Tensor:
        """A correctly shaped result, with its axes in the order of the user's code."""
        return result

    def list_tiny_cases(self) -> list[Case]:
        """The smallest first, for the example."""
        return []

    def list_correct_variants(self, convention: CallConvention) -> list[tuple[ReferenceOptions, tuple[str, ...]]]:
        """List the variants that are correct, each with a description."""
        return [({}, ())]

    def list_simulated_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        """Mistakes this part can have."""
        return []

    def get_user_parameters(self, convention: CallConvention, case: Case) -> list[Tensor]:
        """The user's own weights, for the gradient."""
        return []

    def get_example_weights(self, case: Case) -> NamedTensors:
        """The user's own weights by name, for a small example."""
        return {}

    def find_missing_layers(self, convention: CallConvention) -> list[SimulatedMistake]:
        """Mistakes that are seen without running anything: a part that is not there."""
        return []

    def describe_evidence(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        """Describe what was observed about an unknown mistake."""
        return []

    def guess_mistake_ids(self, convention: CallConvention | None) -> list[str]:
        """Mistakes that are seen from properties or from the text where no variant has the user's numbers."""
        return []

    def get_reference_name(self) -> str:
        """PyTorch's layer behind the comparison."""
        return "PyTorch"


def observe(holds: bool, right: str, wrong: str) -> str:
    """A sentence about a property of the user's code that tells whether it is as it should be."""
    return f"{right} (correct)." if holds else f"{wrong} (wrong)."


class NoDropoutMode(TorchFunctionMode):
    """Dropout does nothing inside; calls of PyTorch's fused attention are remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.called_fused_attention = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, torch.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d):
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            self.called_fused_attention = True
            kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if func is F.multi_head_attention_forward:
            self.called_fused_attention = True
            args = (*args[:9], 0.0, *args[10:]) if len(args) > 9 else args
            kwargs = kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        return func(*args, **kwargs)


@contextmanager
def fork_seeded_rng(seed_name: str) -> Iterator[None]:
    """The same draws for the same name, and the user's generator as it was."""
    before = torch.get_rng_state()
    torch.manual_seed(crc32(seed_name.encode()))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def draw_inputs(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> NamedTensors:
    """Normal numbers, or small whole ones that can be read in an example."""
    with fork_seeded_rng(f"{case.name} {sorted(case.sizes.items())}"):
        if case.tiny:
            return {name: torch.randint(-2, 3, shape).double() for name, shape in shapes.items()}
        return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def randomize_weights(module: nn.Module) -> None:
    """Replace every parameter by random numbers; initial zeros and ones would hide mistakes."""
    with torch.no_grad(), fork_seeded_rng("weights"):
        for name, parameter in sorted(module.named_parameters()):
            spread = 1.2 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 and "pos" not in name else 0.6
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * spread)
            if parameter.ndim == 1 and "bias" not in name:
                parameter.add_(1.0)
            parameter.copy_(parameter.round(decimals=2))  # to be read in an example


def choose_default_mask_kind(function: Callable[..., Any], argument_roles: Mapping[str, str]) -> str | None:
    """The mask of a case without one: if the mask is a required argument, a mask that allows everything."""
    parameters = inspect.signature(function).parameters
    insists = any(
        role == "mask" and parameters[name].default is inspect.Parameter.empty for name, role in argument_roles.items()
    )
    return "all" if insists else None


def make_allowed_mask(case: Case, num_queries: int, num_keys: int) -> Tensor | None:
    """True where a query may attend to a key; each row has an allowed key and, with two or more keys, a masked one."""
    if case.mask_kind is None:
        return None
    if case.mask_kind == "all":
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    if case.mask_kind in ("causal", "loud"):
        return torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    with fork_seeded_rng("mask"):
        allowed = torch.rand(num_queries, num_keys) > 0.5
    row = torch.arange(num_queries)
    allowed[row, row % num_keys] = True
    allowed[row, (row + 1) % num_keys] = num_keys == 1
    return allowed
