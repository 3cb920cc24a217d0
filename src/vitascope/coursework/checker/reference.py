"""Attention, written once with a switch for every mistake: any one and any two of them can be switched on.

`Options` names what deviates from the paper; an empty one is the right computation, which the tests hold against
PyTorch's own layers.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ReferenceOptions = Mapping[str, Any]


class SimulatedMistake(NamedTuple):
    """A mistake's id, and the options that make it."""

    mistake_id: str
    options: dict[str, Any]


# How the output is made of a map between features: transposed or not, the map likewise, scaled by features or tokens.
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
    *(SimulatedMistake("feature-attention", {"features": number}) for number in range(len(FEATURE_ATTENTION_VARIANTS))),
]
HEAD_MISTAKES = [
    SimulatedMistake("softmax-over-heads", {"softmax": -3}),
    *(
        SimulatedMistake("heads-not-transposed", {"split": how} | ({"join": back} if back else {}))
        for how, back in (("left", ""), ("left", "back"), ("cut", ""), ("cut", "cut"))
    ),
    *(SimulatedMistake("heads-joined-wrongly", {"join": how}) for how in ("cut", "inside-out")),
    SimulatedMistake("missing-output-projection", {"projected": False}),
    *(SimulatedMistake("weight-not-transposed", {"untransposed": who}) for who in ("qkvo", "qkv", "o", "q", "k", "v")),
]
IGNORED_MASK = SimulatedMistake("unknown", {"ignored": True})  # a mask that changes nothing has no name of its own
MASK_MISTAKES = [
    IGNORED_MASK,
    *(
        SimulatedMistake("mask-inverted", {"turned": how, "fill": fill})
        for how in ("not", "transposed")
        for fill in (None, ("put", -1e9), ("add", -1e9))
    ),
    SimulatedMistake("mask-after-softmax", {"after": "zero"}),
    SimulatedMistake("mask-after-softmax", {"after": "add"}),
]
MASK_FILL_MISTAKES = [
    SimulatedMistake("mask-too-small", {"fill": (how, fill)}) for fill in WRONG_MASK_FILLS for how in ("put", "add")
]


MISTAKE_OPTION_NAMES = {
    switch_key
    for switch in [*SCALE_MISTAKES, *ATTENTION_MAP_MISTAKES, *HEAD_MISTAKES, *MASK_MISTAKES, *MASK_FILL_MISTAKES]
    for switch_key in switch.options
}
MASK_OPTION_NAMES = {"turned", "fill", "after", "ignored"}


def is_mistake_free(options: ReferenceOptions) -> bool:
    """No mistake of attention is switched on."""
    return not MISTAKE_OPTION_NAMES & options.keys()


def attend_with_options(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed_mask: Tensor | None,
    options: ReferenceOptions,
    num_heads: int | None = None,
) -> Tensor:
    """(…, head, query, width), … -> (…, head, query, width); `allowed` is True where a query may attend to a key."""
    if is_mistake_free(options):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed_mask)
    if options.get("swapped"):
        query, key = key, query
    width = query.shape[-1]
    if "features" in options:
        return _attend_over_features(query, key, value, options)
    if options.get("scale_width") == "full" and query.ndim > 2:
        width *= query.shape[-3] if num_heads is None else num_heads
    scores = query @ key.transpose(-2, -1) * _compute_scale(width, options)
    axis = options.get("softmax", -1)
    if allowed_mask is None or options.get("ignored"):
        return scores.softmax(dim=axis) @ value
    allowed_mask = {"not": ~allowed_mask, "transposed": allowed_mask.transpose(-2, -1)}.get(
        options.get("turned", ""), allowed_mask
    )
    if "after" in options:
        maps = scores.softmax(dim=axis)
        return (maps * allowed_mask if options["after"] == "zero" else maps.where(allowed_mask, -torch.inf)) @ value
    how, fill = options.get("fill") or ("put", -torch.inf)
    masked = scores.where(allowed_mask, fill if how == "put" else scores + fill)
    return masked.softmax(dim=axis) @ value


def _compute_scale(width: int, options: ReferenceOptions) -> float:
    return 1.0 if options.get("scale_missing") else width ** -options.get("scale_power", 0.5)


def _attend_over_features(query: Tensor, key: Tensor, value: Tensor, options: ReferenceOptions) -> Tensor:
    turned, transposed, by_tokens = FEATURE_ATTENTION_VARIANTS[options["features"]]
    scores = (key if turned else query).transpose(-2, -1) @ (query if turned else key)
    maps = (scores * _compute_scale(query.shape[-2 if by_tokens else -1], options)).softmax(
        dim=options.get("softmax", -1)
    )
    return value @ (maps.transpose(-2, -1) if transposed else maps)


