"""Find the attention layers of a user's module and list the variants of attention that are correct."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor, nn

from vitascope.coursework.checker.argument_names import get_source, guess_qkv_role, split_identifier
from vitascope.coursework.checker.reference import (
    ATTENTION_MAP_MISTAKES,
    HEAD_MISTAKES,
    MASK_FILL_MISTAKES,
    MASK_MISTAKES,
    SCALE_MISTAKES,
    ReferenceOptions,
    SimulatedMistake,
)
from vitascope.coursework.checker.weights import (
    PACKED_ROW_ORDERS,
    LinearLayer,
    WeightsByRole,
    assign_weights,
    is_packed,
    list_possible_row_orders,
    list_qkv_assignments,
)

CorrectVariant = tuple[ReferenceOptions, tuple[str, ...]]


def list_attention_variants(module: nn.Module, linear_layers: list[LinearLayer]) -> list[CorrectVariant]:
    """List the correct variants: which weight is which, how the heads are split, an optional causal mask."""
    splits: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({}, ()),
        ({"split": "inside-out"}, ("the features of the heads are interleaved",)),
    ]
    causals: list[tuple[dict[str, Any], tuple[str, ...]]] = [({}, ())]
    if uses_causal_mask(module):
        causals.append(({"causal": True}, ("the module applies a causal mask itself",)))
    return [
        ({"assignment": chosen, **split, **causal}, (*words, *split_words, *causal_words))
        for (chosen, words), (split, split_words), (causal, causal_words) in product(
            list_qkv_assignments(linear_layers), splits, causals
        )
    ]


def uses_causal_mask(module: nn.Module) -> bool:
    """Whether the source code contains tril, triu or the word causal."""
    texts = "".join(
        get_source(type(part)) for part in module.modules() if not type(part).__module__.startswith("torch")
    )
    return "tril" in texts or "triu" in texts or "causal" in texts.lower()


def list_attention_mistakes(
    module: nn.Module, linear_layers: list[LinearLayer], *, has_mask: bool
) -> list[SimulatedMistake]:
    """All mistakes of a multi-head attention with these weights."""
    packed = next((one for one in linear_layers if is_packed(one)), None)
    rows = [] if packed is None else list_row_order_mistakes(list_possible_row_orders(packed.name, False))
    masks = [*MASK_MISTAKES, *MASK_FILL_MISTAKES] if has_mask or uses_causal_mask(module) else []
    return [*SCALE_MISTAKES, *ATTENTION_MAP_MISTAKES, *HEAD_MISTAKES, *rows, *masks]


def list_row_order_mistakes(correct_row_orders: list[str]) -> list[SimulatedMistake]:
    """Other cuts through a packed weight; queries and keys exchanged have a name of their own."""
    cuts = [rows for rows in [*PACKED_ROW_ORDERS, "hd3", "h3d"] if rows not in correct_row_orders and rows != "kqv"]
    return [SimulatedMistake("wrong-in-proj-slice", {"rows": rows}) for rows in cuts]


def guess_single_row_mistake(source: str) -> list[str]:
    """`in_proj_weight[0]` is one row of 3 · width, not the queries' weight (sheet C)."""
    found = re.search(r"(in_proj\w*|qkv\w*\.weight|w_?qkv)\[\s*[012]\s*\]", source)
    return ["wrong-in-proj-slice"] if found else []


def get_reference_weights(linear_layers: list[LinearLayer], options: ReferenceOptions, num_heads: int) -> WeightsByRole:
    """The weights for the reference, with a wrong cut where one is switched on."""
    chosen = options["assignment"]
    if "rows" in options:
        chosen = replace(chosen, row_order=options["rows"])
    return assign_weights(linear_layers, chosen, num_heads)


def select_attention_layers(linear_layers: list[LinearLayer], width: int) -> list[LinearLayer]:
    """Of a block's maps those of attention: packed, square or head-sized; what widens and narrows is the MLP's."""
    packed = [one for one in linear_layers if is_packed(one)]
    named = [one for one in linear_layers if _is_attention_layer_name(one.name)]
    if named:
        rest = [one for one in linear_layers if all(one is not other for other in named)]
        last = [one for one in rest if one.shape == (width, width)]
        lacking = not any(guess_qkv_role(one.name) == "o" for one in named) and len(rest) > 2
        return [*named, *last[:1]] if lacking else named
    squares = [one for one in linear_layers if one.shape == (width, width)]
    return [*packed[:1], *squares[:1]] if packed else squares[:4]


def _is_attention_layer_name(layer_name: str) -> bool:
    words = set(split_identifier(layer_name))
    if words & {"mlp", "ffn", "ff", "feedforward", "feed", "fc", "linear"} and not words & {"attn", "attention", "mha"}:
        return False
    attending = {"attn", "attention", "mha", "msa", "selfattn", "selfattention", "self", "multihead", "sa", "att"}
    return bool(words & attending) or guess_qkv_role(layer_name) in ("q", "k", "v", "qkv")


def get_norm_parameters(norm: nn.Module) -> tuple[Tensor | None, Tensor | None, float]:
    """Weight, bias and epsilon."""
    return getattr(norm, "weight", None), getattr(norm, "bias", None), getattr(norm, "eps", None) or 1e-5
