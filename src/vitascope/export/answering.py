"""A model -> its weights alone, answering with logits, or with logits and all attention maps: what is exported."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.evaluation.plain import plain_copy
from vitascope.model.block import Block
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import BlockMaps, Logits


class WithMaps(VisionTransformer):
    """The same model with attention written out in its two halves, so that the maps can be given out."""

    def forward(self, images: Tensor) -> tuple[Logits, BlockMaps]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tokens, seen = self.embed(images), []
        for block in cast("Iterable[Block]", self.blocks):
            normed = block.norm1(tokens)
            maps = block.attn.maps(normed, None, self.rotation)
            tokens = block.drop_path1(tokens, block.ls1(block.attn.mix(maps, normed)))
            tokens = block.drop_path2(tokens, block.ls2(block.mlp(block.norm2(tokens))))
            seen.append(maps)
        return self.forward_head(self.norm(tokens)), torch.stack(seen, dim=1)


def answering(model: VisionTransformer, *, maps: bool = False) -> VisionTransformer:
    """A plain copy, where its answers can be checked."""
    if model.training:
        raise UserError("The model is in training mode, where chance has its say. Call model.eval() first.")
    if model.config.fewer:
        raise UserError(
            "Which tokens are merged or dropped can hang on a rounding, so an exported file could not be checked "
            "against the model. Export it with all tokens: merge_tokens=0, drop_tokens=0."
        )
    return plain_copy(model, WithMaps if maps else VisionTransformer)


def example(model: VisionTransformer) -> Tensor:
    """Two images to trace with: a single one would be taken for a batch that is always one."""
    return torch.zeros(2, model.config.in_chans, *model.config.image_shape)


def any_batch() -> tuple[dict[int, object]]:
    """What is not fixed in the file: how many images come at once."""
    return ({0: torch.export.Dim("batch", min=1)},)
