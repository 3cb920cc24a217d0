"""Compute reference attention, with an option to simulate every known mistake, or two mistakes together.

A `ReferenceVariant` lists the deviations from the paper by name: a correct variant, simulated mistakes, or both. An
empty one gives the paper's computation; the tests compare it with PyTorch's layers.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ReferenceVariant = Mapping[str, Any]  # deviations from the paper: a correct variant, simulated mistakes, or both
WeightsByRole = Mapping[str, Tensor | None]  # weights wq, wk, wv, wo and biases bq, bk, bv, bo


class QueryKeyValue(NamedTuple):
    """The inputs of the three projections; all are the same tensor in self-attention."""

    query: Tensor
    key: Tensor
    value: Tensor


class SimulatedMistake(NamedTuple):
    """The id of a mistake, and the reference options that reproduce it."""

    mistake_id: str
    options: dict[str, Any]


# Attention between features: scores transposed or not, map transposed or not, scaled by tokens or features.
FEATURE_ATTENTION_VARIANTS = list(product((False, True), (False, True), (False, True)))
WRONG_MASK_FILLS = [
    0.0,
    1e-9,
    -1e-9,
    -1e-6,
    1.0,
    -0.5,
    *(-float(n) for n in range(1, 21)),
    -25.0,
    -30.0,
    -40.0,
    -50.0,
    -64.0,
]
WRONG_MASK_FILLS += [-80.0, -99.0, -100.0, -128.0, -150.0, -200.0]

SCALE_MISTAKES = [
    SimulatedMistake("missing-scale", {"scale_missing": True}),
    SimulatedMistake("scale-by-width", {"scale_width": "full"}),
    SimulatedMistake("scale-not-sqrt", {"scale_power": 1.0}),
]
ATTENTION_MAP_MISTAKES = [
    SimulatedMistake("softmax-over-queries", {"softmax": -2}),
    SimulatedMistake("query-key-swapped", {"swapped": True}),
    *(SimulatedMistake("feature-attention", {"features": index}) for index in range(len(FEATURE_ATTENTION_VARIANTS))),
]
HEAD_MISTAKES = [
    SimulatedMistake("softmax-over-heads", {"softmax": -3}),
    *(
        SimulatedMistake("heads-not-transposed", {"split": split} | ({"join": join} if join else {}))
        for split, join in (("left", ""), ("left", "back"), ("cut", ""), ("cut", "cut"))
    ),
    *(SimulatedMistake("heads-joined-wrongly", {"join": join}) for join in ("cut", "inside-out")),
    SimulatedMistake("missing-output-projection", {"projected": False}),
    *(
        SimulatedMistake("weight-not-transposed", {"untransposed": roles})
        for roles in ("qkvo", "qkv", "o", "q", "k", "v")
    ),
]
IGNORED_MASK = SimulatedMistake("unknown", {"ignored": True})  # an ignored mask has no mistake id
MASK_MISTAKES = [
    IGNORED_MASK,
    *(
        SimulatedMistake(name, {"mask_change": change, "fill": fill})
        for name, change in (("mask-inverted", "not"), ("mask-transposed", "transposed"))
        for fill in (None, ("put", -1e9), ("add", -1e9))
    ),
    SimulatedMistake("mask-after-softmax", {"masked_weights": "zero"}),
    SimulatedMistake("mask-after-softmax", {"masked_weights": "add"}),
]
MASK_FILL_MISTAKES = [
    SimulatedMistake("mask-too-small", {"fill": (method, fill)})
    for fill in WRONG_MASK_FILLS
    for method in ("put", "add")
]


MISTAKE_OPTION_NAMES = {
    option_name
    for mistake in [*SCALE_MISTAKES, *ATTENTION_MAP_MISTAKES, *HEAD_MISTAKES, *MASK_MISTAKES, *MASK_FILL_MISTAKES]
    for option_name in mistake.options
}
MASK_OPTION_NAMES = {"mask_change", "fill", "masked_weights", "ignored"}


def is_free_of_attention_mistakes(variant_or_mistakes: ReferenceVariant) -> bool:
    """Return whether the options simulate no mistake of attention."""
    return not MISTAKE_OPTION_NAMES & variant_or_mistakes.keys()


def attend_with_simulated_mistakes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed_mask: Tensor | None,
    variant_or_mistakes: ReferenceVariant,
    num_heads: int | None = None,
) -> Tensor:
    """(…, head, query, width), … -> (…, head, query, width).

    `allowed_mask` is True where a query may attend to a key; `num_heads` matters only for wrong scales."""
    if is_free_of_attention_mistakes(variant_or_mistakes):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed_mask)
    if variant_or_mistakes.get("swapped"):
        query, key = key, query
    width = query.shape[-1]
    if "features" in variant_or_mistakes:
        return _attend_over_features(query, key, value, variant_or_mistakes)
    if variant_or_mistakes.get("scale_width") == "full" and query.ndim > 2:
        width *= query.shape[-3] if num_heads is None else num_heads
    scores = query @ key.transpose(-2, -1) * _compute_score_scale(width, variant_or_mistakes)
    axis = variant_or_mistakes.get("softmax", -1)
    if allowed_mask is None or variant_or_mistakes.get("ignored"):
        return scores.softmax(dim=axis) @ value
    allowed_mask = {"not": ~allowed_mask, "transposed": allowed_mask.transpose(-2, -1)}.get(
        variant_or_mistakes.get("mask_change", ""), allowed_mask
    )
    if "masked_weights" in variant_or_mistakes:
        maps = scores.softmax(dim=axis)
        return (
            maps * allowed_mask
            if variant_or_mistakes["masked_weights"] == "zero"
            else maps.where(allowed_mask, -torch.inf)
        ) @ value
    method, fill = variant_or_mistakes.get("fill") or ("put", -torch.inf)
    masked = scores.where(allowed_mask, fill if method == "put" else scores + fill)
    return masked.softmax(dim=axis) @ value


def _compute_score_scale(width: int, variant_or_mistakes: ReferenceVariant) -> float:
    return 1.0 if variant_or_mistakes.get("scale_missing") else width ** -variant_or_mistakes.get("scale_power", 0.5)


def _attend_over_features(query: Tensor, key: Tensor, value: Tensor, variant_or_mistakes: ReferenceVariant) -> Tensor:
    scores_transposed, map_transposed, scaled_by_tokens = FEATURE_ATTENTION_VARIANTS[variant_or_mistakes["features"]]
    scores = (key if scores_transposed else query).transpose(-2, -1) @ (query if scores_transposed else key)
    maps = (scores * _compute_score_scale(query.shape[-2 if scaled_by_tokens else -1], variant_or_mistakes)).softmax(
        dim=variant_or_mistakes.get("softmax", -1)
    )
    return value @ (maps.transpose(-2, -1) if map_transposed else maps)


def run_reference_multi_head_attention_variant(
    query_key_value: QueryKeyValue,
    weights: WeightsByRole,
    num_heads: int,
    allowed_mask: Tensor | None,
    variant_or_mistakes: ReferenceVariant,
) -> Tensor:
    """(batch, token, feature) three times -> (batch, token, feature). Weights have shape output × input."""
    output_weight = weights.get("wo")
    if (
        is_free_of_attention_mistakes(variant_or_mistakes)
        and output_weight is not None
        and _can_use_torch_attention(weights)
    ):
        return _run_torch_multi_head_attention(query_key_value, weights, output_weight, num_heads, allowed_mask)
    query, key, value = (
        project_tokens_if_role_has_weight(x, weights, role, variant_or_mistakes)
        for x, role in zip(query_key_value, "qkv", strict=True)
    )
    if query.shape[-1] % num_heads:
        raise RuntimeError("the width is not divisible by the number of heads")
    query, key, value = (split_heads_by_variant(x, num_heads, variant_or_mistakes) for x in (query, key, value))
    joined = join_heads_by_variant(
        attend_with_simulated_mistakes(query, key, value, allowed_mask, variant_or_mistakes, num_heads),
        variant_or_mistakes,
    )
    return (
        joined
        if variant_or_mistakes.get("projected") is False
        else project_tokens_if_role_has_weight(joined, weights, "o", variant_or_mistakes)
    )


def _can_use_torch_attention(weights: WeightsByRole) -> bool:
    shapes = {None if (weight := weights.get("w" + role)) is None else weight.shape for role in "qkvo"}
    biased = {weights.get("b" + role) is None for role in "qkv"}
    return len(shapes) == 1 and None not in shapes and len(biased) == 1


def _run_torch_multi_head_attention(
    query_key_value: QueryKeyValue,
    weights: WeightsByRole,
    output_weight: Tensor,
    num_heads: int,
    allowed_mask: Tensor | None,
) -> Tensor:
    """Compute nn.MultiheadAttention with these weights."""
    query, key, value = (x.transpose(0, 1) for x in query_key_value)
    inner = {name: [w for letter in "qkv" if (w := weights.get(name + letter)) is not None] for name in "wb"}
    mask = None if allowed_mask is None else ~allowed_mask
    packed, bias = torch.cat(inner["w"]), torch.cat(inner["b"]) if inner["b"] else None
    out, _ = F.multi_head_attention_forward(
        query, key, value, query.shape[-1], num_heads, packed, bias, None, None, False, 0.0, output_weight,
        weights.get("bo"), need_weights=False, attn_mask=mask,
    )  # fmt: skip
    return out.transpose(0, 1)


def project_tokens_if_role_has_weight(
    tokens: Tensor, weights: WeightsByRole, qkvo_role: str, variant_or_mistakes: ReferenceVariant
) -> Tensor:
    """Apply the linear layer of a role (q, k, v or o); return the tokens unchanged if the user's code has none."""
    weight = weights.get("w" + qkvo_role)
    if weight is None:
        return tokens
    if qkvo_role in variant_or_mistakes.get("untransposed", ""):
        weight = weight.T
    return F.linear(tokens, weight, weights.get("b" + qkvo_role))


