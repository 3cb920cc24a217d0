"""The part `vit`: patches, class token, position embeddings, blocks and head (Dosovitskiy et al. 2021)."""

import inspect
from dataclasses import dataclass
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.attention_layers import CorrectVariant, get_norm_parameters
from vitascope.coursework.checker.blocks import (
    find_missing_block_layers,
    list_block_mistakes,
    list_block_variants,
    run_reference_block,
)
from vitascope.coursework.checker.dot_product import select_output
from vitascope.coursework.checker.embedding import (
    CLASS_TOKEN_MISTAKES,
    PATCH_MISTAKES,
    PIXEL_ORDERS,
    POSITION_MISTAKES,
    assemble_tokens,
    extract_patches,
    find_token_and_positions,
    project_patches,
    select_class_token,
)
from vitascope.coursework.checker.instances import ModuleFactory
from vitascope.coursework.checker.part import (
    ALONE,
    NOT_ALONE,
    CallConvention,
    Case,
    NamedTensors,
    PartChecker,
    draw_inputs,
    observe,
)
from vitascope.coursework.checker.reference import ReferenceOptions, SimulatedMistake
from vitascope.coursework.checker.weights import find_linear_layers, find_norms

CONSTRUCTOR_SIZES = {
    "width": 12,
    "heads": 3,
    "hidden": 20,
    "ratio": 2,
    "dropout": 0.1,
    "image": 9,
    "patch": 3,
    "channels": 3,
}
CONSTRUCTOR_SIZES |= {"classes": 5, "depth": 2, "patches": 9, "length": 10, "batch_first": True, "key_width": 4}
EXTRA_CONSTRUCTOR_SIZES: dict[str, Any] = {"side": 3, "chw": (3, 9, 9)}
SIZE_ORDER = ("image", "patch", "channels", "classes", "width", "depth", "heads", "hidden")


@dataclass
class ViTLayers:
    """The layers of the user's ViT by their role."""

    patch_projection: nn.Conv2d | nn.Linear
    blocks: list[nn.Module]
    final_norms: list[nn.Module]
    head_layers: list[nn.Linear]
    class_token: Tensor | None
    position_table: Tensor | None
    projection_norms: tuple[list[nn.LayerNorm], list[nn.LayerNorm]]  # the patch projection

    def embed_patches(self, patches: Tensor) -> Tensor:
        """Project the patches, with the norms before and after the projection."""
        for norm in self.projection_norms[0]:
            patches = F.layer_norm(patches, patches.shape[-1:], *get_norm_parameters(norm))
        tokens = project_patches(patches, self.patch_projection.weight, self.patch_projection.bias)
        for norm in self.projection_norms[1]:
            tokens = F.layer_norm(tokens, tokens.shape[-1:], *get_norm_parameters(norm))
        return tokens


_VIT_LAYERS_CACHE: WeakKeyDictionary[nn.Module, dict[tuple[int, int], ViTLayers]] = WeakKeyDictionary()


def find_vit_layers(module: nn.Module, width: int = 12, num_patches: int = 9) -> ViTLayers:
    """Find the layers of a ViT by shape, name and order."""
    if torch.is_grad_enabled():
        return _collect_vit_layers(module, width, num_patches)
    known = _VIT_LAYERS_CACHE.setdefault(module, {})
    if (width, num_patches) not in known:
        known[width, num_patches] = _collect_vit_layers(module, width, num_patches)
    return known[width, num_patches]


def _collect_vit_layers(module: nn.Module, width: int, num_patches: int) -> ViTLayers:
    blocks = find_blocks(module)
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
    around = find_projection_norms(module, first)
    inside |= {id(norm) for side in around for norm in side}
    norms = [part for _, part in find_norms(module) if id(part) not in inside]
    token, table = find_token_and_positions(module, num_patches, width)
    return ViTLayers(first, blocks, norms, [part for part in linears if part is not first], token, table, around)


