"""Run a model and return its logits with the attention maps of every block, hidden states, and merged tokens.

Vitascope's models run block by block as in `explicit_blocks`; other models are recorded (`attention_recorder`). No
model is changed, so several threads can replay one model at the same time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.attention_recorder import compute_logits, record_attention
from vitascope.model.explicit_blocks import ExplicitAttention, MapEditor, run_blocks, trace_blocks
from vitascope.model.patches import check_image_shape_and_dtype
from vitascope.model.token_merging import make_singleton_groups, spread_maps, spread_tokens
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Images, Logits, PatchMembership, TokenSizes, TokenWeights


class Replay(NamedTuple):
    """One forward pass. With merged or dropped tokens, the number of tokens differs between blocks."""

    logits: Logits
    maps: list[Tensor]  # AttentionMaps of each block, over the tokens before the block
    hidden_states: list[Tensor]  # Tokens before block 1 and after every block; empty if the model has no list of blocks
    memberships: list[PatchMembership] | None = None  # of each hidden state; None: no tokens are merged or dropped
    pool_weights: TokenWeights | None = None  # weights of the last hidden state's tokens in the features; None: unknown

    @property
    def token_sizes(self) -> list[TokenSizes] | None:
        """The number of patches in each token of each hidden state; None: one."""
        return None if self.memberships is None else [membership.sum(-1) for membership in self.memberships]

    def spread_maps_over_all_tokens(self) -> list[Tensor]:
        """Return the maps between the original tokens: merged patches share a token's attention equally.

        Rows sum to 1; rows and columns of dropped patches are zero."""
        if self.memberships is None:
            return self.maps
        return [spread_maps(*pair) for pair in zip(self.maps, self.memberships, strict=False)]

    def spread_hidden_states_over_all_tokens(self) -> list[Tensor]:
        """Return one token per original token: merged patches have equal ones, dropped patches keep their last."""
        if self.memberships is None:
            return self.hidden_states
        states = self.hidden_states[:1]
        for tokens, membership in zip(self.hidden_states[1:], self.memberships[1:], strict=True):
            states.append(spread_tokens(tokens, membership, states[-1]))
        return states

    def spread_pool_weights_over_all_tokens(self) -> TokenWeights | None:
        """Return the weight of each original token: merged patches share a token's weight equally."""
        if self.memberships is None or self.pool_weights is None:
            return self.pool_weights
        shares = self.memberships[-1] / self.memberships[-1].sum(-1, keepdim=True)
        return (self.pool_weights[:, None] @ shares)[:, 0]


def replay(model: nn.Module, images: Tensor, *, edit_maps: MapEditor | None = None) -> Replay:
    """Run the model in evaluation mode and return its logits, attention maps and hidden states, with gradients.

    Works with models of Vitascope, timm and transformers. The model uses the maps that `edit_maps(block_index, maps)`
    returns instead of its own."""
    if isinstance(model, VisionTransformer):
        return _replay_vision_transformer(model, images, edit_maps)
    return Replay(*record_attention(model, images, edit_maps))


def _replay_vision_transformer(model: VisionTransformer, images: Tensor, edit_maps: MapEditor | None) -> Replay:
    if model.training:
        raise UserError("The model is in training mode, so dropout is active. Call model.eval() first.")
    check_image_shape_and_dtype(images, model.config, next(model.patch_embed.parameters()).dtype)
    groups = make_singleton_groups(model.embed(images), track_membership=bool(model.config.token_reduction))
    results = trace_blocks(model, groups, ExplicitAttention(edit_maps))
    all_groups = [groups, *(result.groups for result in results)]
    memberships = [group.patch_membership for group in all_groups if group.patch_membership is not None]
    pool: Any = model.pool
    tokens = model.norm(all_groups[-1].tokens)
    token_sizes = all_groups[-1].sizes if memberships else None
    return Replay(
        model.forward_head(tokens, token_sizes=token_sizes),
        [result.maps for result in results if result.maps is not None],
        [group.tokens for group in all_groups],
        memberships or None,
        pool.compute_weights(tokens, token_sizes),
    )


def make_logits_function_with_fixed_token_groups(model: nn.Module, images: Images) -> Callable[[Images], Logits]:
    """Return the model as a function, in which the same tokens are merged or dropped as for these images.

    Without it, the logits jump wherever a change of the image changes which tokens are merged."""
    if not isinstance(model, VisionTransformer) or not model.config.token_reduction:
        return partial(compute_logits, model)
    with torch.no_grad():
        results = trace_blocks(model, make_singleton_groups(model.embed(images)), None)
    keys_or_maps_per_block = [result.keys_or_maps for result in results]

    def compute_frozen_logits(other_images: Images) -> Logits:
        groups = make_singleton_groups(model.embed(other_images))
        groups = run_blocks(model, groups, keys_or_maps_per_block=keys_or_maps_per_block)
        return model.forward_head(model.norm(groups.tokens), token_sizes=groups.sizes)

    return compute_frozen_logits
