"""Find the attention layers of a user's module, with the variants of attention that are correct, and a ViT's layers."""

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.image_embedding import find_class_token_and_positions, project_patches
from vitascope.coursework.checker.part_checker import CorrectVariant
from vitascope.coursework.checker.recognition import get_source_or_empty, guess_qkvo_role, split_identifier_into_words
from vitascope.coursework.checker.reference import (
    ATTENTION_MAP_MISTAKES,
    HEAD_MISTAKES,
    MASK_FILL_MISTAKES,
    MASK_MISTAKES,
    SCALE_MISTAKES,
    ReferenceVariant,
    SimulatedMistake,
    WeightsByRole,
)
from vitascope.coursework.checker.weights import (
    PACKED_ROW_ORDERS,
    LinearLayer,
    assign_qkvo_weights,
    find_linear_layers_and_matrices,
    find_norms,
    is_packed_qkv_layer,
    iterate_qkv_assignments,
    list_possible_row_orders,
)


class NormParameters(NamedTuple):
    """The parameters of a norm, in the order of F.layer_norm's arguments."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


def list_correct_attention_variants(module: nn.Module, linear_layers: list[LinearLayer]) -> list[CorrectVariant]:
    """List the correct variants: which weight is which, how the heads are split, an optional causal mask."""
    default = CorrectVariant({}, ())
    splits = [default, CorrectVariant({"split": "inside-out"}, ("the features of the heads are interleaved",))]
    masks = [default]
    if source_mentions_causal_mask(module):
        masks.append(CorrectVariant({"causal": True}, ("the module applies a causal mask itself",)))
    return [
        CorrectVariant(
            {"assignment": described.assignment, **split.options, **mask.options},
            (*described.assumptions, *split.assumptions, *mask.assumptions),
        )
        for described, split, mask in product(iterate_qkv_assignments(linear_layers), splits, masks)
    ]


def source_mentions_causal_mask(module: nn.Module) -> bool:
    """Return whether the source code contains tril, triu or the word causal."""
    source = "".join(
        get_source_or_empty(type(part)) for part in module.modules() if not type(part).__module__.startswith("torch")
    )
    return "tril" in source or "triu" in source or "causal" in source.lower()


def list_attention_mistakes(
    module: nn.Module, linear_layers: list[LinearLayer], *, has_mask: bool
) -> list[SimulatedMistake]:
    """List all mistakes of a multi-head attention with these weights."""
    packed = next((layer for layer in linear_layers if is_packed_qkv_layer(layer)), None)
    rows = [] if packed is None else list_row_order_mistakes(list_possible_row_orders(packed.name))
    masks = [*MASK_MISTAKES, *MASK_FILL_MISTAKES] if has_mask or source_mentions_causal_mask(module) else []
    return [*SCALE_MISTAKES, *ATTENTION_MAP_MISTAKES, *HEAD_MISTAKES, *rows, *masks]


def list_row_order_mistakes(correct_row_orders: list[str]) -> list[SimulatedMistake]:
    """List wrong row orders of a packed weight; `query-key-swapped` is a separate mistake."""
    row_orders = [
        rows for rows in [*PACKED_ROW_ORDERS, "hd3", "h3d"] if rows not in correct_row_orders and rows != "kqv"
    ]
    return [SimulatedMistake("wrong-in-proj-slice", {"rows": rows}) for rows in row_orders]


def guess_in_proj_indexing_mistake_ids(source: str) -> list[str]:
    """Detect an index such as `in_proj_weight[0]`: one row of 3 · width, not the query weight (sheet C)."""
    match = re.search(r"(in_proj\w*|qkv\w*\.weight|w_?qkv)\[\s*[012]\s*\]", source)
    return ["wrong-in-proj-slice"] if match else []


def assign_weights_by_variant(
    linear_layers: list[LinearLayer], variant_or_mistakes: ReferenceVariant, num_heads: int
) -> WeightsByRole:
    """Return the weights for the reference, with a wrong row order if the options contain one."""
    assignment = variant_or_mistakes["assignment"]
    if "rows" in variant_or_mistakes:
        assignment = replace(assignment, row_order=variant_or_mistakes["rows"])
    return assign_qkvo_weights(linear_layers, assignment, num_heads)


def select_attention_layers(linear_layers: list[LinearLayer], width: int) -> list[LinearLayer]:
    """Select a block's attention layers, by name or by shape; the other layers belong to the MLP."""
    packed = [layer for layer in linear_layers if is_packed_qkv_layer(layer)]
    named = [layer for layer in linear_layers if _is_attention_or_qkv_layer_name(layer.name)]
    if named:
        others = [layer for layer in linear_layers if all(layer is not other for other in named)]
        outputs = [layer for layer in others if layer.shape == (width, width)]
        lacks_output = not any(guess_qkvo_role(layer.name) == "o" for layer in named) and len(others) > 2
        return [*named, *outputs[:1]] if lacks_output else named
    squares = [layer for layer in linear_layers if layer.shape == (width, width)]
    return [*packed[:1], *squares[:1]] if packed else squares[:4]


