"""The part `vit`: patches, class token, position embeddings, blocks and head (Dosovitskiy et al. 2021)."""

import inspect
from dataclasses import dataclass
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.checking.attention_layers import Reading, norm_arguments
from vitascope.checking.blocks import block, block_forms, block_readings, block_switches
from vitascope.checking.class_token import token_and_table
from vitascope.checking.dot_product import picked
from vitascope.checking.embedding import (
    CLASS_TOKEN,
    PATCHES,
    PIXELS,
    POSITIONS,
    assemble,
    patches_of,
    projected,
    read_token,
)
from vitascope.checking.instances import Instances
from vitascope.checking.reference import Options, Switch
from vitascope.checking.subject import ALONE, NOT_ALONE, Case, Inputs, Subject, Way, drawn, observe
from vitascope.checking.weights import linear_maps, norms_of

SIZES = {"width": 12, "heads": 3, "hidden": 20, "ratio": 2, "dropout": 0.1, "image": 9, "patch": 3, "channels": 3}
SIZES |= {"classes": 5, "depth": 2, "patches": 9, "length": 10, "batch_first": True, "key_width": 4}
MORE: dict[str, Any] = {"side": 3, "chw": (3, 9, 9)}
ORDER = ("image", "patch", "channels", "classes", "width", "depth", "heads", "hidden")


@dataclass
class Anatomy:
    """The layers of the user's ViT by their role."""

    patch: nn.Conv2d | nn.Linear
    blocks: list[nn.Module]
    norms: list[nn.Module]
    heads: list[nn.Linear]
    token: Tensor | None
    table: Tensor | None
    around: tuple[list[nn.LayerNorm], list[nn.LayerNorm]]  # the patch projection

    def tokens(self, patches: Tensor) -> Tensor:
        """Project the patches, with the norms before and after the projection."""
        for norm in self.around[0]:
            patches = F.layer_norm(patches, patches.shape[-1:], *norm_arguments(norm))
        tokens = projected(patches, self.patch.weight, self.patch.bias)
        for norm in self.around[1]:
            tokens = F.layer_norm(tokens, tokens.shape[-1:], *norm_arguments(norm))
        return tokens


_REMEMBERED: WeakKeyDictionary[nn.Module, dict[tuple[int, int], Anatomy]] = WeakKeyDictionary()


def anatomy(module: nn.Module, width: int = 12, patches: int = 9) -> Anatomy:
    """Find the layers of a ViT by shape, name and order."""
    if torch.is_grad_enabled():
        return _anatomy(module, width, patches)
    known = _REMEMBERED.setdefault(module, {})
    if (width, patches) not in known:
        known[width, patches] = _anatomy(module, width, patches)
    return known[width, patches]


def _anatomy(module: nn.Module, width: int, patches: int) -> Anatomy:
    blocks = blocks_of(module)
    inside = {id(part) for one in blocks for part in one.modules()}
    outside = [part for part in module.modules() if id(part) not in inside]
    convolutions = [part for part in outside if isinstance(part, nn.Conv2d)]
    linears = [part for part in outside if isinstance(part, nn.Linear)]
    first: nn.Conv2d | nn.Linear | None = convolutions[0] if convolutions else next(
        (part for part in linears if part.out_features == width and part.in_features != width), None
    )  # fmt: skip
    if first is None or not blocks:
        lacking = "layer that projects the patches" if first is None else "list of transformer blocks"
        raise RuntimeError(f"no {lacking} was found")
    around = norms_around(module, first)
    inside |= {id(norm) for side in around for norm in side}
    norms = [part for _, part in norms_of(module) if id(part) not in inside]
    token, table = token_and_table(module, patches, width)
    return Anatomy(first, blocks, norms, [part for part in linears if part is not first], token, table, around)


