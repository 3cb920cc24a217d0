"""Find the layers of a user's ViT by shape, name and order."""

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.attention_layers import get_norm_weight_bias_eps
from vitascope.coursework.checker.image_embedding import find_class_token_and_positions, project_patches
from vitascope.coursework.checker.weights import find_linear_layers_and_matrices, find_norms


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

    def embed_patches(self, patches: Tensor) -> Tensor:
        """Project the patches, with the norms before and after the projection."""
        for norm in self.projection_norms.before:
            patches = F.layer_norm(patches, patches.shape[-1:], *get_norm_weight_bias_eps(norm))
        tokens = project_patches(patches, self.patch_projection.weight, self.patch_projection.bias)
        for norm in self.projection_norms.after:
            tokens = F.layer_norm(tokens, tokens.shape[-1:], *get_norm_weight_bias_eps(norm))
        return tokens


_VIT_LAYERS_CACHE: WeakKeyDictionary[nn.Module, dict[tuple[int, int], ViTLayers]] = WeakKeyDictionary()


def find_vit_layers(module: nn.Module, width: int = 12, num_patches: int = 9) -> ViTLayers:
    """Return the layers of a ViT; cached if no gradient is needed."""
    if torch.is_grad_enabled():
        return _collect_vit_layers(module, width, num_patches)
    cache = _VIT_LAYERS_CACHE.setdefault(module, {})
    if (width, num_patches) not in cache:
        cache[width, num_patches] = _collect_vit_layers(module, width, num_patches)
    return cache[width, num_patches]


def _collect_vit_layers(module: nn.Module, width: int, num_patches: int) -> ViTLayers:
    blocks = find_blocks(module)
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


def find_blocks(module: nn.Module) -> list[nn.Module]:
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
