"""Define the interface of a part checker: how to call the user's code, and how to compute the correct result."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitascope.coursework.checker.recognition import ArgumentRoles
from vitascope.coursework.checker.reference import ReferenceVariant, SimulatedMistake
from vitascope.coursework.checker.report import RESULT_SIGNS

NamedTensors = dict[str, Tensor]
ReferenceInputs = dict[str, Tensor]  # by role, with the axes in the order of the reference
UserInputs = dict[str, Tensor]  # by role, in the shapes that the user's code expects
OutputInReferenceAxes = Tensor  # the axes are in the order of the reference
MaskPolarity = Literal["allowed", "blocked"]  # the meaning of True in a boolean mask
MaskKind = Literal["all", "random", "causal", "high_scores"]
IMAGES_INDEPENDENT = "the output of an image is independent of the other images in the batch"
LARGE_MASKED_SCORES = "masked keys with large scores have no effect"  # name of a case


@dataclass(frozen=True)
class Case:
    """Input sizes and a kind of mask; if `required` is False, a failure is reported but does not count."""

    name: str
    sizes: Mapping[str, int]
    mask_kind: MaskKind | None = None
    required: bool = True
    tiny: bool = False  # small integer values, readable in an example


class TinySizes(NamedTuple):
    """The sizes of a small example of attention."""

    width: int
    num_heads: int
    num_tokens: int


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def make_tiny_attention_cases(width_heads_tokens: list[TinySizes], mask_kind: MaskKind | None) -> list[Case]:
    """Return one small case for each of the sizes."""
    return [
        Case(
            f"{_format_count(num_tokens, 'token')} of width {width}, {_format_count(num_heads, 'head')}",
            {"batch": 1, "width": width, "heads": num_heads, "rows": 1, "columns": num_tokens},
            mask_kind,
            tiny=True,
        )
        for width, num_heads, num_tokens in width_heads_tokens
    ]


@dataclass(frozen=True)
class CallConvention:
    """How to call the user's code, e.g. axis order and mask format: the assumptions as text and as settings."""

    assumptions: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


class CorrectVariant(NamedTuple):
    """A correct way to implement a part: the options of the reference, and the assumptions as text."""

    options: ReferenceVariant
    assumptions: tuple[str, ...]


class PartChecker(ABC):
    """Call a user's function or class, and the reference for the part that it implements."""

    part: str
    name: str
    training: bool = False
    max_variants_per_mistake: int | None = None  # limit for the search among pairs of mistakes
    dtype: torch.dtype = torch.float64

    @abstractmethod
    def list_cases(self) -> list[Case]:
        """Return the cases to compare, the most informative first."""

    @abstractmethod
    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        """Return the input tensors in float64, drawn with a seed that depends on the case."""

    @abstractmethod
    def list_convention_groups(self) -> list[list[CallConvention]]:
        """List the possible conventions in groups; the first group that runs is used."""

    @abstractmethod
    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        """Return the user's result, with the axes in the reference's order."""

    @abstractmethod
    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        """Return the result of the reference in this correct variant, or with these mistakes simulated."""

    def reshape_inputs_for_user_code(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> UserInputs:
        """Return the inputs in the shapes in which the user's code receives them."""
        return inputs

    def permute_output_to_user_axes(self, convention: CallConvention, case: Case, result: Tensor) -> Tensor:
        """Return a correctly shaped result, with its axes in the order of the user's code."""
        return result

    def list_tiny_example_cases(self) -> list[Case]:
        """Return small cases for the example in the report, the smallest first."""
        return []

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        """List the variants that are correct, each with a description."""
        return [CorrectVariant({}, ())]

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        """List the mistakes that the reference can simulate for this part."""
        return []

    def get_user_parameters(self, convention: CallConvention, case: Case) -> list[Tensor]:
        """Return the weights of the user's module, to compare their gradients."""
        return []

    def get_user_weights_by_name(self, case: Case) -> NamedTensors:
        """Return the weights of the user's module by name, for a small example."""
        return {}

    def find_missing_layer_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        """Return the mistakes that are visible without running the code: missing layers."""
        return []

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        """Describe what was observed about an unknown mistake."""
        return []

    def guess_mistake_ids_without_simulation(self, convention: CallConvention | None) -> list[str]:
        """Guess mistakes from properties or source code if no simulated mistake reproduces the result."""
        return []

    def get_reference_name(self) -> str:
        """Return the name of the PyTorch layer that the code is compared with."""
        return "PyTorch"


def format_observation(is_correct: bool, requirement: str) -> str:
    """Mark a requirement as in the list of checks: "✗ the rows of the attention weights sum to 1"."""
    return f"{RESULT_SIGNS[is_correct]} {requirement}"


class NoDropoutMode(TorchFunctionMode):
    """Disable dropout inside the context, and record whether PyTorch's fused attention is called."""

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
def seed_torch_rng_from_text_temporarily(seed_text: str) -> Iterator[None]:
    """Seed the random generator by a name; restore its state afterwards."""
    before = torch.get_rng_state()
    torch.manual_seed(crc32(seed_text.encode()))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def draw_seeded_inputs_for_case(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> ReferenceInputs:
    """Draw normally distributed values, or small integers if the case is tiny."""
    with seed_torch_rng_from_text_temporarily(f"{case.name} {sorted(case.sizes.items())}"):
        if case.tiny:
            return {name: torch.randint(-2, 3, shape).double() for name, shape in shapes.items()}
        return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def set_seeded_random_weights(module: nn.Module) -> None:
    """Replace every parameter by random values; initial zeros and ones would hide mistakes."""
    with torch.no_grad(), seed_torch_rng_from_text_temporarily("weights"):
        for name, parameter in sorted(module.named_parameters()):
            spread = 1.2 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 and "pos" not in name else 0.6
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * spread)
            if parameter.ndim == 1 and "bias" not in name:
                parameter.add_(1.0)
            parameter.copy_(parameter.round(decimals=2))  # readable in an example


def choose_mask_kind_if_required(function: Callable[..., Any], argument_roles: ArgumentRoles) -> MaskKind | None:
    """Return "all" (a mask that allows everything) if the mask is a required argument, else None."""
    parameters = inspect.signature(function).parameters
    is_required = any(
        role == "mask" and parameters[name].default is inspect.Parameter.empty for name, role in argument_roles.items()
    )
    return "all" if is_required else None


def make_allowed_mask_if_masked(case: Case, num_queries: int, num_keys: int) -> Tensor | None:
    """Return a mask that is True where a query may attend to a key.

    Each row has an allowed key and, with two or more keys, a blocked one."""
    if case.mask_kind is None:
        return None
    if case.mask_kind == "all":
        return torch.ones(num_queries, num_keys, dtype=torch.bool)
    if case.mask_kind in ("causal", "high_scores"):
        return torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    with seed_torch_rng_from_text_temporarily("mask"):
        allowed = torch.rand(num_queries, num_keys) > 0.5
    row = torch.arange(num_queries)
    allowed[row, row % num_keys] = True
    allowed[row, (row + 1) % num_keys] = num_keys == 1
    return allowed
