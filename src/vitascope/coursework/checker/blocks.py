"""Check the part `transformer-block`: attention and MLP, pre-norm, with residuals (Dosovitskiy et al. 2021)."""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.attention_modules import AttentionModuleChecker
from vitascope.coursework.checker.feed_forward import (
    apply_feed_forward,
    get_widening_and_narrowing_layer,
    list_activation_variants_marking_rare,
)
from vitascope.coursework.checker.layers import (
    assign_weights_by_variant,
    get_norm_weight_bias_eps,
    list_attention_mistakes,
    list_correct_attention_variants,
    select_attention_layers,
)
from vitascope.coursework.checker.masks import list_plausible_mask_formats
from vitascope.coursework.checker.module_factory import ModuleFactory
from vitascope.coursework.checker.part_checker import (
    CallConvention,
    Case,
    CorrectVariant,
    MaskKind,
    MaskPolarity,
    OutputInReferenceAxes,
    ReferenceInputs,
    choose_mask_kind_if_required,
    make_allowed_mask_if_masked,
)
from vitascope.coursework.checker.recognition import UserCode, guess_argument_roles, split_identifier_into_words
from vitascope.coursework.checker.reference import (
    QueryKeyValue,
    ReferenceVariant,
    SimulatedMistake,
    WeightsByRole,
    run_reference_multi_head_attention_variant,
)
from vitascope.coursework.checker.weights import LinearLayer, find_linear_layers_and_matrices, find_norms

BLOCK_MISTAKES = [
    SimulatedMistake("norm-after", {"order": "after"}),
    SimulatedMistake("norm-after", {"order": "on-branch"}),
    *(SimulatedMistake("missing-residual", {"added": which}) for which in ("", "1", "2", "normed")),
    *(SimulatedMistake("missing-norm", {"normed": which}) for which in ("", "1", "2")),
]


class BlockWeights(NamedTuple):
    """The attention weights and the two linear layers of the MLP."""

    attention: WeightsByRole
    mlp_first: LinearLayer
    mlp_second: LinearLayer


class BlockNorms(NamedTuple):
    """The norm layers before attention and before the MLP; None if the block has none."""

    before_attention: nn.Module | None
    before_mlp: nn.Module | None


_BLOCK_WEIGHTS_CACHE: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], BlockWeights]] = WeakKeyDictionary()


def get_or_find_attention_and_mlp_weights(
    module: nn.Module, variant_or_mistakes: ReferenceVariant, num_heads: int, width: int
) -> BlockWeights:
    """Return the weights of a block; cached if no gradient is needed."""
    if torch.is_grad_enabled():
        return _collect_attention_and_mlp_weights(module, variant_or_mistakes, num_heads, width)
    cache = _BLOCK_WEIGHTS_CACHE.setdefault(module, {})
    key = (variant_or_mistakes["assignment"], variant_or_mistakes.get("rows"), num_heads, width)
    if key not in cache:
        cache[key] = _collect_attention_and_mlp_weights(module, variant_or_mistakes, num_heads, width)
    return cache[key]


def _collect_attention_and_mlp_weights(
    module: nn.Module, variant_or_mistakes: ReferenceVariant, num_heads: int, width: int
) -> BlockWeights:
    linear_layers = find_linear_layers_and_matrices(module)
    attention_layers = select_attention_layers(linear_layers, width)
    others = [layer for layer in linear_layers if all(layer is not other for other in attention_layers)]
    mlp_layers = get_widening_and_narrowing_layer(others, width)
    return BlockWeights(assign_weights_by_variant(attention_layers, variant_or_mistakes, num_heads), *mlp_layers)


def run_reference_block_variant(
    x: Tensor, module: nn.Module, num_heads: int, allowed_mask: Tensor | None, variant_or_mistakes: ReferenceVariant
) -> Tensor:
    """Compute x + attention(norm(x)), then x + mlp(norm(x)), with the weights of the user's module."""
    weights = get_or_find_attention_and_mlp_weights(module, variant_or_mistakes, num_heads, x.shape[-1])
    if variant_or_mistakes.get("causal"):
        allowed_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()

    def apply_attention(y: Tensor) -> Tensor:
        return run_reference_multi_head_attention_variant(
            QueryKeyValue(y, y, y), weights.attention, num_heads, allowed_mask, variant_or_mistakes
        )

    def apply_mlp(y: Tensor) -> Tensor:
        return apply_feed_forward(y, weights.mlp_first, weights.mlp_second, variant_or_mistakes["activation"])

    norms = get_block_norms(module, variant_or_mistakes.get("norms_swapped", False))
    for number, layer in (("1", apply_attention), ("2", apply_mlp)):
        norm = norms[int(number) - 1] if number in variant_or_mistakes.get("normed", "12") else None
        x = _apply_norm_layer_and_residual(
            x, layer, norm, number in variant_or_mistakes.get("added", "12"), variant_or_mistakes
        )
    return x


