"""Check the part `vit`: patches, class token, position embeddings, blocks and head (Dosovitskiy et al. 2021)."""

import inspect
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.blocks import (
    find_missing_norm_or_output_projection,
    list_block_mistakes,
    list_correct_block_variants,
    run_reference_block_variant,
)
from vitascope.coursework.checker.dot_product import select_matching_or_first_tensor
from vitascope.coursework.checker.image_embedding import (
    CLASS_TOKEN_MISTAKES,
    PATCH_MISTAKES,
    PIXEL_ORDERS,
    POSITION_MISTAKES,
    add_class_token_and_positions_by_variant,
    extract_patches_by_variant,
    select_first_or_last_token,
)
from vitascope.coursework.checker.layers import ViTLayers, get_norm_weight_bias_eps, get_or_find_vit_layers
from vitascope.coursework.checker.module_factory import ModuleFactory
from vitascope.coursework.checker.part_checker import (
    IMAGES_INDEPENDENT,
    CallConvention,
    Case,
    CorrectVariant,
    MaskPolarity,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
    draw_seeded_inputs_for_case,
    format_observation,
)
from vitascope.coursework.checker.recognition import UserCode
from vitascope.coursework.checker.reference import ReferenceVariant, SimulatedMistake

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


class ViTChecker(PartChecker):
    """Check a class or an instance that takes images and returns logits."""

    part = "vit"
    max_variants_per_mistake = 3

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name = name
        self.module_factory = ModuleFactory(user_code, CONSTRUCTOR_SIZES | EXTRA_CONSTRUCTOR_SIZES, SIZE_ORDER)
        self.sample_module = self.module_factory.get_or_build_module({})
        layers = get_or_find_vit_layers(self.sample_module, self.width, 1)
        self.patch_size = _infer_patch_size(layers.patch_projection, default=3)
        self.num_channels = (
            layers.patch_projection.in_channels
            if isinstance(layers.patch_projection, nn.Conv2d)
            else self._infer_num_channels(layers.patch_projection)
        )
        self.patches_per_side = self._infer_patches_per_side(layers)

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
        """Return the number of patches along a side, from the position table."""
        if vit_layers.position_table is None or not isinstance(self.module_factory.user_code, nn.Module):
            return 3
        return int(len(vit_layers.position_table) ** 0.5)

    def get_reference_name(self) -> str:
        return "a ViT built from PyTorch layers"

    def list_cases(self) -> list[Case]:
        image_size = self.patches_per_side * self.patch_size
        sizes = {
            "batch": 2,
            "channels": self.num_channels,
            "side": image_size,
            "width": self.width,
            "heads": self.num_heads,
        }
        return [Case("two images", sizes), Case("one image", sizes | {"batch": 1})]

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        s = case.sizes
        return draw_seeded_inputs_for_case(case, {"images": (s["batch"], s["channels"], s["side"], s["side"])})

    def list_convention_groups(self) -> list[list[CallConvention]]:
        return [[CallConvention(("the images have shape batch × channel × height × width",), {})]]

    def get_or_build_module(self) -> nn.Module:
        return self.module_factory.get_or_build_module({}, self.dtype, self.training)

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        module = self.get_or_build_module()
        name = next(iter(inspect.signature(module.forward).parameters))
        return select_matching_or_first_tensor(module(**{name: inputs["images"]}), (case.sizes["batch"], 5))

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        layers = get_or_find_vit_layers(self.get_or_build_module(), self.width, self.patches_per_side**2)
        order = {"order": variant_or_mistakes["patch_order"]} if "patch_order" in variant_or_mistakes else {}
        patch_options = {name: variant_or_mistakes[name] for name in ("pixels", "cut") if name in variant_or_mistakes}
        patches = extract_patches_by_variant(inputs["images"], self.patch_size, patch_options | order)
        tokens = add_class_token_and_positions_by_variant(
            layers.normalize_and_project_patches(patches),
            layers.class_token,
            layers.position_table,
            variant_or_mistakes,
        )
        for block in layers.blocks:
            if variant_or_mistakes.get("position") == "each-block" and layers.position_table is not None:
                tokens = tokens + layers.position_table[: tokens.shape[1]]
            tokens = run_reference_block_variant(tokens, block, self.num_heads, None, variant_or_mistakes)
        if variant_or_mistakes.get("position") == "end" and layers.position_table is not None:
            tokens = tokens + layers.position_table[: tokens.shape[1]]
        return _normalize_pool_and_classify(tokens, layers, variant_or_mistakes)

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        layers = get_or_find_vit_layers(self.sample_module, self.width, self.patches_per_side**2)
        pixel_variants = [CorrectVariant({"pixels": "chw"}, ())]
        if isinstance(layers.patch_projection, nn.Linear):
            pixel_variants = [
                CorrectVariant({"pixels": order}, (f"the pixel order in a patch is {text}",))
                for order, text in PIXEL_ORDERS.items()
            ]
        assumptions = () if layers.position_table is not None else ("the model has no position embeddings",)
        if not layers.final_norms:
            assumptions += ("the model has no norm before the head (Dosovitskiy et al. 2021 use one)",)
        return [
            CorrectVariant(
                {**block.options, **pixels.options, **pooling.options},
                (*assumptions, *block.assumptions, *pixels.assumptions, *pooling.assumptions),
            )
            for pooling, block, pixels in product(
                _list_pooling_variants(layers),
                list_correct_block_variants(layers.blocks[0], self.width),
                pixel_variants,
            )
        ]

    def find_missing_layer_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        return find_missing_norm_or_output_projection(
            get_or_find_vit_layers(self.sample_module, self.width).blocks[0], self.width, self.module_factory.has_heads
        )

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        layers = get_or_find_vit_layers(self.sample_module, self.width, self.patches_per_side**2)
        missing_ids = {mistake.mistake_id for mistake in self.find_missing_layer_mistakes(convention)}
        block_mistakes = [
            s for s in list_block_mistakes(layers.blocks[0], self.width) if s.mistake_id not in missing_ids
        ]
        patch = [
            SimulatedMistake(s.mistake_id, {"patch_order": s.options["order"]} if "order" in s.options else s.options)
            for s in PATCH_MISTAKES
        ]
        tokens = CLASS_TOKEN_MISTAKES if layers.class_token is not None else []
        tables = POSITION_MISTAKES if layers.position_table is not None else []
        final = [SimulatedMistake("missing-norm", {"final": False})] if layers.final_norms else []
        return [*patch, *tokens, *tables, *final, *block_mistakes]

    def get_user_parameters(self, convention: CallConvention, case: Case) -> list[Tensor]:
        return list(self.get_or_build_module().parameters())

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        if user_result.shape != reference_result.shape:
            return [f"The output has shape {list(user_result.shape)} instead of {list(reference_result.shape)}."]
        lines = []
        if torch.allclose(user_result.sum(-1), torch.ones(len(user_result), dtype=user_result.dtype), atol=1e-4):
            lines.append(
                "The outputs sum to 1, so the model ends with a softmax. The cross-entropy loss expects logits."
            )
        single_result = self.run_user_code_and_restore_axes(
            convention,
            self.list_cases()[0],
            {"images": self.make_float64_inputs(self.list_cases()[0])["images"][:1].to(self.dtype)},
        )
        is_independent = torch.allclose(single_result, user_result[:1], atol=1e-4)
        return [*lines, format_observation(is_independent, IMAGES_INDEPENDENT)]