def norms_around(module: nn.Module, first: nn.Module) -> tuple[list[nn.LayerNorm], list[nn.LayerNorm]]:
    """Norms in one sequence with the patch projection: those before it and those after."""
    for part in module.modules():
        children = list(part.children())
        if isinstance(part, nn.Sequential) and any(child is first for child in children):
            place = next(number for number, child in enumerate(children) if child is first)
            before = [one for one in children[:place] if isinstance(one, nn.LayerNorm)]
            return before, [one for one in children[place + 1 :] if isinstance(one, nn.LayerNorm)]
    return [], []


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The longest list of layers of one kind that hold linear maps; a lone block where there is no list."""
    lists = []
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential | nn.TransformerEncoder):
            children = list(part.layers if isinstance(part, nn.TransformerEncoder) else part.children())
            alike = [child for child in children if type(child) is type(children[0]) and len(linear_maps(child)) >= 3]
            if alike and len(alike) == len([child for child in children if linear_maps(child)]):
                lists.append(alike)
    lone = [[part] for part in module.children() if len(norms_of(part)) and len(linear_maps(part)) >= 4]
    return max(lists or lone, key=len, default=[])


class ViT(Subject):
    """A class or an instance that takes images and gives logits."""

    part = "vit"
    variants = 3

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name = name
        self.instances = Instances(thing, SIZES | MORE, ORDER)
        self.sample = self.instances.make({})
        found = anatomy(self.sample, self.width, 1)
        self.size = _patch_size(found.patch)
        self.chans = found.patch.in_channels if isinstance(found.patch, nn.Conv2d) else self._channels(found.patch)
        self.side = self._side(found)

    @property
    def width(self) -> int:
        return self.instances.fixed.get("width", 12)

    @property
    def heads(self) -> int:
        return self.instances.fixed.get("heads", 3)

    def _channels(self, patch: nn.Linear) -> int:
        return patch.in_features // self.size**2 if patch.in_features % self.size**2 == 0 else 3

    def _side(self, found: Anatomy) -> int:
        """Patches along a side, from the position table."""
        if found.table is None or not isinstance(self.instances.thing, nn.Module):
            return 3
        return int(len(found.table) ** 0.5)

    def native(self) -> str:
        return "a ViT built from PyTorch layers"

    def cases(self) -> list[Case]:
        edge = self.side * self.size
        sizes = {"batch": 2, "channels": self.chans, "side": edge, "width": self.width, "heads": self.heads}
        return [Case("two images", sizes), Case("one image", sizes | {"batch": 1})]

    def inputs(self, case: Case) -> Inputs:
        s = case.sizes
        return drawn(case, {"images": (s["batch"], s["channels"], s["side"], s["side"])})

    def groups(self) -> list[list[Way]]:
        return [[Way(("the images have shape batch × channel × height × width",), {})]]

    def module(self) -> nn.Module:
        return self.instances.make({}, self.dtype, self.training)

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        module = self.module()
        name = next(iter(inspect.signature(module.forward).parameters))
        return picked(module(**{name: inputs["images"]}), (case.sizes["batch"], 5))

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        found = anatomy(self.module(), self.width, self.side**2)
        order = {"order": options["patch_order"]} if "patch_order" in options else {}
        chosen = {name: options[name] for name in ("pixels", "cut") if name in options}
        cut = patches_of(inputs["images"], self.size, chosen | order)
        tokens = assemble(found.tokens(cut), found.token, found.table, options)
        for one in found.blocks:
            if options.get("position") == "each-block" and found.table is not None:
                tokens = tokens + found.table[: tokens.shape[1]]
            tokens = block(tokens, one, self.heads, None, options)
        if options.get("position") == "end" and found.table is not None:
            tokens = tokens + found.table[: tokens.shape[1]]
        return _head(tokens, found, options)

    def readings(self, way: Way) -> list[Reading]:
        found = anatomy(self.sample, self.width, self.side**2)
        pixels: list[Reading] = [({"pixels": "chw"}, ())]
        if isinstance(found.patch, nn.Linear):
            pixels = [
                ({"pixels": order}, (f"the pixel order in a patch is {words}",)) for order, words in PIXELS.items()
            ]
        pools: list[Reading] = [({"pool": "token"}, ())] if found.token is not None else []
        rare: dict[str, Any] = {} if found.token is None else {"mean_pool": True}
        for how in ("patches", "all") if found.token is not None else ("all",):
            for late in (False, True) if found.norms else (False,):
                words = f"the head reads the mean of all {'tokens' if how == 'all' else 'patch tokens'}"
                pools.append(({"pool": how, "norm_late": late} | rare, (words,)))
        told = () if found.table is not None else ("the model has no position embeddings",)
        told += () if found.norms else ("the model has no norm before the head (Dosovitskiy et al. 2021 use one)",)
        inner = block_readings(found.blocks[0], self.width)
        return [
            ({**one, **pixel, **pool}, (*told, *one_words, *pixel_words, *pool_words))
            for (pool, pool_words), (one, one_words), (pixel, pixel_words) in product(pools, inner, pixels)
        ]

    def forms(self, way: Way) -> list[Switch]:
        return block_forms(anatomy(self.sample, self.width).blocks[0], self.width, self.instances.has_heads)

    def switches(self, way: Way) -> list[Switch]:
        found = anatomy(self.sample, self.width, self.side**2)
        there = {switch.id for switch in self.forms(way)}
        inner = [s for s in block_switches(found.blocks[0], self.width) if s.id not in there]
        patch = [
            Switch(s.id, {"patch_order": s.options["order"]} if "order" in s.options else s.options) for s in PATCHES
        ]
        tokens = CLASS_TOKEN if found.token is not None else []
        tables = POSITIONS if found.table is not None else []
        final = [Switch("missing-norm", {"final": False})] if found.norms else []
        return [*patch, *tokens, *tables, *final, *inner]

    def parameters(self, way: Way, case: Case) -> list[Tensor]:
        return list(self.module().parameters())

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        if theirs.shape != ours.shape:
            return [f"The output has shape {list(theirs.shape)} instead of {list(ours.shape)}."]
        lines = []
        if torch.allclose(theirs.sum(-1), torch.ones(len(theirs), dtype=theirs.dtype), atol=1e-4):
            lines.append(
                "The outputs sum to 1, so the model ends with a softmax. The cross-entropy loss expects logits."
            )
        alone = self.theirs(way, self.cases()[0], {"images": self.inputs(self.cases()[0])["images"][:1].to(self.dtype)})
        free = torch.allclose(alone, theirs[:1], atol=1e-4)
        return [*lines, observe(free, ALONE, NOT_ALONE)]


def _head(tokens: Tensor, found: Anatomy, options: Options) -> Tensor:
    def normal(x: Tensor) -> Tensor:
        for norm in found.norms if options.get("final", True) else []:
            x = F.layer_norm(x, x.shape[-1:], *norm_arguments(norm))
        return x

    if not options.get("norm_late"):
        tokens = normal(tokens)
    if options["pool"] == "token":
        pooled = read_token(tokens, options)
    else:
        pooled = tokens[:, 0 if options["pool"] == "all" else 1 :].mean(dim=1)
    pooled = normal(pooled) if options.get("norm_late") else pooled
    for number, layer in enumerate(found.heads):
        pooled = F.linear(pooled if number == 0 else torch.tanh(pooled), layer.weight, layer.bias)
    return pooled


def _patch_size(layer: nn.Conv2d | nn.Linear) -> int:
    if isinstance(layer, nn.Conv2d):
        return int(layer.kernel_size[0])
    for size in (3, 4, 2, 7, 8, 16, 14, 5, 6):
        if layer.in_features in (3 * size**2, size**2):
            return size
    return 3
