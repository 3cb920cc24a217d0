"""Find the query, key, value and output weights of a user's module, by name, by shape or by trying all orders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitascope.coursework.checker.recognition import guess_qkvo_role, split_identifier_into_words
from vitascope.coursework.checker.reference import WeightsByRole

PACKED_ROW_ORDERS = ["".join(letters) for letters in product("qkv", repeat=3)]
LINEAR_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d)
NORM_TYPES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass
class LinearLayer:
    """A weight of shape output × input and its bias; a raw parameter may also have shape input × output."""

    name: str
    weight: Tensor
    bias: Tensor | None
    is_raw_parameter: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True)
class QkvAssignment:
    """Which weight is query, key, value and output; valid for instances of other sizes too."""

    layer_order: tuple[int, ...] = ()  # indices of the layers for q, k, v and o, if their names do not tell
    is_transposed: bool = False  # raw parameters have shape input × output
    row_order: str = "qkv"  # order of the rows in a packed weight


class DescribedAssignment(NamedTuple):
    """An assignment, and the assumptions behind it as text."""

    assignment: QkvAssignment
    assumptions: tuple[str, ...]


class NamedNorm(NamedTuple):
    """A norm layer and its name in the module."""

    name: str
    norm: nn.Module


class QkvRowIndices(NamedTuple):
    """The row indices of the queries, keys and values in a packed weight."""

    query: Tensor
    key: Tensor
    value: Tensor


_LINEAR_LAYERS_CACHE: WeakKeyDictionary[nn.Module, list[LinearLayer]] = WeakKeyDictionary()


def find_linear_layers_and_matrices(module: nn.Module) -> list[LinearLayer]:
    """Return linear layers, 1×1 convolutions and raw matrices, in the order in which they were created."""
    if torch.is_grad_enabled():  # a cached view would belong to an old graph
        return _collect_linear_layers_and_matrices(module)
    if module not in _LINEAR_LAYERS_CACHE:
        _LINEAR_LAYERS_CACHE[module] = _collect_linear_layers_and_matrices(module)
    return _LINEAR_LAYERS_CACHE[module]


def _collect_linear_layers_and_matrices(module: nn.Module) -> list[LinearLayer]:
    layers, raw_biases = [], {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, LINEAR_TYPES):
            if part.weight[0, 0].numel() == 1:
                layers.append(LinearLayer(path, part.weight.flatten(1), part.bias))
            continue
        if isinstance(part, (*NORM_TYPES, nn.Embedding)):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim == 1:
                raw_biases[prefix + name] = parameter
            elif parameter.ndim in (2, 3) and min(parameter.shape) > 1:
                layers.append(
                    LinearLayer(
                        prefix + name,
                        _flatten_to_output_by_input(prefix + name, parameter),
                        None,
                        is_raw_parameter=True,
                    )
                )
    for layer in layers:
        if layer.is_raw_parameter:
            layer.bias = _find_matching_bias(layer.name, raw_biases)
    return [part for layer in layers for part in _split_if_kv_or_qk(layer)]


def _split_if_kv_or_qk(layer: LinearLayer) -> list[LinearLayer]:
    """Split a layer such as `kv` or `qk`, which holds two matrices."""
    prefix, _, last = layer.name.rpartition(".")
    pair = next(
        (
            pair
            for pair in ("kv", "qk", "vk", "kq")
            if any(word.endswith(pair) for word in split_identifier_into_words(last))
        ),
        "",
    )
    if (
        not pair
        or any("qkv" in word for word in split_identifier_into_words(last))
        or layer.shape[0] != 2 * layer.shape[1]
    ):
        return [layer]
    biases = (None, None) if layer.bias is None else layer.bias.chunk(2)
    names = [f"{prefix}.to_{letter}" if prefix else f"to_{letter}" for letter in pair]
    return [
        LinearLayer(name, weight, bias, layer.is_raw_parameter)
        for name, weight, bias in zip(names, layer.weight.chunk(2), biases, strict=True)
    ]


def _flatten_to_output_by_input(parameter_name: str, parameter: Tensor) -> Tensor:
    """head × in × width -> output × input; an output projection head × width × out likewise."""
    if parameter.ndim == 2:
        is_transposed = parameter.shape[1] == 3 * parameter.shape[0]
        return parameter.T if is_transposed else parameter
    if guess_qkvo_role(parameter_name) == "o":
        return parameter.flatten(0, 1).T
    return parameter.transpose(1, 2).flatten(0, 1)


def _find_matching_bias(weight_name: str, biases: Mapping[str, Tensor]) -> Tensor | None:
    prefix = weight_name.rpartition(".")[0]
    letter = guess_qkvo_role(weight_name.rpartition(".")[2])
    for other, bias in biases.items():
        last = other.rpartition(".")[2]
        is_bias = last.startswith("b") or "bias" in split_identifier_into_words(last)
        if other.rpartition(".")[0] == prefix and is_bias and guess_qkvo_role(last) == letter and letter is not None:
            return bias
    return None


def find_norms(module: nn.Module) -> list[NamedNorm]:
    return [NamedNorm(name, part) for name, part in module.named_modules() if isinstance(part, NORM_TYPES)]


def is_packed_qkv_layer(layer: LinearLayer) -> bool:
    return layer.shape[0] == 3 * layer.shape[1]


def iterate_qkv_assignments(linear_layers: list[LinearLayer]) -> Iterator[DescribedAssignment]:
    """Yield every correct assignment of these layers to query, key, value and output, the most likely first."""
    transposes = [False]
    if any(layer.is_raw_parameter and layer.shape[0] == layer.shape[1] for layer in linear_layers):
        transposes = [True, False]
    packed = next((layer for layer in linear_layers if is_packed_qkv_layer(layer)), None)
    for is_transposed in transposes:
        assumptions = ("the weights have shape input × output (x @ W)",) if is_transposed else ()
        if packed is not None:
            for row_order in list_possible_row_orders(packed.name):
                text = f"the rows of {packed.name} are in the order {_describe_row_order(row_order)}"
                order_assumptions = () if row_order == "qkv" else (text,)
                assignment = QkvAssignment((), is_transposed, row_order)
                yield DescribedAssignment(assignment, assumptions + order_assumptions)
        elif _has_qkv_names(linear_layers):
            yield DescribedAssignment(QkvAssignment((), is_transposed), assumptions)
        else:
            indices = range(len(linear_layers))
            for layer_order in permutations(indices) if len(indices) <= 4 else [tuple(indices)]:
                names = ", ".join(linear_layers[index].name for index in layer_order)
                text = f"the layers for query, key, value and output are, in this order: {names}"
                yield DescribedAssignment(QkvAssignment(layer_order, is_transposed), (*assumptions, text))


def _describe_row_order(row_order: str) -> str:
    names = {"q": "query", "k": "key", "v": "value", "3": "query/key/value", "h": "head", "d": "feature"}
    return ", ".join(names[letter] for letter in row_order)


def list_possible_row_orders(weight_name: str) -> list[str]:
    """Return the row orders that the name allows: PyTorch's for `in_proj`, q-k-v for `qkv`, else any order."""
    words = split_identifier_into_words(weight_name)
    if "in" in words and "proj" in words:
        return ["qkv"]
    mixed = ["h3d", "d3h", "hd3", "dh3", "3dh"]
    for row_order in PACKED_ROW_ORDERS:
        if any(row_order in word for word in words) and len(set(row_order)) == 3:
            return [row_order, *mixed]
    return [*(rows for rows in PACKED_ROW_ORDERS if len(set(rows)) == 3), *mixed]


