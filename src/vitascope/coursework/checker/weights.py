"""Find the query, key, value and output weights of a user's module, by name, by shape or by trying all orders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitascope.coursework.checker.argument_names import guess_qkv_role, split_identifier

WeightsByRole = dict[str, Tensor | None]
PACKED_ROW_ORDERS = ["".join(letters) for letters in product("qkv", repeat=3)]
LINEAR_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d)
NORM_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass
class LinearLayer:
    """A weight, output × input, its bias, and whether a layer owns it: only then its orientation is sure."""

    name: str
    weight: Tensor
    bias: Tensor | None
    is_raw_parameter: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True)
class QkvAssignment:
    """A name for each choice of how weights are meant, so that it can be repeated for other sizes."""

    layer_order: tuple[int, ...] = ()  # of four nameless squares
    is_transposed: bool = False  # raw weights are input × output
    row_order: str = "qkv"  # where a packed weight has queries, keys and values


_LINEAR_LAYERS_CACHE: WeakKeyDictionary[nn.Module, list[LinearLayer]] = WeakKeyDictionary()


def find_linear_layers(module: nn.Module) -> list[LinearLayer]:
    """Linear layers, 1×1 convolutions and raw matrices, in the order in which they were made."""
    if torch.is_grad_enabled():  # views for a gradient are made anew
        return _collect_linear_layers(module)
    if module not in _LINEAR_LAYERS_CACHE:
        _LINEAR_LAYERS_CACHE[module] = _collect_linear_layers(module)
    return _LINEAR_LAYERS_CACHE[module]


def _collect_linear_layers(module: nn.Module) -> list[LinearLayer]:
    found, raw_biases = [], {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, LINEAR_TYPES):
            if part.weight[0, 0].numel() == 1:
                found.append(LinearLayer(path, part.weight.flatten(1), part.bias))
            continue
        if isinstance(part, (*NORM_TYPES, nn.Embedding)):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim == 1:
                raw_biases[prefix + name] = parameter
            elif parameter.ndim in (2, 3) and min(parameter.shape) > 1:
                found.append(
                    LinearLayer(prefix + name, _flatten_weight(prefix + name, parameter), None, is_raw_parameter=True)
                )
    for one in found:
        if one.is_raw_parameter:
            one.bias = _find_bias(one.name, raw_biases)
    return [part for one in found for part in _split_paired_layer(one)]


def _split_paired_layer(layer: LinearLayer) -> list[LinearLayer]:
    """`kv` holds two matrices, and so does `qk`."""
    where, _, last = layer.name.rpartition(".")
    pair = next(
        (pair for pair in ("kv", "qk", "vk", "kq") if any(word.endswith(pair) for word in split_identifier(last))), ""
    )
    if not pair or any("qkv" in word for word in split_identifier(last)) or layer.shape[0] != 2 * layer.shape[1]:
        return [layer]
    biases = (None, None) if layer.bias is None else layer.bias.chunk(2)
    names = [f"{where}.to_{letter}" if where else f"to_{letter}" for letter in pair]
    return [
        LinearLayer(name, weight, bias, layer.is_raw_parameter)
        for name, weight, bias in zip(names, layer.weight.chunk(2), biases, strict=True)
    ]


def _flatten_weight(parameter_name: str, parameter: Tensor) -> Tensor:
    """head × in × width -> output × input; an output projection head × width × out likewise."""
    if parameter.ndim == 2:
        tall = parameter.shape[1] == 3 * parameter.shape[0]
        return parameter.T if tall else parameter
    if guess_qkv_role(parameter_name) == "o":
        return parameter.flatten(0, 1).T
    return parameter.transpose(1, 2).flatten(0, 1)


def _find_bias(weight_name: str, biases: Mapping[str, Tensor]) -> Tensor | None:
    where = weight_name.rpartition(".")[0]
    letter = guess_qkv_role(weight_name.rpartition(".")[2])
    for other, bias in biases.items():
        last = other.rpartition(".")[2]
        is_bias = last.startswith("b") or "bias" in split_identifier(last)
        if other.rpartition(".")[0] == where and is_bias and guess_qkv_role(last) == letter and letter is not None:
            return bias
    return None


def find_norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name, part in module.named_modules() if isinstance(part, NORM_TYPES)]


def is_packed(layer: LinearLayer) -> bool:
    return layer.shape[0] == 3 * layer.shape[1]


def list_qkv_assignments(
    linear_layers: list[LinearLayer], *, is_torch_order: bool = False
) -> Iterator[tuple[QkvAssignment, tuple[str, ...]]]:
    """Every way in which these can be the weights of an attention that is right, the likeliest first."""
    flips = (
        [False, True]
        if any(one.is_raw_parameter and one.shape[0] == one.shape[1] for one in linear_layers)
        else [False]
    )
    if any(one.is_raw_parameter for one in linear_layers) and len(flips) > 1:
        flips = [True, False]
    for flipped in flips:
        words = (("the weights have shape input × output (x @ W)",) if flipped else ()) if len(flips) > 1 else ()
        packed = next((one for one in linear_layers if is_packed(one)), None)
        if packed is not None:
            for rows in list_possible_row_orders(packed.name, is_torch_order):
                more = (
                    ()
                    if rows == "qkv"
                    else (f"the rows of {packed.name} are in the order {_describe_row_order(rows)}",)
                )
                yield QkvAssignment((), flipped, rows), words + more
        elif _has_qkv_names(linear_layers):
            yield QkvAssignment((), flipped), words
        else:
            for order in (
                permutations(range(len(linear_layers)))
                if len(linear_layers) <= 4
                else [tuple(range(len(linear_layers)))]
            ):
                names = ", ".join(linear_layers[number].name for number in order)
                yield (
                    QkvAssignment(order, flipped),
                    (*words, f"the layers for query, key, value and output are, in this order: {names}"),
                )


def _describe_row_order(row_order: str) -> str:
    names = {"q": "query", "k": "key", "v": "value", "3": "query/key/value", "h": "head", "d": "feature"}
    return ", ".join(names[letter] for letter in row_order)


def list_possible_row_orders(weight_name: str, is_torch_order: bool) -> list[str]:
    """`in_proj_weight` is PyTorch's name and has PyTorch's order; `qkv` gives its own order; other names allow any."""
    words = split_identifier(weight_name)
    if is_torch_order or ("in" in words and "proj" in words):
        return ["qkv"]
    mixed = ["h3d", "d3h", "hd3", "dh3", "3dh"]
    for told in PACKED_ROW_ORDERS:
        if any(told in word for word in words) and len(set(told)) == 3:
            return [told, *mixed]
    return [*(rows for rows in PACKED_ROW_ORDERS if len(set(rows)) == 3), *mixed]


def get_qkv_row_indices(row_order: str, width: int, num_heads: int) -> list[Tensor]:
    """The rows of queries, keys and values in a packed weight."""
    numbers, inner = torch.arange(3 * width), width // num_heads
    match row_order:
        case "h3d":
            return [numbers.view(num_heads, 3, inner)[:, part].flatten() for part in range(3)]
        case "d3h":
            return [numbers.view(inner, 3, num_heads)[:, part].T.flatten() for part in range(3)]
        case "hd3":
            return [numbers.view(width, 3)[:, part] for part in range(3)]
        case "dh3":
            return [numbers.view(inner, num_heads, 3)[:, :, part].T.flatten() for part in range(3)]
        case "3dh":
            return [numbers.view(3, inner, num_heads)[part].T.flatten() for part in range(3)]
        case _:
            thirds = dict(zip("qkv", numbers.chunk(3), strict=True))
            if sorted(row_order) == ["k", "q", "v"]:  # the order in which they lie
                return [numbers.chunk(3)[row_order.index(letter)] for letter in "qkv"]
            return [thirds[letter] for letter in row_order]


def assign_weights(linear_layers: list[LinearLayer], assignment: QkvAssignment, num_heads: int) -> WeightsByRole:
    """The weights under one assignment, still connected to the user's parameters."""
    weights: WeightsByRole = {}
    packed = next((one for one in linear_layers if is_packed(one)), None)
    others = [one for one in linear_layers if one is not packed]
    if packed is not None:
        for letter, rows in zip(
            "qkv", get_qkv_row_indices(assignment.row_order, packed.shape[1], num_heads), strict=True
        ):
            weights["w" + letter] = packed.weight[rows]
            weights["b" + letter] = None if packed.bias is None else packed.bias[rows]
        outs = [one for one in others if guess_qkv_role(one.name) == "o"] or others
        _set_role_weights(weights, "o", outs[-1:], assignment.is_transposed)
        return weights
    if _has_qkv_names(linear_layers):
        for letter in "qkv":
            _set_role_weights(
                weights,
                letter,
                [one for one in linear_layers if guess_qkv_role(one.name) == letter],
                assignment.is_transposed,
            )
        rest = [one for one in linear_layers if guess_qkv_role(one.name) not in ("q", "k", "v")]
        _set_role_weights(
            weights,
            "o",
            [one for one in rest if guess_qkv_role(one.name) == "o"][-1:] or rest[-1:],
            assignment.is_transposed,
        )
        return weights
    for letter, number in zip("qkvo", assignment.layer_order, strict=False):
        _set_role_weights(weights, letter, [linear_layers[number]], assignment.is_transposed)
    return weights


def _has_qkv_names(linear_layers: list[LinearLayer]) -> bool:
    return {"q", "k", "v"} <= {guess_qkv_role(one.name) for one in linear_layers}


def _set_role_weights(
    weights: WeightsByRole, qkv_role: str, linear_layers: list[LinearLayer], is_transposed: bool
) -> None:
    """One map, or one for each head, put under each other."""
    if not linear_layers:
        return
    parts = [
        one.weight.T if one.is_raw_parameter and is_transposed and _can_transpose(one) else one.weight
        for one in linear_layers
    ]
    biases = [one.bias for one in linear_layers if one.bias is not None]
    weights["w" + qkv_role] = torch.cat(parts)
    weights["b" + qkv_role] = torch.cat(biases) if biases else None


def _can_transpose(layer: LinearLayer) -> bool:
    return layer.weight.shape[0] == layer.weight.shape[1] or layer.is_raw_parameter