def multi_head_attention(
    query_key_value: tuple[Tensor, Tensor, Tensor],
    weights: Mapping[str, Tensor | None],
    num_heads: int,
    allowed_mask: Tensor | None,
    options: ReferenceOptions,
) -> Tensor:
    """(batch, token, feature) three times -> (batch, token, feature). Weights are output × input, as nn.Linear's."""
    last = weights.get("wo")
    if is_mistake_free(options) and last is not None and _can_use_torch_attention(weights):
        return _run_torch_attention(query_key_value, weights, last, num_heads, allowed_mask)
    query, key, value = (
        project_tokens(x, weights, role, options) for x, role in zip(query_key_value, "qkv", strict=True)
    )
    if query.shape[-1] % num_heads:
        raise RuntimeError("the width is not divisible by the number of heads")
    query, key, value = (split_heads(x, num_heads, options) for x in (query, key, value))
    joined = join_heads(attend_with_options(query, key, value, allowed_mask, options, num_heads), options)
    return joined if options.get("projected") is False else project_tokens(joined, weights, "o", options)


def _can_use_torch_attention(weights: Mapping[str, Tensor | None]) -> bool:
    shapes = {None if (weight := weights.get("w" + role)) is None else weight.shape for role in "qkvo"}
    biased = {weights.get("b" + role) is None for role in "qkv"}
    return len(shapes) == 1 and None not in shapes and len(biased) == 1


def _run_torch_attention(
    query_key_value: tuple[Tensor, Tensor, Tensor],
    weights: Mapping[str, Tensor | None],
    output_weight: Tensor,
    num_heads: int,
    allowed_mask: Tensor | None,
) -> Tensor:
    """nn.MultiheadAttention's own computation, with these weights."""
    query, key, value = (x.transpose(0, 1) for x in query_key_value)
    inner = {name: [w for letter in "qkv" if (w := weights.get(name + letter)) is not None] for name in "wb"}
    mask = None if allowed_mask is None else ~allowed_mask
    packed, bias = torch.cat(inner["w"]), torch.cat(inner["b"]) if inner["b"] else None
    out, _ = F.multi_head_attention_forward(
        query, key, value, query.shape[-1], num_heads, packed, bias, None, None, False, 0.0, output_weight,
        weights.get("bo"), need_weights=False, attn_mask=mask,
    )  # fmt: skip
    return out.transpose(0, 1)


def project_tokens(
    tokens: Tensor, weights: Mapping[str, Tensor | None], role: str, options: ReferenceOptions
) -> Tensor:
    """One linear map; nothing where the user's code has none."""
    weight = weights.get("w" + role)
    if weight is None:
        return tokens
    if role in options.get("untransposed", ""):
        weight = weight.T
    return F.linear(tokens, weight, weights.get("b" + role))


def split_heads(tokens: Tensor, num_heads: int, options: ReferenceOptions) -> Tensor:
    """(batch, token, head · width) -> (batch, head, token, width)."""
    batch, count, width = tokens.shape
    match options.get("split"):
        case "left":
            return tokens.reshape(batch, count, num_heads, width // num_heads)
        case "cut":
            return tokens.reshape(batch, num_heads, count, width // num_heads)
        case "inside-out":
            return tokens.reshape(batch, count, width // num_heads, num_heads).permute(0, 3, 1, 2)
        case _:
            return tokens.reshape(batch, count, num_heads, width // num_heads).transpose(1, 2)


def join_heads(head_outputs: Tensor, options: ReferenceOptions) -> Tensor:
    """(batch, head, token, width) -> (batch, token, head · width)."""
    if options.get("split") == "left":  # nothing was moved, so nothing is moved back
        batch, count, heads, width = head_outputs.shape
        moved = head_outputs.transpose(1, 2) if options.get("join") == "back" else head_outputs
        return moved.reshape(batch, count, heads * width)
    batch, heads, count, width = head_outputs.shape
    how = options.get("join", "inside-out" if options.get("split") == "inside-out" else None)
    if how == "cut":
        return head_outputs.reshape(batch, count, heads * width)
    return (
        head_outputs.permute(0, 2, 3, 1).flatten(2) if how == "inside-out" else head_outputs.transpose(1, 2).flatten(2)
    )