def get_qkv_row_indices(row_order: str, width: int, num_heads: int) -> QkvRowIndices:
    """Return the rows of queries, keys and values in a packed weight."""
    rows, head_width = torch.arange(3 * width), width // num_heads
    match row_order:
        case "h3d":
            return QkvRowIndices(*(rows.view(num_heads, 3, head_width)[:, part].flatten() for part in range(3)))
        case "d3h":
            return QkvRowIndices(*(rows.view(head_width, 3, num_heads)[:, part].T.flatten() for part in range(3)))
        case "hd3":
            return QkvRowIndices(*(rows.view(width, 3)[:, part] for part in range(3)))
        case "dh3":
            return QkvRowIndices(*(rows.view(head_width, num_heads, 3)[:, :, part].T.flatten() for part in range(3)))
        case "3dh":
            return QkvRowIndices(*(rows.view(3, head_width, num_heads)[part].T.flatten() for part in range(3)))
        case _:
            thirds = dict(zip("qkv", rows.chunk(3), strict=True))
            if sorted(row_order) == ["k", "q", "v"]:  # row_order is the order of the three blocks of rows
                return QkvRowIndices(*(rows.chunk(3)[row_order.index(letter)] for letter in "qkv"))
            return QkvRowIndices(*(thirds[letter] for letter in row_order))