def _is_attention_or_qkv_layer_name(layer_name: str) -> bool:
    words = set(split_identifier_into_words(layer_name))
    if words & {"mlp", "ffn", "ff", "feedforward", "feed", "fc", "linear"} and not words & {"attn", "attention", "mha"}:
        return False
    attention_words = {"attn", "attention", "mha", "msa", "selfattn", "selfattention", "self", "multihead", "sa", "att"}
    return bool(words & attention_words) or guess_qkvo_role(layer_name) in ("q", "k", "v", "qkv")


def get_norm_weight_bias_eps(norm: nn.Module) -> NormParameters:
    """Return the weight, bias and epsilon of a norm."""
    eps = getattr(norm, "eps", None) or 1e-5
    return NormParameters(getattr(norm, "weight", None), getattr(norm, "bias", None), eps)


class ProjectionNorms(NamedTuple):
    """The norms directly before and after the patch projection."""

    before: list[nn.LayerNorm]
    after: list[nn.LayerNorm]


@dataclass
class ViTLayers:
    """The layers of the user's ViT by their role."""

    patch_projection: nn.Conv2d | nn.Linear
    blocks: list[nn.Module]
    final_norms: list[nn.Module]
    head_layers: list[nn.Linear]
    class_token: Tensor | None
    position_table: Tensor | None
    projection_norms: ProjectionNorms

    def normalize_and_project_patches(self, patches: Tensor) -> Tensor:
        """Project the patches, with the norms before and after the projection."""
        for norm in self.projection_norms.before:
            patches = F.layer_norm(patches, patches.shape[-1:], *get_norm_weight_bias_eps(norm))
        tokens = project_patches(patches, self.patch_projection.weight, self.patch_projection.bias)
        for norm in self.projection_norms.after:
            tokens = F.layer_norm(tokens, tokens.shape[-1:], *get_norm_weight_bias_eps(norm))
        return tokens


_VIT_LAYERS_CACHE: WeakKeyDictionary[nn.Module, dict[tuple[int, int], ViTLayers]] = WeakKeyDictionary()


def get_or_find_vit_layers(module: nn.Module, width: int = 12, num_patches: int = 9) -> ViTLayers:
    """Return the layers of a ViT; cached if no gradient is needed."""
    if torch.is_grad_enabled():
        return _collect_vit_layers(module, width, num_patches)
    cache = _VIT_LAYERS_CACHE.setdefault(module, {})
    if (width, num_patches) not in cache:
        cache[width, num_patches] = _collect_vit_layers(module, width, num_patches)
    return cache[width, num_patches]


def _collect_vit_layers(module: nn.Module, width: int, num_patches: int) -> ViTLayers:
    blocks = find_transformer_blocks(module)
    inside = {id(part) for block in blocks for part in block.modules()}
    outside = [part for part in module.modules() if id(part) not in inside]
    convolutions = [part for part in outside if isinstance(part, nn.Conv2d)]
    linears = [part for part in outside if isinstance(part, nn.Linear)]
    projection: nn.Conv2d | nn.Linear | None = convolutions[0] if convolutions else next(
        (part for part in linears if part.out_features == width and part.in_features != width), None
    )  # fmt: skip
    if projection is None or not blocks:
        missing = "layer that projects the patches" if projection is None else "list of transformer blocks"
        raise RuntimeError(f"no {missing} was found")
    projection_norms = find_norms_around_projection(module, projection)
    inside |= {id(norm) for norm in (*projection_norms.before, *projection_norms.after)}
    final_norms = [part for _, part in find_norms(module) if id(part) not in inside]
    class_token, position_table = find_class_token_and_positions(module, num_patches, width)
    head_layers = [part for part in linears if part is not projection]
    return ViTLayers(projection, blocks, final_norms, head_layers, class_token, position_table, projection_norms)


def find_norms_around_projection(module: nn.Module, patch_projection: nn.Module) -> ProjectionNorms:
    """Return the norms in the same nn.Sequential as the patch projection."""
    for part in module.modules():
        children = list(part.children())
        if isinstance(part, nn.Sequential) and any(child is patch_projection for child in children):
            position = next(index for index, child in enumerate(children) if child is patch_projection)
            before = [child for child in children[:position] if isinstance(child, nn.LayerNorm)]
            after = [child for child in children[position + 1 :] if isinstance(child, nn.LayerNorm)]
            return ProjectionNorms(before, after)
    return ProjectionNorms([], [])


def find_transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the longest list of layers of one type that contain linear layers, or a single block."""
    block_lists = []
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential | nn.TransformerEncoder):
            children = list(part.layers if isinstance(part, nn.TransformerEncoder) else part.children())
            blocks = [
                child
                for child in children
                if type(child) is type(children[0]) and len(find_linear_layers_and_matrices(child)) >= 3
            ]
            if blocks and len(blocks) == len([child for child in children if find_linear_layers_and_matrices(child)]):
                block_lists.append(blocks)
    single_blocks = [
        [part]
        for part in module.children()
        if len(find_norms(part)) and len(find_linear_layers_and_matrices(part)) >= 4
    ]
    return max(block_lists or single_blocks, key=len, default=[])