def split_heads_by_variant(tokens: Tensor, num_heads: int, variant_or_mistakes: ReferenceVariant) -> Tensor:
    """(batch, token, head · width) -> (batch, head, token, width)."""
    batch, count, width = tokens.shape
    match variant_or_mistakes.get("split"):
        case "left":
            return tokens.reshape(batch, count, num_heads, width // num_heads)
        case "cut":
            return tokens.reshape(batch, num_heads, count, width // num_heads)
        case "inside-out":
            return tokens.reshape(batch, count, width // num_heads, num_heads).permute(0, 3, 1, 2)
        case _:
            return tokens.reshape(batch, count, num_heads, width // num_heads).transpose(1, 2)


def join_heads_by_variant(head_outputs: Tensor, variant_or_mistakes: ReferenceVariant) -> Tensor:
    """(batch, head, token, width) -> (batch, token, head · width)."""
    if variant_or_mistakes.get("split") == "left":  # the head axis was not moved before
        batch, count, heads, width = head_outputs.shape
        moved = head_outputs.transpose(1, 2) if variant_or_mistakes.get("join") == "back" else head_outputs
        return moved.reshape(batch, count, heads * width)
    batch, heads, count, width = head_outputs.shape
    order = variant_or_mistakes.get("join", "inside-out" if variant_or_mistakes.get("split") == "inside-out" else None)
    if order == "cut":
        return head_outputs.reshape(batch, count, heads * width)
    return (
        head_outputs.permute(0, 2, 3, 1).flatten(2)
        if order == "inside-out"
        else head_outputs.transpose(1, 2).flatten(2)
    )
