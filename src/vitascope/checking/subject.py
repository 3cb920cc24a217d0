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

from vitascope.checking.reference import Options, Switch

Inputs = dict[str, Tensor]
ALONE = "The output of an image is independent of the other images in the batch"
NOT_ALONE = "The output of an image depends on the other images in the batch"
LARGE_MASKED_SCORES = "masked keys with large scores have no effect"  # name of a case


@dataclass(frozen=True)
class Case:
    """Sizes and a kind of mask; if `required` is False, a failure is reported but does not count."""

    name: str
    sizes: Mapping[str, int]
    mask: str | None = None
    required: bool = True
    tiny: bool = False  # small whole numbers, to be read in an example


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tiny_attention(sizes: list[tuple[int, int, int]], mask: str | None) -> list[Case]:
    """Return small cases for examples; sizes are (width, heads, tokens)."""
    return [
        Case(
            f"{_count(tokens, 'token')} of width {width}, {_count(heads, 'head')}",
            {"batch": 1, "width": width, "heads": heads, "rows": 1, "columns": tokens},
            mask,
            tiny=True,
        )
        for width, heads, tokens in sizes
    ]


@dataclass(frozen=True)
class Way:
    """One way to call the user's code: the assumptions, as text and as settings."""

    words: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


class Subject(ABC):
    """A user's function or class, taken for one of the parts."""

    part: str
    name: str
    training: bool = False
    variants: int | None = None  # of each mistake, tried in pairs; a large part cannot afford all
    dtype: torch.dtype = torch.float64

    @abstractmethod
    def cases(self) -> list[Case]:
        """Many sizes, the most telling first."""

    @abstractmethod
    def inputs(self, case: Case) -> Inputs:
        """The leaves of the computation, float64."""

    @abstractmethod
    def groups(self) -> list[list[Way]]:
        """Ways to call it; the first group that runs is what the user meant."""

    @abstractmethod
    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        """The user's result, axes in our order."""

    @abstractmethod
    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        """The same by the reference, with some mistakes switched on."""

    def as_passed(self, way: Way, case: Case, inputs: Inputs) -> Inputs:
        """The inputs in the shapes in which the user's code gets them."""
        return inputs

    def as_returned(self, way: Way, case: Case, result: Tensor) -> Tensor:
        """A correctly shaped result, with its axes in the order of the user's code."""
        return result

    def tiny_cases(self) -> list[Case]:
        """The smallest first, for the example."""
        return []

    def readings(self, way: Way) -> list[tuple[Options, tuple[str, ...]]]:
        """List the variants that are correct, each with a description."""
        return [({}, ())]

    def switches(self, way: Way) -> list[Switch]:
        """Mistakes this part can have."""
        return []

    def parameters(self, way: Way, case: Case) -> list[Tensor]:
        """The user's own weights, for the gradient."""
        return []

    def weights_shown(self, case: Case) -> Inputs:
        """The user's own weights by name, for a small example."""
        return {}

    def forms(self, way: Way) -> list[Switch]:
        """Mistakes that are seen without running anything: a part that is not there."""
        return []

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        """Describe what was observed about an unknown mistake."""
        return []

    def guessed(self, way: Way | None) -> list[str]:
        """Mistakes that are seen from properties or from the text where no variant has the user's numbers."""
        return []

    def native(self) -> str:
        """PyTorch's layer behind the comparison."""
        return "PyTorch"


def observe(holds: bool, right: str, wrong: str) -> str:
    """A sentence about a property of the user's code that tells whether it is as it should be."""
    return f"{right} (correct)." if holds else f"{wrong} (wrong)."


class Calm(TorchFunctionMode):
    """Dropout does nothing inside; calls of PyTorch's fused attention are remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, torch.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d):
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            self.fused = True
            kwargs = {key: value for key, value in kwargs.items() if key != "dropout_p"}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if func is F.multi_head_attention_forward:
            self.fused = True
            args = (*args[:9], 0.0, *args[10:]) if len(args) > 9 else args
            kwargs = kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        return func(*args, **kwargs)


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """The same draws for the same name, and the user's generator as it was."""
    before = torch.get_rng_state()
    torch.manual_seed(crc32(name.encode()))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def drawn(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> Inputs:
    """Normal numbers, or small whole ones that can be read in an example."""
    with seeded(f"{case.name} {sorted(case.sizes.items())}"):
        if case.tiny:
            return {name: torch.randint(-2, 3, shape).double() for name, shape in shapes.items()}
        return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def shuffle_weights(module: nn.Module) -> None:
    """Replace every parameter by random numbers; initial zeros and ones would hide mistakes."""
    with torch.no_grad(), seeded("weights"):
        for name, parameter in sorted(module.named_parameters()):
            spread = 1.2 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 and "pos" not in name else 0.6
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * spread)
            if parameter.ndim == 1 and "bias" not in name:
                parameter.add_(1.0)
            parameter.copy_(parameter.round(decimals=2))  # to be read in an example


def plain_mask(function: Callable[..., Any], roles: Mapping[str, str]) -> str | None:
    """The mask of a case without one: if the mask is a required argument, a mask that allows everything."""
    parameters = inspect.signature(function).parameters
    insists = any(
        role == "mask" and parameters[name].default is inspect.Parameter.empty for name, role in roles.items()
    )
    return "all" if insists else None


def allowed_pairs(case: Case, queries: int, keys: int) -> Tensor | None:
    """True where a query may attend to a key; each row has an allowed key and, with two or more keys, a masked one."""
    if case.mask is None:
        return None
    if case.mask == "all":
        return torch.ones(queries, keys, dtype=torch.bool)
    if case.mask in ("causal", "loud"):
        return torch.ones(queries, keys, dtype=torch.bool).tril()
    with seeded("mask"):
        allowed = torch.rand(queries, keys) > 0.5
    row = torch.arange(queries)
    allowed[row, row % keys] = True
    allowed[row, (row + 1) % keys] = keys == 1
    return allowed
