"""Find the query, key, value and output weights of a user's module, by name, by shape or by trying all orders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitascope.checking.naming import letter_of, words_of

Weights = dict[str, Tensor | None]
THIRDS = ["".join(letters) for letters in product("qkv", repeat=3)]
OWNERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass
class LinearMap:
    """A weight, output × input, its bias, and whether a layer owns it: only then its orientation is sure."""

    name: str
    weight: Tensor
    bias: Tensor | None
    raw: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True)
class Assignment:
    """A name for each choice of how weights are meant, so that it can be repeated for other sizes."""

    order: tuple[int, ...] = ()  # of four nameless squares
    flipped: bool = False  # raw weights are input × output
    rows: str = "qkv"  # where a packed weight has queries, keys and values


_REMEMBERED: WeakKeyDictionary[nn.Module, list[LinearMap]] = WeakKeyDictionary()


def linear_maps(module: nn.Module) -> list[LinearMap]:
    """Linear layers, 1×1 convolutions and raw matrices, in the order in which they were made."""
    if torch.is_grad_enabled():  # views for a gradient are made anew
        return _linear_maps(module)
    if module not in _REMEMBERED:
        _REMEMBERED[module] = _linear_maps(module)
    return _REMEMBERED[module]


def _linear_maps(module: nn.Module) -> list[LinearMap]:
    found, raw_biases = [], {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, OWNERS):
            if part.weight[0, 0].numel() == 1:
                found.append(LinearMap(path, part.weight.flatten(1), part.bias))
            continue
        if isinstance(part, (*NORMS, nn.Embedding)):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim == 1:
                raw_biases[prefix + name] = parameter
            elif parameter.ndim in (2, 3) and min(parameter.shape) > 1:
                found.append(LinearMap(prefix + name, _flat(prefix + name, parameter), None, raw=True))
    for one in found:
        if one.raw:
            one.bias = _bias_for(one.name, raw_biases)
    return [part for one in found for part in _halves(one)]


def _halves(one: LinearMap) -> list[LinearMap]:
    """`kv` holds two matrices, and so does `qk`."""
    where, _, last = one.name.rpartition(".")
    pair = next((pair for pair in ("kv", "qk", "vk", "kq") if any(word.endswith(pair) for word in words_of(last))), "")
    if not pair or any("qkv" in word for word in words_of(last)) or one.shape[0] != 2 * one.shape[1]:
        return [one]
    biases = (None, None) if one.bias is None else one.bias.chunk(2)
    names = [f"{where}.to_{letter}" if where else f"to_{letter}" for letter in pair]
    return [
        LinearMap(name, weight, bias, one.raw)
        for name, weight, bias in zip(names, one.weight.chunk(2), biases, strict=True)
    ]


def _flat(name: str, parameter: Tensor) -> Tensor:
    """head × in × width -> output × input; an output projection head × width × out likewise."""
    if parameter.ndim == 2:
        tall = parameter.shape[1] == 3 * parameter.shape[0]
        return parameter.T if tall else parameter
    if letter_of(name) == "o":
        return parameter.flatten(0, 1).T
    return parameter.transpose(1, 2).flatten(0, 1)


def _bias_for(name: str, biases: Mapping[str, Tensor]) -> Tensor | None:
    where = name.rpartition(".")[0]
    letter = letter_of(name.rpartition(".")[2])
    for other, bias in biases.items():
        last = other.rpartition(".")[2]
        is_bias = last.startswith("b") or "bias" in words_of(last)
        if other.rpartition(".")[0] == where and is_bias and letter_of(last) == letter and letter is not None:
            return bias
    return None


def norms_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, NORMS)]


def is_packed(one: LinearMap) -> bool:
    return one.shape[0] == 3 * one.shape[1]


def assignments(maps: list[LinearMap], *, strict_rows: bool = False) -> Iterator[tuple[Assignment, tuple[str, ...]]]:
    """Every way in which these can be the weights of an attention that is right, the likeliest first."""
    flips = [False, True] if any(one.raw and one.shape[0] == one.shape[1] for one in maps) else [False]
    if any(one.raw for one in maps) and len(flips) > 1:
        flips = [True, False]
    for flipped in flips:
        words = (("the weights have shape input × output (x @ W)",) if flipped else ()) if len(flips) > 1 else ()
        packed = next((one for one in maps if is_packed(one)), None)
        if packed is not None:
            for rows in rows_allowed(packed.name, strict_rows):
                more = () if rows == "qkv" else (f"the rows of {packed.name} are in the order {_row_order(rows)}",)
                yield Assignment((), flipped, rows), words + more
        elif _named(maps):
            yield Assignment((), flipped), words
        else:
            for order in permutations(range(len(maps))) if len(maps) <= 4 else [tuple(range(len(maps)))]:
                names = ", ".join(maps[number].name for number in order)
                yield (
                    Assignment(order, flipped),
                    (*words, f"the layers for query, key, value and output are, in this order: {names}"),
                )


def _row_order(rows: str) -> str:
    names = {"q": "query", "k": "key", "v": "value", "3": "query/key/value", "h": "head", "d": "feature"}
    return ", ".join(names[letter] for letter in rows)


def rows_allowed(name: str, strict: bool) -> list[str]:
    """`in_proj_weight` is PyTorch's name and has PyTorch's order; `qkv` gives its own order; other names allow any."""
    words = words_of(name)
    if strict or ("in" in words and "proj" in words):
        return ["qkv"]
    mixed = ["h3d", "d3h", "hd3", "dh3", "3dh"]
    for told in THIRDS:
        if any(told in word for word in words) and len(set(told)) == 3:
            return [told, *mixed]
    return [*(rows for rows in THIRDS if len(set(rows)) == 3), *mixed]


def row_numbers(rows: str, width: int, heads: int) -> list[Tensor]:
    """The rows of queries, keys and values in a packed weight."""
    numbers, inner = torch.arange(3 * width), width // heads
    match rows:
        case "h3d":
            return [numbers.view(heads, 3, inner)[:, part].flatten() for part in range(3)]
        case "d3h":
            return [numbers.view(inner, 3, heads)[:, part].T.flatten() for part in range(3)]
        case "hd3":
            return [numbers.view(width, 3)[:, part] for part in range(3)]
        case "dh3":
            return [numbers.view(inner, heads, 3)[:, :, part].T.flatten() for part in range(3)]
        case "3dh":
            return [numbers.view(3, inner, heads)[part].T.flatten() for part in range(3)]
        case _:
            thirds = dict(zip("qkv", numbers.chunk(3), strict=True))
            if sorted(rows) == ["k", "q", "v"]:  # the order in which they lie
                return [numbers.chunk(3)[rows.index(letter)] for letter in "qkv"]
            return [thirds[letter] for letter in rows]


def assigned(maps: list[LinearMap], chosen: Assignment, heads: int) -> Weights:
    """The weights under one assignment, still connected to the user's parameters."""
    weights: Weights = {}
    packed = next((one for one in maps if is_packed(one)), None)
    others = [one for one in maps if one is not packed]
    if packed is not None:
        for letter, rows in zip("qkv", row_numbers(chosen.rows, packed.shape[1], heads), strict=True):
            weights["w" + letter] = packed.weight[rows]
            weights["b" + letter] = None if packed.bias is None else packed.bias[rows]
        outs = [one for one in others if letter_of(one.name) == "o"] or others
        _set(weights, "o", outs[-1:], chosen.flipped)
        return weights
    if _named(maps):
        for letter in "qkv":
            _set(weights, letter, [one for one in maps if letter_of(one.name) == letter], chosen.flipped)
        rest = [one for one in maps if letter_of(one.name) not in ("q", "k", "v")]
        _set(weights, "o", [one for one in rest if letter_of(one.name) == "o"][-1:] or rest[-1:], chosen.flipped)
        return weights
    for letter, number in zip("qkvo", chosen.order, strict=False):
        _set(weights, letter, [maps[number]], chosen.flipped)
    return weights


def _named(maps: list[LinearMap]) -> bool:
    return {"q", "k", "v"} <= {letter_of(one.name) for one in maps}


def _set(weights: Weights, letter: str, maps: list[LinearMap], flipped: bool) -> None:
    """One map, or one for each head, put under each other."""
    if not maps:
        return
    parts = [one.weight.T if one.raw and flipped and _turnable(one) else one.weight for one in maps]
    biases = [one.bias for one in maps if one.bias is not None]
    weights["w" + letter] = torch.cat(parts)
    weights["b" + letter] = torch.cat(biases) if biases else None


def _turnable(one: LinearMap) -> bool:
    return one.weight.shape[0] == one.weight.shape[1] or one.raw
