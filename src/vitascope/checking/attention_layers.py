"""Find the attention layers of a user's module and list the variants of attention that are correct."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor, nn

from vitascope.checking.naming import letter_of, source_of, words_of
from vitascope.checking.reference import HEADS, LEAKS, MAPS, MASKS, SCALES, Options, Switch
from vitascope.checking.weights import (
    THIRDS,
    LinearMap,
    Weights,
    assigned,
    assignments,
    is_packed,
    rows_allowed,
)

Reading = tuple[Options, tuple[str, ...]]


def attention_readings(module: nn.Module, maps: list[LinearMap]) -> list[Reading]:
    """List the correct variants: which weight is which, how the heads are split, an optional causal mask."""
    splits: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({}, ()),
        ({"split": "inside-out"}, ("the features of the heads are interleaved",)),
    ]
    causals: list[tuple[dict[str, Any], tuple[str, ...]]] = [({}, ())]
    if looks_causal(module):
        causals.append(({"causal": True}, ("the module applies a causal mask itself",)))
    return [
        ({"assignment": chosen, **split, **causal}, (*words, *split_words, *causal_words))
        for (chosen, words), (split, split_words), (causal, causal_words) in product(assignments(maps), splits, causals)
    ]


def looks_causal(module: nn.Module) -> bool:
    """Whether the source code contains tril, triu or the word causal."""
    texts = "".join(source_of(type(part)) for part in module.modules() if not type(part).__module__.startswith("torch"))
    return "tril" in texts or "triu" in texts or "causal" in texts.lower()


def attention_switches(module: nn.Module, maps: list[LinearMap], *, masked: bool) -> list[Switch]:
    """All mistakes of a multi-head attention with these weights."""
    packed = next((one for one in maps if is_packed(one)), None)
    rows = [] if packed is None else wrong_rows(rows_allowed(packed.name, False))
    masks = [*MASKS, *LEAKS] if masked or looks_causal(module) else []
    return [*SCALES, *MAPS, *HEADS, *rows, *masks]


def wrong_rows(allowed: list[str]) -> list[Switch]:
    """Other cuts through a packed weight; queries and keys exchanged have a name of their own."""
    cuts = [rows for rows in [*THIRDS, "hd3", "h3d"] if rows not in allowed and rows != "kqv"]
    return [Switch("wrong-in-proj-slice", {"rows": rows}) for rows in cuts]


def single_rows(text: str) -> list[str]:
    """`in_proj_weight[0]` is one row of 3 · width, not the queries' weight (sheet C)."""
    found = re.search(r"(in_proj\w*|qkv\w*\.weight|w_?qkv)\[\s*[012]\s*\]", text)
    return ["wrong-in-proj-slice"] if found else []


def weights_under(maps: list[LinearMap], options: Options, heads: int) -> Weights:
    """The weights for the reference, with a wrong cut where one is switched on."""
    chosen = options["assignment"]
    if "rows" in options:
        chosen = replace(chosen, rows=options["rows"])
    return assigned(maps, chosen, heads)


def attention_maps_of(maps: list[LinearMap], width: int) -> list[LinearMap]:
    """Of a block's maps those of attention: packed, square or head-sized; what widens and narrows is the MLP's."""
    packed = [one for one in maps if is_packed(one)]
    named = [one for one in maps if _says_attention(one.name)]
    if named:
        rest = [one for one in maps if all(one is not other for other in named)]
        last = [one for one in rest if one.shape == (width, width)]
        lacking = not any(letter_of(one.name) == "o" for one in named) and len(rest) > 2
        return [*named, *last[:1]] if lacking else named
    squares = [one for one in maps if one.shape == (width, width)]
    return [*packed[:1], *squares[:1]] if packed else squares[:4]


def _says_attention(name: str) -> bool:
    words = set(words_of(name))
    if words & {"mlp", "ffn", "ff", "feedforward", "feed", "fc", "linear"} and not words & {"attn", "attention", "mha"}:
        return False
    attending = {"attn", "attention", "mha", "msa", "selfattn", "selfattention", "self", "multihead", "sa", "att"}
    return bool(words & attending) or letter_of(name) in ("q", "k", "v", "qkv")


def norm_arguments(norm: nn.Module) -> tuple[Tensor | None, Tensor | None, float]:
    """Weight, bias and epsilon."""
    return getattr(norm, "weight", None), getattr(norm, "bias", None), getattr(norm, "eps", None) or 1e-5