def _apply_norm_layer_and_residual(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    norm: nn.Module | None,
    has_residual: bool,
    variant_or_mistakes: ReferenceVariant,
) -> Tensor:
    def normalize(y: Tensor) -> Tensor:
        return y if norm is None else F.layer_norm(y, y.shape[-1:], *get_norm_weight_bias_eps(norm))

    if variant_or_mistakes.get("order") == "after":
        return normalize(x + layer(x) if has_residual else layer(x))
    if variant_or_mistakes.get("order") == "on-branch":
        return x + normalize(layer(x)) if has_residual else normalize(layer(x))
    if variant_or_mistakes.get("added") == "normed":
        return normalize(x) + layer(normalize(x))
    return x + layer(normalize(x)) if has_residual else layer(normalize(x))


def get_block_norms(module: nn.Module, swapped: bool) -> BlockNorms:
    """Return the norms before attention and before the MLP, in the order of creation or swapped.

    A single norm is used for both."""
    norms = [norm for _, norm in find_norms(module)]
    if len(norms) < 2:
        return BlockNorms(norms[0], norms[0]) if norms else BlockNorms(None, None)
    return BlockNorms(norms[1], norms[0]) if swapped else BlockNorms(norms[0], norms[1])


def list_correct_block_variants(module: nn.Module, width: int) -> list[CorrectVariant]:
    """List the correct variants: attention, activation function, and which norm belongs to which layer."""
    attention_variants = list_correct_attention_variants(
        module, select_attention_layers(find_linear_layers_and_matrices(module), width)
    )
    swaps = [CorrectVariant({}, ())]
    if len(find_norms(module)) > 1:
        names = [name for name, _ in find_norms(module)][1::-1]
        text = f"{names[0]} is the norm before attention, {names[1]} the norm before the MLP"
        swaps.append(CorrectVariant({"norms_swapped": True}, (text,)))
    return [
        CorrectVariant(
            {**activation.options, **attention.options, **swap.options},
            (*activation.assumptions, *attention.assumptions, *swap.assumptions),
        )
        for swap, attention, activation in product(
            swaps, attention_variants, list_activation_variants_marking_rare(module)
        )
    ]


def find_missing_norm_or_output_projection(module: nn.Module, width: int, has_heads: bool) -> list[SimulatedMistake]:
    """List the layers that are missing."""
    mistakes = []
    attention_layers = select_attention_layers(find_linear_layers_and_matrices(module), width)
    weights = assign_weights_by_variant(
        attention_layers, list_correct_attention_variants(module, attention_layers)[0].options, 1
    )
    if has_heads and "wo" not in weights:
        mistakes.append(SimulatedMistake("missing-output-projection", {"projected": False}))
    if not find_norms(module):
        mistakes.append(SimulatedMistake("missing-norm", {"normed": ""}))
    return mistakes


def list_block_mistakes(module: nn.Module, width: int, *, has_mask: bool = False) -> list[SimulatedMistake]:
    attention_layers = select_attention_layers(find_linear_layers_and_matrices(module), width)
    return [*BLOCK_MISTAKES, *list_attention_mistakes(module, attention_layers, has_mask=has_mask)]


class TransformerBlockChecker(AttentionModuleChecker):
    """Check a class or an instance of a transformer block."""

    part = "transformer-block"
    max_variants_per_mistake = 3
    axis_order_groups = (("batch", "token"),)

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name = name
        sizes = {"width": 12, "heads": 3, "hidden": 20, "ratio": 2, "dropout": 0.1, "batch_first": True, "length": 16}
        sizes |= {"key_width": 4, "value_width": 4}
        self.module_factory = ModuleFactory(user_code, sizes, ("width", "heads", "hidden"))
        self.sample_module = self.module_factory.get_or_build_module({})
        self.argument_roles = guess_argument_roles(self.sample_module.forward)
        masks = [argument for argument, role in self.argument_roles.items() if role == "mask"]
        self.mask_formats = (
            list_plausible_mask_formats(masks[0], type(self.sample_module), mask_polarity) if masks else []
        )
        self.default_mask_kind: MaskKind | None = choose_mask_kind_if_required(
            self.sample_module.forward, self.argument_roles
        )

    def get_reference_name(self) -> str:
        return "nn.TransformerEncoderLayer(norm_first=True)"

    def _get_grid_sizes(self, num_rows: int, num_columns: int) -> dict[str, int]:
        return {}

    @property
    def width(self) -> int:
        return self.module_factory.fixed_sizes.get("width", 12)

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        x = inputs["x"]
        allowed = make_allowed_mask_if_masked(case, x.shape[1], x.shape[1])
        return run_reference_block_variant(
            x, self.get_or_build_module(case), case.sizes["heads"], allowed, variant_or_mistakes
        )

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        return list_correct_block_variants(self.sample_module, self.width)

    def find_missing_layer_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        return find_missing_norm_or_output_projection(self.sample_module, self.width, self.module_factory.has_heads)

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        missing_ids = {mistake.mistake_id for mistake in self.find_missing_layer_mistakes(convention)}
        mistakes = list_block_mistakes(self.sample_module, self.width, has_mask=bool(self.mask_formats))
        return [mistake for mistake in mistakes if mistake.mistake_id not in missing_ids]

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        lines = super().describe_symptoms(convention, user_result, reference_result)
        standard_names = {"weight", "bias"}
        extra_names = [
            n
            for n, p in self.sample_module.named_parameters()
            if p.ndim == 1 and not standard_names & set(split_identifier_into_words(n))
        ]
        return (
            [*lines, f"The module has parameters that a standard block does not have: {', '.join(extra_names)}."]
            if extra_names
            else lines
        )
