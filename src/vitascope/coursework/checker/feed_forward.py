"""Check the part `feed-forward`: Linear, activation, Linear, as in nn.TransformerEncoderLayer."""

import inspect
import re
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.dot_product import select_matching_or_first_tensor
from vitascope.coursework.checker.layers import get_norm_weight_bias_eps
from vitascope.coursework.checker.module_factory import ModuleFactory
from vitascope.coursework.checker.part_checker import (
    CallConvention,
    Case,
    CorrectVariant,
    MaskPolarity,
    NamedTensors,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
    UserInputs,
    draw_seeded_inputs_for_case,
    format_observation,
)
from vitascope.coursework.checker.recognition import (
    ArgumentRoles,
    UserCode,
    call_by_roles,
    get_source_or_empty,
    guess_argument_roles,
    split_identifier_into_words,
)
from vitascope.coursework.checker.reference import ReferenceVariant, SimulatedMistake
from vitascope.coursework.checker.weights import LinearLayer, find_linear_layers_and_matrices, find_norms

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": F.gelu,
    "ReLU": F.relu,
    "GELU (tanh approximation)": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "tanh": torch.tanh,
    "squared ReLU": lambda x: F.relu(x).square(),
    "GELU (sigmoid approximation)": lambda x: x * torch.sigmoid(1.702 * x),
    "leaky ReLU": F.leaky_relu,
    "ELU": F.elu,
}


def apply_feed_forward(
    x: Tensor, first_layer: LinearLayer, second_layer: LinearLayer, activation: str, transposed_layer_digits: str = ""
) -> Tensor:
    """Compute Linear, activation, Linear."""
    weights = [
        layer.weight.T if str(n) in transposed_layer_digits else layer.weight
        for n, layer in enumerate((first_layer, second_layer), 1)
    ]
    return F.linear(ACTIVATIONS[activation](F.linear(x, weights[0], first_layer.bias)), weights[1], second_layer.bias)


def list_activation_variants() -> list[CorrectVariant]:
    """List all activation functions; GELU is the default, so it needs no assumption."""
    return [
        CorrectVariant({"activation": name}, () if name == "GELU" else (f"the activation function is {name}",))
        for name in ACTIVATIONS
    ]


def list_activation_variants_marking_rare(module: nn.Module) -> list[CorrectVariant]:
    """List all activation functions; those not named in the module's layers or source are marked as rare."""
    texts = [
        get_source_or_empty(type(part)) for part in module.modules() if not type(part).__module__.startswith("torch.")
    ]
    text = "".join([*texts, *map(str, module.modules())]).lower()
    mentioned = [name for name in ACTIVATIONS if re.search(rf"(?<![a-z]){name.split()[0].lower()}", text)]
    if "approximate='tanh'" not in text and 'approximate="tanh"' not in text and "0.044715" not in text:
        mentioned = [name for name in mentioned if name != "GELU (tanh approximation)"]
    if "1.702" not in text:
        mentioned = [name for name in mentioned if name != "GELU (sigmoid approximation)"]
    likely = mentioned or list(ACTIVATIONS)[:2]
    return [
        variant
        if variant.options["activation"] in likely
        else CorrectVariant({**variant.options, "rare_activation": True}, variant.assumptions)
        for variant in list_activation_variants()
    ]