def assign_qkvo_weights(linear_layers: list[LinearLayer], assignment: QkvAssignment, num_heads: int) -> WeightsByRole:
    """Return the weights by role; gradients still reach the user's parameters."""
    weights: dict[str, Tensor | None] = {}
    packed = next((layer for layer in linear_layers if is_packed_qkv_layer(layer)), None)
    others = [layer for layer in linear_layers if layer is not packed]
    if packed is not None:
        for letter, rows in zip(
            "qkv", get_qkv_row_indices(assignment.row_order, packed.shape[1], num_heads), strict=True
        ):
            weights["w" + letter] = packed.weight[rows]
            weights["b" + letter] = None if packed.bias is None else packed.bias[rows]
        outs = [layer for layer in others if guess_qkvo_role(layer.name) == "o"] or others
        _concat_and_set_role_weights(weights, "o", outs[-1:], assignment.is_transposed)
        return weights
    if _has_qkv_names(linear_layers):
        for letter in "qkv":
            _concat_and_set_role_weights(
                weights,
                letter,
                [layer for layer in linear_layers if guess_qkvo_role(layer.name) == letter],
                assignment.is_transposed,
            )
        rest = [layer for layer in linear_layers if guess_qkvo_role(layer.name) not in ("q", "k", "v")]
        _concat_and_set_role_weights(
            weights,
            "o",
            [layer for layer in rest if guess_qkvo_role(layer.name) == "o"][-1:] or rest[-1:],
            assignment.is_transposed,
        )
        return weights
    for role, index in zip("qkvo", assignment.layer_order, strict=False):
        _concat_and_set_role_weights(weights, role, [linear_layers[index]], assignment.is_transposed)
    return weights


def _has_qkv_names(linear_layers: list[LinearLayer]) -> bool:
    return {"q", "k", "v"} <= {guess_qkvo_role(layer.name) for layer in linear_layers}


def _concat_and_set_role_weights(
    weights: dict[str, Tensor | None], qkv_role: str, linear_layers: list[LinearLayer], is_transposed: bool
) -> None:
    """Set the weight and bias of a role; the layers of several heads are concatenated."""
    if not linear_layers:
        return
    parts = [
        layer.weight.T
        if layer.is_raw_parameter and is_transposed and _may_be_stored_transposed(layer)
        else layer.weight
        for layer in linear_layers
    ]
    biases = [layer.bias for layer in linear_layers if layer.bias is not None]
    weights["w" + qkv_role] = torch.cat(parts)
    weights["b" + qkv_role] = torch.cat(biases) if biases else None


def _may_be_stored_transposed(layer: LinearLayer) -> bool:
    return layer.weight.shape[0] == layer.weight.shape[1] or layer.is_raw_parameter
