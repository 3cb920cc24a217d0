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

Options = Mapping[str, Any]


class Switch(NamedTuple):
    """A mistake's id, and the options that make it."""

    id: str
    options: dict[str, Any]


# How the output is made of a map between features: transposed or not, the map likewise, scaled by features or tokens.
FEATURES = list(product((False, True), (False, True), (False, True)))
FILLS = [0.0, 1e-9, -1e-9, -1e-6, 1.0, -0.5, *(-float(n) for n in range(1, 21)), -25.0, -30.0, -40.0, -50.0, -64.0]
FILLS += [-80.0, -99.0, -100.0, -128.0, -150.0, -200.0]

SCALES = [
    Switch("missing-scale", {"scale_missing": True}),
    Switch("scale-by-width", {"scale_width": "full"}),
    Switch("scale-not-sqrt", {"scale_power": 1.0}),
]
MAPS = [
    Switch("softmax-over-queries", {"softmax": -2}),
    Switch("query-key-swapped", {"swapped": True}),
    *(Switch("feature-attention", {"features": number}) for number in range(len(FEATURES))),
]
HEADS = [
    Switch("softmax-over-heads", {"softmax": -3}),
    *(
        Switch("heads-not-transposed", {"split": how} | ({"join": back} if back else {}))
        for how, back in (("left", ""), ("left", "back"), ("cut", ""), ("cut", "cut"))
    ),
    *(Switch("heads-joined-wrongly", {"join": how}) for how in ("cut", "inside-out")),
    Switch("missing-output-projection", {"projected": False}),
    *(Switch("weight-not-transposed", {"untransposed": who}) for who in ("qkvo", "qkv", "o", "q", "k", "v")),
]
IGNORED = Switch("unknown", {"ignored": True})  # a mask that changes nothing has no name of its own
MASKS = [
    IGNORED,
    *(
        Switch("mask-inverted", {"turned": how, "fill": fill})
        for how in ("not", "transposed")
        for fill in (None, ("put", -1e9), ("add", -1e9))
    ),
    Switch("mask-after-softmax", {"after": "zero"}),
    Switch("mask-after-softmax", {"after": "add"}),
]
LEAKS = [Switch("mask-too-small", {"fill": (how, fill)}) for fill in FILLS for how in ("put", "add")]


DEVIATIONS = {switch_key for switch in [*SCALES, *MAPS, *HEADS, *MASKS, *LEAKS] for switch_key in switch.options}
MASK_KEYS = {"turned", "fill", "after", "ignored"}


def is_right(options: Options) -> bool:
    """No mistake of attention is switched on."""
    return not DEVIATIONS & options.keys()


def attend(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, options: Options, heads: int | None = None
) -> Tensor:
    """(…, head, query, width), … -> (…, head, query, width); `allowed` is True where a query may attend to a key."""
    if is_right(options):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    if options.get("swapped"):
        query, key = key, query
    width = query.shape[-1]
    if "features" in options:
        return _between_features(query, key, value, options)
    if options.get("scale_width") == "full" and query.ndim > 2:
        width *= query.shape[-3] if heads is None else heads
    scores = query @ key.transpose(-2, -1) * _scale(width, options)
    axis = options.get("softmax", -1)
    if allowed is None or options.get("ignored"):
        return scores.softmax(dim=axis) @ value
    allowed = {"not": ~allowed, "transposed": allowed.transpose(-2, -1)}.get(options.get("turned", ""), allowed)
    if "after" in options:
        maps = scores.softmax(dim=axis)
        return (maps * allowed if options["after"] == "zero" else maps.where(allowed, -torch.inf)) @ value
    how, fill = options.get("fill") or ("put", -torch.inf)
    masked = scores.where(allowed, fill if how == "put" else scores + fill)
    return masked.softmax(dim=axis) @ value


def _scale(width: int, options: Options) -> float:
    return 1.0 if options.get("scale_missing") else width ** -options.get("scale_power", 0.5)