class FeedForwardChecker(PartChecker):
    """Check a class, an instance, or a function f(x, w1, b1, w2, b2)."""

    part = "feed-forward"

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name, self.user_code = name, user_code
        self.is_module = isinstance(user_code, type | nn.Module)
        if self.is_module:
            sizes = {"width": 6, "hidden": 10, "dropout": 0.1, "ratio": 2}
            self.module_factory = ModuleFactory(user_code, sizes, ("width", "hidden"))
            self.module_factory.fixed_sizes.pop("heads", None)
            self.sample_module = self.module_factory.get_or_build_module({})
        else:
            self.argument_roles = _guess_mlp_argument_roles(user_code)

    def get_reference_name(self) -> str:
        return "nn.Linear + activation + nn.Linear"

    def list_cases(self) -> list[Case]:
        cases = [
            Case("five tokens", {"batch": 2, "tokens": 5, "width": 6, "hidden": 10}),
            Case("other sizes", {"batch": 3, "tokens": 7, "width": 5, "hidden": 9}),
            Case("one token", {"batch": 2, "tokens": 1, "width": 6, "hidden": 10}),
        ]
        return self._resize_cases_if_possible(cases)

    def list_tiny_example_cases(self) -> list[Case]:
        sizes = [(1, 1), (1, 2), (2, 3)]
        cases = [Case(f"width {d}, hidden width {h}", _make_tiny_sizes(d, h), tiny=True) for d, h in sizes]
        return self._resize_cases_if_possible(cases)

    def _resize_cases_if_possible(self, cases: list[Case]) -> list[Case]:
        if not self.is_module:
            return cases
        return [adapted for case in cases if (adapted := self.module_factory.resize_case_if_possible(case)) is not None]

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        s = case.sizes
        shapes: dict[str, tuple[int, ...]] = {"x": (s["batch"], s["tokens"], s["width"])}
        if not self.is_module:
            weight_shapes = {"w1": (s["hidden"], s["width"]), "b1": (s["hidden"],)}
            weight_shapes |= {"w2": (s["width"], s["hidden"]), "b2": (s["width"],)}
            shapes |= {role: shape for role, shape in weight_shapes.items() if role in self.argument_roles.values()}
        return draw_seeded_inputs_for_case(case, shapes)

    def list_convention_groups(self) -> list[list[CallConvention]]:
        axis_order = "the input has shape batch × token × feature"
        if self.is_module:
            return [[CallConvention((axis_order,), {"transposed": False})]]
        transposed = "the weights have shape input × output (x @ W)"
        return [
            [CallConvention((axis_order,), {"transposed": False})],
            [CallConvention((axis_order, transposed), {"transposed": True})],
        ]

    def get_or_build_module(self, case: Case) -> nn.Module:
        return self.module_factory.get_or_build_module(case.sizes, self.dtype, self.training)

    def reshape_inputs_for_user_code(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> UserInputs:
        return {name: x.T if convention.settings["transposed"] and name[0] == "w" else x for name, x in inputs.items()}

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        if self.is_module:
            return select_matching_or_first_tensor(
                self.get_or_build_module(case)(inputs["x"]), tuple(inputs["x"].shape)
            )
        values = self.reshape_inputs_for_user_code(convention, case, inputs) | {
            "dropout": 0.0,
            "training": self.training,
        }
        return select_matching_or_first_tensor(
            call_by_roles(self.user_code, values, self.argument_roles), tuple(inputs["x"].shape)
        )

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        x = inputs["x"]
        if not self.is_module:
            layers = [LinearLayer(str(n), inputs[f"w{n}"], inputs.get(f"b{n}")) for n in (1, 2)]
            return apply_feed_forward(
                x, layers[0], layers[1], variant_or_mistakes["activation"], variant_or_mistakes.get("untransposed", "")
            )
        module = self.get_or_build_module(case)
        first, second = get_widening_and_narrowing_layer(find_linear_layers_and_matrices(module), x.shape[-1])
        inner = x
        if variant_or_mistakes.get("norm_inside"):
            inner = F.layer_norm(x, x.shape[-1:], *get_norm_weight_bias_eps(find_norms(module)[0].norm))
        out = apply_feed_forward(
            inner, first, second, variant_or_mistakes["activation"], variant_or_mistakes.get("untransposed", "")
        )
        return out + x if variant_or_mistakes.get("added") else out

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        if not self.is_module:
            return list_activation_variants()
        norms = (
            [CorrectVariant({"norm_inside": True}, ("the module normalises its input itself",))]
            if find_norms(self.sample_module)
            else []
        )
        default = CorrectVariant({}, ())
        residuals = [default, CorrectVariant({"added": True}, ("the module adds the residual connection itself",))]
        return [
            CorrectVariant(
                {**activation.options, **norm.options, **residual.options},
                (*activation.assumptions, *norm.assumptions, *residual.assumptions),
            )
            for activation, norm, residual in product(
                list_activation_variants_marking_rare(self.sample_module), [*norms, default], residuals
            )
        ]

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        return [SimulatedMistake("weight-not-transposed", {"untransposed": layers}) for layers in ("12", "1", "2")]

    def get_user_weights_by_name(self, case: Case) -> NamedTensors:
        return dict(self.get_or_build_module(case).named_parameters()) if self.is_module else {}

    def get_user_parameters(self, convention: CallConvention, case: Case) -> list[Tensor]:
        return list(self.get_or_build_module(case).parameters()) if self.is_module else []

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        case = self.list_cases()[0]
        inputs = {name: tensor.to(self.dtype) for name, tensor in self.make_float64_inputs(case).items()}
        first_token = self.run_user_code_and_restore_axes(convention, case, inputs | {"x": inputs["x"][:, :1]})
        is_independent = first_token.shape == user_result[:, :1].shape and torch.allclose(
            first_token, user_result[:, :1], atol=1e-4
        )
        lines = [format_observation(is_independent, "the output of a token is independent of the other tokens")]
        if self.is_module and len(find_linear_layers_and_matrices(self.sample_module)) != 2:
            num_layers = len(find_linear_layers_and_matrices(self.sample_module))
            lines.append(f"The module has {num_layers} linear layers instead of two.")
        return lines


class MlpLayers(NamedTuple):
    """The two linear layers of an MLP."""

    first: LinearLayer
    second: LinearLayer


def get_widening_and_narrowing_layer(linear_layers: list[LinearLayer], width: int) -> MlpLayers:
    """Return the layer that increases the width and the layer that reduces it."""
    wide = [layer for layer in linear_layers if layer.shape[1] == width and layer.shape[0] != width]
    narrow = [layer for layer in linear_layers if layer.shape[0] == width and layer.shape[1] != width]
    if (
        any(layer.is_raw_parameter for layer in linear_layers)
        and wide
        and narrow
        and linear_layers.index(wide[0]) > linear_layers.index(narrow[0])
    ):
        wide, narrow = [_transpose_layer(narrow[0])], [_transpose_layer(wide[0])]  # raw matrices, input × output
    if not wide and not narrow and len(linear_layers) >= 2:
        return MlpLayers(linear_layers[-2], linear_layers[-1])
    if not wide or not narrow:
        raise RuntimeError("the MLP needs two linear layers: width to hidden width, and hidden width to width")
    return MlpLayers(wide[0], narrow[-1])


def _make_tiny_sizes(width: int, hidden_width: int) -> dict[str, int]:
    return {"batch": 1, "tokens": 1, "width": width, "hidden": hidden_width}


def _transpose_layer(layer: LinearLayer) -> LinearLayer:
    return LinearLayer(layer.name, layer.weight.T, layer.bias, layer.is_raw_parameter)


def _guess_mlp_argument_roles(function: UserCode) -> ArgumentRoles:
    """Return the role of each argument: x first, then weights and biases by name and order."""
    roles = guess_argument_roles(function)
    names = [name for name in roles if roles[name] not in ("dropout", "training")]
    required = [
        n for n in names if inspect.signature(function).parameters[n].default in (inspect.Parameter.empty, None)
    ]
    roles[required[0]] = "x"
    biases = [n for n in required[1:] if n.lower().startswith("b") or "bias" in split_identifier_into_words(n)]
    weights = [n for n in required[1:] if n not in biases]
    roles |= {name: f"w{index}" for index, name in enumerate(weights[:2], 1)}
    return roles | {name: f"b{index}" for index, name in enumerate(biases[:2], 1)}