def _list_pooling_variants(vit_layers: ViTLayers) -> list[CorrectVariant]:
    """List the correct inputs of the head: the class token, or the mean of tokens normalised before or after it."""
    has_class_token = vit_layers.class_token is not None
    variants = [CorrectVariant({"pool": "token"}, ())] if has_class_token else []
    rare_option = {"mean_pool": True} if has_class_token else {}
    for pool in ("patches", "all") if has_class_token else ("all",):
        for norm_late in (False, True) if vit_layers.final_norms else (False,):
            text = f"the head reads the mean of all {'tokens' if pool == 'all' else 'patch tokens'}"
            variants.append(CorrectVariant({"pool": pool, "norm_late": norm_late, **rare_option}, (text,)))
    return variants


def _normalize_pool_and_classify(
    tokens: Tensor, vit_layers: ViTLayers, variant_or_mistakes: ReferenceVariant
) -> Tensor:
    def normalize(x: Tensor) -> Tensor:
        for norm in vit_layers.final_norms if variant_or_mistakes.get("final", True) else []:
            x = F.layer_norm(x, x.shape[-1:], *get_norm_weight_bias_eps(norm))
        return x

    if not variant_or_mistakes.get("norm_late"):
        tokens = normalize(tokens)
    if variant_or_mistakes["pool"] == "token":
        pooled = select_first_or_last_token(tokens, variant_or_mistakes)
    else:
        pooled = tokens[:, 0 if variant_or_mistakes["pool"] == "all" else 1 :].mean(dim=1)
    pooled = normalize(pooled) if variant_or_mistakes.get("norm_late") else pooled
    for index, layer in enumerate(vit_layers.head_layers):
        pooled = F.linear(pooled if index == 0 else torch.tanh(pooled), layer.weight, layer.bias)
    return pooled


def _infer_patch_size(patch_projection: nn.Conv2d | nn.Linear, *, default: int) -> int:
    if isinstance(patch_projection, nn.Conv2d):
        return int(patch_projection.kernel_size[0])
    for size in (3, 4, 2, 7, 8, 16, 14, 5, 6):
        if patch_projection.in_features in (3 * size**2, size**2):
            return size
    return default