def find_projection_norms(
    module: nn.Module, patch_projection: nn.Module
) -> tuple[list[nn.LayerNorm], list[nn.LayerNorm]]:
    """Norms in one sequence with the patch projection: those before it and those after."""
    for part in module.modules():
        children = list(part.children())
        if isinstance(part, nn.Sequential) and any(child is patch_projection for child in children):
            place = next(number for number, child in enumerate(children) if child is patch_projection)
            before = [one for one in children[:place] if isinstance(one, nn.LayerNorm)]
            return before, [one for one in children[place + 1 :] if isinstance(one, nn.LayerNorm)]
    return [], []


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The longest list of layers of one kind that hold linear maps; a lone block where there is no list."""
    lists = []
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential | nn.TransformerEncoder):
            children = list(part.layers if isinstance(part, nn.TransformerEncoder) else part.children())
            alike = [
                child for child in children if type(child) is type(children[0]) and len(find_linear_layers(child)) >= 3
            ]
            if alike and len(alike) == len([child for child in children if find_linear_layers(child)]):
                lists.append(alike)
    lone = [[part] for part in module.children() if len(find_norms(part)) and len(find_linear_layers(part)) >= 4]
    return max(lists or lone, key=len, default=[])


class ViTChecker(PartChecker):
    """A class or an instance that takes images and gives logits."""

    part = "vit"
    max_variants_per_mistake = 3

    def __init__(self, name: str, user_code: Any, mask_polarity: str | None = None) -> None:
        self.name = name
        self.module_factory = ModuleFactory(user_code, CONSTRUCTOR_SIZES | EXTRA_CONSTRUCTOR_SIZES, SIZE_ORDER)
        self.sample_module = self.module_factory.get_module({})
        found = find_vit_layers(self.sample_module, self.width, 1)
        self.patch_size = _infer_patch_size(found.patch_projection)
        self.num_channels = (
            found.patch_projection.in_channels
            if isinstance(found.patch_projection, nn.Conv2d)
            else self._infer_num_channels(found.patch_projection)
        )
        self.patches_per_side = self._infer_patches_per_side(found)

    @property
    def width(self) -> int:
        return self.module_factory.fixed_sizes.get("width", 12)

    @property
    def num_heads(self) -> int:
        return self.module_factory.fixed_sizes.get("heads", 3)

    def _infer_num_channels(self, patch_projection: nn.Linear) -> int:
        return (
            patch_projection.in_features // self.patch_size**2
            if patch_projection.in_features % self.patch_size**2 == 0
            else 3
        )

    def _infer_patches_per_side(self, vit_layers: ViTLayers) -> int:
        """Patches along a side, from the position table."""
        if vit_layers.position_table is None or not isinstance(self.module_factory.user_code, nn.Module):
            return 3
        return int(len(vit_layers.position_table) ** 0.5)

    def get_reference_name(self) -> str:
        return "a ViT built from PyTorch layers"

    def list_cases(self) -> list[Case]:
        edge = self.patches_per_side * self.patch_size
        sizes = {"batch": 2, "channels": self.num_channels, "side": edge, "width": self.width, "heads": self.num_heads}
        return [Case("two images", sizes), Case("one image", sizes | {"batch": 1})]

    def make_inputs(self, case: Case) -> NamedTensors:
        s = case.sizes
        return draw_inputs(case, {"images": (s["batch"], s["channels"], s["side"], s["side"])})

    def list_convention_groups(self) -> list[list[CallConvention]]:
        return [[CallConvention(("the images have shape batch × channel × height × width",), {})]]

    def get_module(self) -> nn.Module:
        return self.module_factory.get_module({}, self.dtype, self.training)

    def run_user_code(self, convention: CallConvention, case: Case, inputs: NamedTensors) -> Tensor:
        module = self.get_module()
        name = next(iter(inspect.signature(module.forward).parameters))
        return select_output(module(**{name: inputs["images"]}), (case.sizes["batch"], 5))

    def run_reference(
        self, convention: CallConvention, case: Case, inputs: NamedTensors, options: ReferenceOptions
    ) -> Tensor:
        found = find_vit_layers(self.get_module(), self.width, self.patches_per_side**2)
        order = {"order": options["patch_order"]} if "patch_order" in options else {}
        chosen = {name: options[name] for name in ("pixels", "cut") if name in options}
        cut = extract_patches(inputs["images"], self.patch_size, chosen | order)
        tokens = assemble_tokens(found.embed_patches(cut), found.class_token, found.position_table, options)
        for one in found.blocks:
            if options.get("position") == "each-block" and found.position_table is not None:
                tokens = tokens + found.position_table[: tokens.shape[1]]
            tokens = run_reference_block(tokens, one, self.num_heads, None, options)
        if options.get("position") == "end" and found.position_table is not None:
            tokens = tokens + found.position_table[: tokens.shape[1]]
        return _apply_classifier_head(tokens, found, options)

    def list_correct_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        found = find_vit_layers(self.sample_module, self.width, self.patches_per_side**2)
        pixels: list[CorrectVariant] = [({"pixels": "chw"}, ())]
        if isinstance(found.patch_projection, nn.Linear):
            pixels = [
                ({"pixels": order}, (f"the pixel order in a patch is {words}",))
                for order, words in PIXEL_ORDERS.items()
            ]
        pools: list[CorrectVariant] = [({"pool": "token"}, ())] if found.class_token is not None else []
        rare: dict[str, Any] = {} if found.class_token is None else {"mean_pool": True}
        for how in ("patches", "all") if found.class_token is not None else ("all",):
            for late in (False, True) if found.final_norms else (False,):
                words = f"the head reads the mean of all {'tokens' if how == 'all' else 'patch tokens'}"
                pools.append(({"pool": how, "norm_late": late} | rare, (words,)))
        told = () if found.position_table is not None else ("the model has no position embeddings",)
        told += (
            () if found.final_norms else ("the model has no norm before the head (Dosovitskiy et al. 2021 use one)",)
        )
        inner = list_block_variants(found.blocks[0], self.width)
        return [
            ({**one, **pixel, **pool}, (*told, *one_words, *pixel_words, *pool_words))
            for (pool, pool_words), (one, one_words), (pixel, pixel_words) in product(pools, inner, pixels)
        ]

    def find_missing_layers(self, convention: CallConvention) -> list[SimulatedMistake]:
        return find_missing_block_layers(
            find_vit_layers(self.sample_module, self.width).blocks[0], self.width, self.module_factory.has_heads
        )

    def list_simulated_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        found = find_vit_layers(self.sample_module, self.width, self.patches_per_side**2)
        there = {switch.mistake_id for switch in self.find_missing_layers(convention)}
        inner = [s for s in list_block_mistakes(found.blocks[0], self.width) if s.mistake_id not in there]
        patch = [
            SimulatedMistake(s.mistake_id, {"patch_order": s.options["order"]} if "order" in s.options else s.options)
            for s in PATCH_MISTAKES
        ]
        tokens = CLASS_TOKEN_MISTAKES if found.class_token is not None else []
        tables = POSITION_MISTAKES if found.position_table is not None else []
        final = [SimulatedMistake("missing-norm", {"final": False})] if found.final_norms else []
        return [*patch, *tokens, *tables, *final, *inner]

    def get_user_parameters(self, convention: CallConvention, case: Case) -> list[Tensor]:
        return list(self.get_module().parameters())

    def describe_evidence(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        if user_result.shape != reference_result.shape:
            return [f"The output has shape {list(user_result.shape)} instead of {list(reference_result.shape)}."]
        lines = []
        if torch.allclose(user_result.sum(-1), torch.ones(len(user_result), dtype=user_result.dtype), atol=1e-4):
            lines.append(
                "The outputs sum to 1, so the model ends with a softmax. The cross-entropy loss expects logits."
            )
        alone = self.run_user_code(
            convention,
            self.list_cases()[0],
            {"images": self.make_inputs(self.list_cases()[0])["images"][:1].to(self.dtype)},
        )
        free = torch.allclose(alone, user_result[:1], atol=1e-4)
        return [*lines, observe(free, ALONE, NOT_ALONE)]


def _apply_classifier_head(tokens: Tensor, vit_layers: ViTLayers, options: ReferenceOptions) -> Tensor:
    def normal(x: Tensor) -> Tensor:
        for norm in vit_layers.final_norms if options.get("final", True) else []:
            x = F.layer_norm(x, x.shape[-1:], *get_norm_parameters(norm))
        return x

    if not options.get("norm_late"):
        tokens = normal(tokens)
    if options["pool"] == "token":
        pooled = select_class_token(tokens, options)
    else:
        pooled = tokens[:, 0 if options["pool"] == "all" else 1 :].mean(dim=1)
    pooled = normal(pooled) if options.get("norm_late") else pooled
    for number, layer in enumerate(vit_layers.head_layers):
        pooled = F.linear(pooled if number == 0 else torch.tanh(pooled), layer.weight, layer.bias)
    return pooled


def _infer_patch_size(patch_projection: nn.Conv2d | nn.Linear) -> int:
    if isinstance(patch_projection, nn.Conv2d):
        return int(patch_projection.kernel_size[0])
    for size in (3, 4, 2, 7, 8, 16, 14, 5, 6):
        if patch_projection.in_features in (3 * size**2, size**2):
            return size
    return 3