def _between_features(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    turned, transposed, by_tokens = FEATURES[options["features"]]
    scores = (key if turned else query).transpose(-2, -1) @ (query if turned else key)
    maps = (scores * _scale(query.shape[-2 if by_tokens else -1], options)).softmax(dim=options.get("softmax", -1))
    return value @ (maps.transpose(-2, -1) if transposed else maps)


def multi_head(
    tokens: tuple[Tensor, Tensor, Tensor],
    weights: Mapping[str, Tensor | None],
    heads: int,
    allowed: Tensor | None,
    options: Options,
) -> Tensor:
    """(batch, token, feature) three times -> (batch, token, feature). Weights are output × input, as nn.Linear's."""
    last = weights.get("wo")
    if is_right(options) and last is not None and _as_pytorch(weights):
        return _by_pytorch(tokens, weights, last, heads, allowed)
    query, key, value = (project(x, weights, role, options) for x, role in zip(tokens, "qkv", strict=True))
    if query.shape[-1] % heads:
        raise RuntimeError("the width is not divisible by the number of heads")
    query, key, value = (split(x, heads, options) for x in (query, key, value))
    joined = join(attend(query, key, value, allowed, options, heads), options)
    return joined if options.get("projected") is False else project(joined, weights, "o", options)


def _as_pytorch(weights: Mapping[str, Tensor | None]) -> bool:
    shapes = {None if (weight := weights.get("w" + role)) is None else weight.shape for role in "qkvo"}
    biased = {weights.get("b" + role) is None for role in "qkv"}
    return len(shapes) == 1 and None not in shapes and len(biased) == 1


def _by_pytorch(
    tokens: tuple[Tensor, Tensor, Tensor],
    weights: Mapping[str, Tensor | None],
    last: Tensor,
    heads: int,
    allowed: Tensor | None,
) -> Tensor:
    """nn.MultiheadAttention's own computation, with these weights."""
    query, key, value = (x.transpose(0, 1) for x in tokens)
    inner = {name: [w for letter in "qkv" if (w := weights.get(name + letter)) is not None] for name in "wb"}
    mask = None if allowed is None else ~allowed
    packed, bias = torch.cat(inner["w"]), torch.cat(inner["b"]) if inner["b"] else None
    out, _ = F.multi_head_attention_forward(
        query, key, value, query.shape[-1], heads, packed, bias, None, None, False, 0.0, last,
        weights.get("bo"), need_weights=False, attn_mask=mask,
    )  # fmt: skip
    return out.transpose(0, 1)


def project(tokens: Tensor, weights: Mapping[str, Tensor | None], role: str, options: Options) -> Tensor:
    """One linear map; nothing where the user's code has none."""
    weight = weights.get("w" + role)
    if weight is None:
        return tokens
    if role in options.get("untransposed", ""):
        weight = weight.T
    return F.linear(tokens, weight, weights.get("b" + role))


def split(tokens: Tensor, heads: int, options: Options) -> Tensor:
    """(batch, token, head · width) -> (batch, head, token, width)."""
    batch, count, width = tokens.shape
    match options.get("split"):
        case "left":
            return tokens.reshape(batch, count, heads, width // heads)
        case "cut":
            return tokens.reshape(batch, heads, count, width // heads)
        case "inside-out":
            return tokens.reshape(batch, count, width // heads, heads).permute(0, 3, 1, 2)
        case _:
            return tokens.reshape(batch, count, heads, width // heads).transpose(1, 2)


def join(tokens: Tensor, options: Options) -> Tensor:
    """(batch, head, token, width) -> (batch, token, head · width)."""
    if options.get("split") == "left":  # nothing was moved, so nothing is moved back
        batch, count, heads, width = tokens.shape
        moved = tokens.transpose(1, 2) if options.get("join") == "back" else tokens
        return moved.reshape(batch, count, heads * width)
    batch, heads, count, width = tokens.shape
    how = options.get("join", "inside-out" if options.get("split") == "inside-out" else None)
    if how == "cut":
        return tokens.reshape(batch, count, heads * width)
    return tokens.permute(0, 2, 3, 1).flatten(2) if how == "inside-out" else tokens.transpose(1, 2).flatten(2)
