"""Build the model to export: it returns logits, or logits and all attention maps."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.evaluation.fast import copy_as_frozen_cpu_model
from vitascope.model.block import Block
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import AttentionMapsByBlock, Logits

DynamicShapes = tuple[dict[int, torch.export.Dim]]  # of each input: axis -> dimension with any size


class TransformerWithMaps(VisionTransformer):
    """The model with explicit attention, so that it also returns the attention maps."""

    def forward(self, images: Tensor) -> tuple[Logits, AttentionMapsByBlock]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tokens, maps_by_block = self.embed(images), []
        for block in cast("Iterable[Block]", self.blocks):
            normed = block.norm1(tokens)
            maps = block.attn.maps(normed, None, self.rotation)
            tokens = block.drop_path1(tokens, block.ls1(block.attn.mix(maps, normed)))
            tokens = block.drop_path2(tokens, block.ls2(block.mlp(block.norm2(tokens))))
            maps_by_block.append(maps)
        return self.forward_head(self.norm(tokens)), torch.stack(maps_by_block, dim=1)


def copy_model_for_export(model: VisionTransformer, *, maps: bool = False) -> VisionTransformer:
    """Return a plain copy of the model; raise a UserError if its export could not be verified."""
    if model.training:
        raise UserError("The model is in training mode, so dropout is active. Call model.eval() first.")
    if model.config.token_reduction:
        raise UserError(
            "A model that merges or drops tokens cannot be exported: rounding can change which tokens are kept, so the "
            "file could not be verified. Export it with all tokens: merge_tokens=0, drop_tokens=0."
        )
    return copy_as_frozen_cpu_model(model, TransformerWithMaps if maps else VisionTransformer)


def make_two_zero_images(model: VisionTransformer) -> Tensor:
    """Return two images to trace with; a single image would fix the batch size to one."""
    return torch.zeros(2, model.config.in_chans, *model.config.image_shape)


def make_dynamic_batch_shapes() -> DynamicShapes:
    """Return the dynamic shapes of the export: the batch size."""
    return ({0: torch.export.Dim("batch", min=1)},)
