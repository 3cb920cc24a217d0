"""The part `transformer-block`: attention, then the MLP, each normalised first and added (Dosovitskiy et al. 2021)."""

from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.checking.attention_layers import (
    Reading,
    attention_maps_of,
    attention_readings,
    attention_switches,
    norm_arguments,
    weights_under,
)
from vitascope.checking.feed_forward import bends_of, feed_forward, mlp_maps
from vitascope.checking.heads import AttentionModule
from vitascope.checking.instances import Instances
from vitascope.checking.masks import forms_for
from vitascope.checking.naming import argument_roles, words_of
from vitascope.checking.reference import Options, Switch, multi_head
from vitascope.checking.subject import Case, Inputs, Way, allowed_pairs, plain_mask
from vitascope.checking.weights import LinearMap, Weights, linear_maps, norms_of

WRONG = [
    Switch("norm-after", {"order": "after"}),
    Switch("norm-after", {"order": "on-branch"}),
    *(Switch("missing-residual", {"added": which}) for which in ("", "1", "2", "normed")),
    *(Switch("missing-norm", {"normed": which}) for which in ("", "1", "2")),
]


Parts = tuple[Weights, LinearMap, LinearMap]
_REMEMBERED: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Parts]] = WeakKeyDictionary()


def block_weights(module: nn.Module, options: Options, heads: int, width: int) -> Parts:
    """Attention's weights and the MLP's two maps; remembered where no gradient is wanted."""
    if torch.is_grad_enabled():
        return _block_weights(module, options, heads, width)
    known, key = _REMEMBERED.setdefault(module, {}), (options["assignment"], options.get("rows"), heads, width)
    if key not in known:
        known[key] = _block_weights(module, options, heads, width)
    return known[key]


def _block_weights(module: nn.Module, options: Options, heads: int, width: int) -> Parts:
    maps = linear_maps(module)
    attending = attention_maps_of(maps, width)
    first, second = mlp_maps([one for one in maps if all(one is not other for other in attending)], width)
    return weights_under(attending, options, heads), first, second


def block(x: Tensor, module: nn.Module, heads: int, allowed: Tensor | None, options: Options) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x)); the weights are those of the user's module."""
    weights, first, second = block_weights(module, options, heads, x.shape[-1])
    if options.get("causal"):
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()

    def attention(y: Tensor) -> Tensor:
        return multi_head((y, y, y), weights, heads, allowed, options)

    def mlp(y: Tensor) -> Tensor:
        return feed_forward(y, first, second, options["bend"])

    norms = block_norms(module, options.get("norms_swapped", False))
    for number, layer in (("1", attention), ("2", mlp)):
        norm = norms[int(number) - 1] if number in options.get("normed", "12") else None
        x = _step(x, layer, norm, number in options.get("added", "12"), options)
    return x


def _step(x: Tensor, layer: Any, norm: nn.Module | None, added: bool, options: Options) -> Tensor:
    def normal(y: Tensor) -> Tensor:
        return y if norm is None else F.layer_norm(y, y.shape[-1:], *norm_arguments(norm))

    if options.get("order") == "after":
        return normal(x + layer(x) if added else layer(x))
    if options.get("order") == "on-branch":
        return x + normal(layer(x)) if added else normal(layer(x))
    if options.get("added") == "normed":
        return normal(x) + layer(normal(x))
    return x + layer(normal(x)) if added else layer(normal(x))


def block_norms(module: nn.Module, swapped: bool) -> list[nn.Module | None]:
    """Attention's norm and the MLP's: as they were made, or the other way round; one may serve both."""
    norms: list[nn.Module | None] = [norm for _, norm in norms_of(module)]
    if len(norms) < 2:
        return [*norms, *norms] if norms else [None, None]
    return [norms[1], norms[0]] if swapped else norms[:2]


def block_readings(module: nn.Module, width: int) -> list[Reading]:
    """List the correct variants: attention, activation function, and which norm belongs to which layer."""
    attending = attention_readings(module, attention_maps_of(linear_maps(module), width))
    swaps: list[Reading] = [({}, ())]
    if len(norms_of(module)) > 1:
        names = [name for name, _ in norms_of(module)][1::-1]
        swaps.append(
            ({"norms_swapped": True}, (f"{names[0]} is the norm before attention, {names[1]} the norm before the MLP",))
        )
    return [
        ({**bend, **chosen, **swap}, (*bend_words, *words, *swap_words))
        for (swap, swap_words), (chosen, words), (bend, bend_words) in product(swaps, attending, bends_of(module))
    ]


def block_forms(module: nn.Module, width: int, has_heads: bool) -> list[Switch]:
    """List the layers that are missing."""
    found = []
    attending = attention_maps_of(linear_maps(module), width)
    weights = weights_under(attending, attention_readings(module, attending)[0][0], 1)
    if has_heads and "wo" not in weights:
        found.append(Switch("missing-output-projection", {"projected": False}))
    if not norms_of(module):
        found.append(Switch("missing-norm", {"normed": ""}))
    return found


def block_switches(module: nn.Module, width: int, *, masked: bool = False) -> list[Switch]:
    maps = attention_maps_of(linear_maps(module), width)
    return [*WRONG, *attention_switches(module, maps, masked=masked)]


class TransformerBlock(AttentionModule):
    """A class or an instance."""

    part = "transformer-block"
    variants = 3
    axes = (("batch", "token"),)

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name = name
        sizes = {"width": 12, "heads": 3, "hidden": 20, "ratio": 2, "dropout": 0.1, "batch_first": True, "length": 16}
        sizes |= {"key_width": 4, "value_width": 4}
        self.instances = Instances(thing, sizes, ("width", "heads", "hidden"))
        self.sample = self.instances.make({})
        self.roles = argument_roles(self.sample.forward)
        masks = [argument for argument, role in self.roles.items() if role == "mask"]
        self.forms_of_mask = forms_for(masks[0], type(self.sample), polarity) if masks else []
        self.plain = plain_mask(self.sample.forward, self.roles)

    def native(self) -> str:
        return "nn.TransformerEncoderLayer(norm_first=True)"

    def _grid(self, rows: int, columns: int) -> dict[str, int]:
        return {}

    @property
    def width(self) -> int:
        return self.instances.fixed.get("width", 12)

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        x = inputs["x"]
        allowed = allowed_pairs(case, x.shape[1], x.shape[1])
        return block(x, self.module(case), case.sizes["heads"], allowed, options)

    def readings(self, way: Way) -> list[Reading]:
        return block_readings(self.sample, self.width)

    def forms(self, way: Way) -> list[Switch]:
        return block_forms(self.sample, self.width, self.instances.has_heads)

    def switches(self, way: Way) -> list[Switch]:
        there = {switch.id for switch in self.forms(way)}
        found = block_switches(self.sample, self.width, masked=bool(self.forms_of_mask))
        return [switch for switch in found if switch.id not in there]

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        lines = super().evidence(way, theirs, ours)
        known = {"weight", "bias"}
        odd = [n for n, p in self.sample.named_parameters() if p.ndim == 1 and not known & set(words_of(n))]
        return (
            [*lines, f"The module has parameters that a standard block does not have: {', '.join(odd)}."]
            if odd
            else lines
        )
