"""Compute the attention maps of every block, in batches, for any ViT that `replay` can run.

A model with merged or dropped tokens is explained as it predicts. Its maps are spread over all tokens: the patches of a
merged token share its attention equally, and the rows and columns of dropped patches are zero.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from vitascope.errors import UserError
from vitascope.model.explicit_blocks import MapEditor
from vitascope.model.replay import replay
from vitascope.shapes import AttentionMaps, Images, Logits, Tokens, TokenWeights

BATCH_SIZE = 32


class LogitsAndMaps(NamedTuple):
    logits: Logits
    maps: list[AttentionMaps]  # one per block


class MapsStatesAndPoolWeights(NamedTuple):
    """Of all tokens, also if tokens are merged or dropped: see `Replay`."""

    maps: list[AttentionMaps]  # one per block
    hidden_states: list[Tokens]  # before block 1 and after every block
    pool_weights: TokenWeights | None  # None: unknown


def compute_logits_and_maps(model: nn.Module, images: Images, edit_maps: MapEditor | None = None) -> LogitsAndMaps:
    """Return the logits and all attention maps of one forward pass, with gradients."""
    result = replay(model, images, edit_maps=edit_maps)
    return LogitsAndMaps(result.logits, result.spread_maps_over_all_tokens())


@torch.no_grad()
def attention_maps(model: nn.Module, images: Images, *, batch: int = BATCH_SIZE) -> list[AttentionMaps]:
    """One tensor per block, batch × head × query × key, in the model's own dtype; every row sums to 1.

    Works with unchanged models of Vitascope, timm and transformers, including fused attention. Processes `batch` images
    at a time and returns the maps of all images. Use `iterate_logits_and_maps` if they do not fit into memory. The
    patches of a merged token share its attention; rows and columns of dropped patches are zero."""
    parts = [maps for _, maps in iterate_logits_and_maps(model, images, batch=batch)]
    return [torch.cat(blocks) for blocks in zip(*parts, strict=True)]


@torch.no_grad()
def compute_maps_states_and_pool_weights(model: nn.Module, images: Images) -> MapsStatesAndPoolWeights:
    """Return the maps, the hidden states and the pooling weights of all images, without gradients."""
    parts = [replay(model, batch_images) for batch_images in images.split(BATCH_SIZE)]
    maps = [torch.cat(blocks) for blocks in zip(*(part.spread_maps_over_all_tokens() for part in parts), strict=True)]
    states = zip(*(part.spread_hidden_states_over_all_tokens() for part in parts), strict=True)
    weights = [part.spread_pool_weights_over_all_tokens() for part in parts]
    known_weights = [part for part in weights if part is not None]
    return MapsStatesAndPoolWeights(
        maps, [torch.cat(state) for state in states], torch.cat(known_weights) if known_weights else None
    )


def iterate_logits_and_maps(model: nn.Module, images: Images, *, batch: int = BATCH_SIZE) -> Iterator[LogitsAndMaps]:
    """Yield logits and maps, `batch` images at a time."""
    if images.ndim != 4 or not len(images):
        raise UserError(f"Images must have shape batch × channels × height × width, not {list(images.shape)}.")
    for batch_images in images.split(batch):
        with torch.no_grad():
            result = compute_logits_and_maps(model, batch_images)
        yield result
