"""The part `feed-forward`: Linear, activation, Linear, as in nn.TransformerEncoderLayer."""

import inspect
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.checking.attention_layers import Reading, norm_arguments
from vitascope.checking.building import takes
from vitascope.checking.dot_product import picked
from vitascope.checking.instances import Instances
from vitascope.checking.naming import argument_roles, called_with, source_of, words_of
from vitascope.checking.reference import Options, Switch
from vitascope.checking.subject import Case, Inputs, Subject, Way, drawn, observe
from vitascope.checking.weights import LinearMap, linear_maps, norms_of

BENDS: dict[str, Callable[[Tensor], Tensor]] = {
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


def feed_forward(x: Tensor, first: LinearMap, second: LinearMap, bend: str, untransposed: str = "") -> Tensor:
    """Compute Linear, activation, Linear."""
    weights = [one.weight.T if str(n) in untransposed else one.weight for n, one in enumerate((first, second), 1)]
    return F.linear(BENDS[bend](F.linear(x, weights[0], first.bias)), weights[1], second.bias)


def bend_readings(prefix: str = "") -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    return [
        ({"bend": bend}, () if bend == "GELU" else (f"{prefix}the activation function is {bend}",)) for bend in BENDS
    ]


def bends_of(module: nn.Module) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """List all activation functions; those not named in the module's layers or source are marked as rare."""
    texts = [source_of(type(part)) for part in module.modules() if not type(part).__module__.startswith("torch.")]
    text = "".join([*texts, *map(str, module.modules())]).lower()
    spoken = [name for name in BENDS if re.search(rf"(?<![a-z]){name.split()[0].lower()}", text)]
    if "approximate='tanh'" not in text and 'approximate="tanh"' not in text and "0.044715" not in text:
        spoken = [name for name in spoken if name != "GELU (tanh approximation)"]
    if "1.702" not in text:
        spoken = [name for name in spoken if name != "GELU (sigmoid approximation)"]
    likely = spoken or list(BENDS)[:2]
    return [(bend if bend["bend"] in likely else {**bend, "rare_bend": True}, words) for bend, words in bend_readings()]


class FeedForward(Subject):
    """A class, an instance, or a function f(x, w1, b1, w2, b2)."""

    part = "feed-forward"

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name, self.thing = name, thing
        self.is_module = isinstance(thing, type | nn.Module)
        if self.is_module:
            sizes = {"width": 6, "hidden": 10, "dropout": 0.1, "ratio": 2}
            self.instances = Instances(thing, sizes, ("width", "hidden"))
            self.instances.fixed.pop("heads", None)
            self.sample = self.instances.make({})
            self.free = isinstance(thing, type) and takes(thing, "hidden", sizes)
        else:
            self.roles = _function_roles(thing)

    def native(self) -> str:
        return "nn.Linear + activation + nn.Linear"

    def cases(self) -> list[Case]:
        cases = [
            Case("five tokens", {"batch": 2, "tokens": 5, "width": 6, "hidden": 10}),
            Case("other sizes", {"batch": 3, "tokens": 7, "width": 5, "hidden": 9}),
            Case("one token", {"batch": 2, "tokens": 1, "width": 6, "hidden": 10}),
        ]
        return self._fitted(cases)

    def tiny_cases(self) -> list[Case]:
        grown = [(1, 1), (1, 2), (2, 3)]
        cases = [Case(f"width {d}, hidden width {h}", _tiny(d, h), tiny=True) for d, h in grown]
        return self._fitted(cases)

    def _fitted(self, cases: list[Case]) -> list[Case]:
        if not self.is_module:
            return cases
        return [fitted for case in cases if (fitted := self.instances.fitted(case)) is not None]

    def inputs(self, case: Case) -> Inputs:
        s = case.sizes
        shapes: dict[str, tuple[int, ...]] = {"x": (s["batch"], s["tokens"], s["width"])}
        if not self.is_module:
            wanted = {"w1": (s["hidden"], s["width"]), "b1": (s["hidden"],)}
            wanted |= {"w2": (s["width"], s["hidden"]), "b2": (s["width"],)}
            shapes |= {role: shape for role, shape in wanted.items() if role in self.roles.values()}
        return drawn(case, shapes)

    def groups(self) -> list[list[Way]]:
        axes = "the input has shape batch × token × feature"
        if self.is_module:
            return [[Way((axes,), {"flipped": False})]]
        words = "the weights have shape input × output (x @ W)"
        return [[Way((axes,), {"flipped": False})], [Way((axes, words), {"flipped": True})]]

    def module(self, case: Case) -> nn.Module:
        return self.instances.make(case.sizes, self.dtype, self.training)

    def as_passed(self, way: Way, case: Case, inputs: Inputs) -> Inputs:
        return {name: x.T if way.settings["flipped"] and name[0] == "w" else x for name, x in inputs.items()}

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        if self.is_module:
            return picked(self.module(case)(inputs["x"]), tuple(inputs["x"].shape))
        values = self.as_passed(way, case, inputs) | {"dropout": 0.0, "training": self.training}
        return picked(called_with(self.thing, values, self.roles), tuple(inputs["x"].shape))

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        x = inputs["x"]
        if not self.is_module:
            maps = [LinearMap(str(n), inputs[f"w{n}"], inputs.get(f"b{n}")) for n in (1, 2)]
            return feed_forward(x, maps[0], maps[1], options["bend"], options.get("untransposed", ""))
        module = self.module(case)
        first, second = mlp_maps(linear_maps(module), x.shape[-1])
        inner = x
        if options.get("norm_inside"):
            inner = F.layer_norm(x, x.shape[-1:], *norm_arguments(norms_of(module)[0][1]))
        out = feed_forward(inner, first, second, options["bend"], options.get("untransposed", ""))
        return out + x if options.get("added") else out

    def readings(self, way: Way) -> list[Reading]:
        if not self.is_module:
            return list(bend_readings())
        norms = [({"norm_inside": True}, ("the module normalises its input itself",))] if norms_of(self.sample) else []
        added = [({}, ()), ({"added": True}, ("the module adds the residual connection itself",))]
        return [
            ({**bend, **norm, **more}, (*words, *norm_words, *more_words))
            for (bend, words), (norm, norm_words), (more, more_words) in product(
                bends_of(self.sample), [*norms, ({}, ())], added
            )
        ]

    def switches(self, way: Way) -> list[Switch]:
        return [Switch("weight-not-transposed", {"untransposed": which}) for which in ("12", "1", "2")]

    def weights_shown(self, case: Case) -> Inputs:
        return dict(self.module(case).named_parameters()) if self.is_module else {}

    def parameters(self, way: Way, case: Case) -> list[Tensor]:
        return list(self.module(case).parameters()) if self.is_module else []

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        case = self.cases()[0]
        x = {name: tensor.to(self.dtype) for name, tensor in self.inputs(case).items()}
        one = self.theirs(way, case, x | {"x": x["x"][:, :1]})
        same = one.shape == theirs[:, :1].shape and torch.allclose(one, theirs[:, :1], atol=1e-4)
        lines = [observe(same, "Each token is processed independently", "Tokens are not processed independently")]
        if self.is_module and len(linear_maps(self.sample)) != 2:
            lines.append(f"The module has {len(linear_maps(self.sample))} linear layers instead of two.")
        return lines


def mlp_maps(maps: list[LinearMap], width: int) -> tuple[LinearMap, LinearMap]:
    """Return the layer that increases the width and the layer that reduces it."""
    wide = [one for one in maps if one.shape[1] == width and one.shape[0] != width]
    narrow = [one for one in maps if one.shape[0] == width and one.shape[1] != width]
    if any(one.raw for one in maps) and wide and narrow and maps.index(wide[0]) > maps.index(narrow[0]):
        wide, narrow = [_turned(narrow[0])], [_turned(wide[0])]  # raw matrices, input × output
    if not wide and not narrow and len(maps) >= 2:
        return maps[-2], maps[-1]
    if not wide or not narrow:
        raise RuntimeError("the MLP needs two linear layers: width to hidden width, and hidden width to width")
    return wide[0], narrow[-1]


def _tiny(width: int, hidden: int) -> dict[str, int]:
    return {"batch": 1, "tokens": 1, "width": width, "hidden": hidden}


def _turned(one: LinearMap) -> LinearMap:
    return LinearMap(one.name, one.weight.T, one.bias, one.raw)


def _function_roles(function: Any) -> dict[str, str]:
    """x first; weights and biases by their names and order."""
    roles = argument_roles(function)
    names = [name for name in roles if roles[name] not in ("dropout", "training")]
    required = [
        n for n in names if inspect.signature(function).parameters[n].default in (inspect.Parameter.empty, None)
    ]
    roles[required[0]] = "x"
    biases = [n for n in required[1:] if n.lower().startswith("b") or "bias" in words_of(n)]
    weights = [n for n in required[1:] if n not in biases]
    roles |= {name: f"w{number}" for number, name in enumerate(weights[:2], 1)}
    return roles | {name: f"b{number}" for number, name in enumerate(biases[:2], 1)}
