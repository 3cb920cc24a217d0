"""Reduce the number of tokens in each block at inference: merge similar patches, or drop those with least attention.

Merging is Bolya et al. 2023 (ToMe). Patches are split alternately into two sets. Each patch of the first set is matched
to the most similar patch of the second, by the keys of this block's attention. The most similar pairs are merged into
their mean. A merged token is weighted by its number of patches, in means and in attention (the logarithm of its size is
added to its scores). Dropping keeps the patches that get most attention: from the class token if the head reads it,
else from all tokens (as Liang et al. 2022, without their fused token). Class and register tokens are never removed.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.errors import format_count
from vitascope.model.config import ModelConfig
from vitascope.shapes import (
    AllTokenMaps,
    AllTokens,
    AttentionMaps,
    HeadTokens,
    OutputTokens,
    PatchMembership,
    TokenIndices,
    Tokens,
    TokenSizes,
)


@dataclass(frozen=True)
class TokenGroups:
    """The remaining tokens, the number of patches in each (`sizes`), and the position of each in the full sequence.

    `patch_membership`, if it is tracked: 1 for every patch merged into a token, batch × token × patch."""

    tokens: Tokens
    sizes: TokenSizes
    position_indices: TokenIndices
    patch_membership: PatchMembership | None = None

    def add_residual(self, branch: Tokens) -> "TokenGroups":
        """Return the groups with `branch` added to the tokens."""
        return replace(self, tokens=self.tokens + branch)

    def keep_first(self, num_tokens: int | None) -> "TokenGroups":
        """Return the first `num_tokens` tokens, without membership; None: all tokens."""
        if num_tokens is None:
            return self
        return TokenGroups(
            self.tokens[:, :num_tokens], self.sizes[:, :num_tokens], self.position_indices[:, :num_tokens]
        )

    def select(self, token_indices: TokenIndices) -> "TokenGroups":
        """Return the tokens at these indices."""
        membership = None if self.patch_membership is None else _gather_tokens(self.patch_membership, token_indices)
        return TokenGroups(
            _gather_tokens(self.tokens, token_indices),
            self.sizes.gather(1, token_indices),
            self.position_indices.gather(1, token_indices),
            membership,
        )


def make_singleton_groups(tokens: Tokens, *, track_membership: bool = False) -> TokenGroups:
    """Return groups of one token each."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    sizes = torch.ones_like(positions, dtype=torch.float32)
    membership = torch.diag_embed(torch.ones_like(tokens[..., 0])) if track_membership else None
    return TokenGroups(tokens, sizes, positions, membership)


def remove_tokens(
    groups: TokenGroups, keys_or_maps: HeadTokens | AttentionMaps, config: ModelConfig, num_removed: int
) -> TokenGroups:
    """Merge by the keys, or drop by the attention maps: `keys_or_maps` holds the ones that `config` needs."""
    prefix = config.num_prefix_tokens
    if config.drop_tokens:
        return drop_least_attended_patches(groups, keys_or_maps, prefix, num_removed, config.global_pool == "token")
    return merge_similar_patches(groups, keys_or_maps, prefix, num_removed)


def merge_similar_patches(groups: TokenGroups, key: HeadTokens, num_prefix_tokens: int, num_merged: int) -> TokenGroups:
    """Merge `num_merged` patches of the first set into their most similar patch of the second.

    The order of the result: prefix, remaining patches of the first set, second set."""
    if not num_merged:
        return groups
    normalized = F.normalize(key.mean(1)[:, num_prefix_tokens:].float(), dim=-1)
    similarity, best_match = (normalized[:, ::2] @ normalized[:, 1::2].transpose(1, 2)).max(-1)
    order = similarity.topk(similarity.shape[1], dim=1).indices  # the most similar first
    merged, unmerged = order[:, :num_merged], order[:, num_merged:].sort(1).values
    prefix = torch.arange(num_prefix_tokens, device=key.device).expand(key.shape[0], num_prefix_tokens)
    second_set = torch.arange(num_prefix_tokens + 1, groups.tokens.shape[1], 2, device=key.device)
    unchanged = groups.select(torch.cat([prefix, num_prefix_tokens + 2 * unmerged], 1))
    sources = groups.select(num_prefix_tokens + 2 * merged)
    targets = _merge_into_targets(
        sources, groups.select(second_set.expand(key.shape[0], -1)), best_match.gather(1, merged)
    )
    membership = None
    if unchanged.patch_membership is not None and targets.patch_membership is not None:
        membership = torch.cat([unchanged.patch_membership, targets.patch_membership], 1)
    return TokenGroups(
        torch.cat([unchanged.tokens, targets.tokens], 1),
        torch.cat([unchanged.sizes, targets.sizes], 1),
        torch.cat([unchanged.position_indices, targets.position_indices], 1),
        membership,
    )


def _merge_into_targets(sources: TokenGroups, targets: TokenGroups, target_indices: TokenIndices) -> TokenGroups:
    """Return the targets, each averaged with the sources that have its index, weighted by their sizes."""
    sizes = targets.sizes.scatter_add(1, target_indices, sources.sizes)
    sums = (targets.tokens * targets.sizes[..., None]).scatter_add(
        1, _expand_indices_over_features(target_indices, sources.tokens), (sources.tokens * sources.sizes[..., None])
    )
    membership = None
    if sources.patch_membership is not None and targets.patch_membership is not None:
        membership = targets.patch_membership.scatter_add(
            1, _expand_indices_over_features(target_indices, sources.patch_membership), sources.patch_membership
        )
    tokens = (sums / sizes[..., None]).to(targets.tokens.dtype)
    return TokenGroups(tokens, sizes, targets.position_indices, membership)


def drop_least_attended_patches(
    groups: TokenGroups, maps: AttentionMaps, num_prefix_tokens: int, num_dropped: int, by_class_token: bool
) -> TokenGroups:
    """Drop the `num_dropped` patches that get the least attention; the order of the others is unchanged."""
    if not num_dropped:
        return groups
    received_attention = (maps[:, :, 0] if by_class_token else maps.mean(2)).mean(1)
    kept_patches = (
        received_attention[:, num_prefix_tokens:]
        .topk(maps.shape[-1] - num_prefix_tokens - num_dropped, dim=1)
        .indices.sort(1)
        .values
    )
    prefix = torch.arange(num_prefix_tokens, device=maps.device).expand(maps.shape[0], num_prefix_tokens)
    return groups.select(torch.cat([prefix, num_prefix_tokens + kept_patches], 1))


def _gather_tokens(tokens: Tokens, token_indices: TokenIndices) -> OutputTokens:
    return tokens.gather(1, _expand_indices_over_features(token_indices, tokens))


def _expand_indices_over_features(token_indices: TokenIndices, tokens: Tokens) -> Tensor:
    return token_indices[..., None].expand(-1, -1, tokens.shape[-1])


def expand_maps_to_all_tokens(maps: AttentionMaps, membership: PatchMembership) -> AllTokenMaps:
    """Return the maps between the original tokens. The patches of a token share its attention equally.

    Rows sum to 1 as before. Rows and columns of dropped patches are zero."""
    shares = membership / membership.sum(-1, keepdim=True)
    return membership.mT[:, None] @ maps @ shares[:, None]


def expand_map_gradients_to_all_tokens(gradients: AttentionMaps, membership: PatchMembership) -> AllTokenMaps:
    """Return the gradients with respect to the maps between the original tokens.

    They are the gradients of a model without merging in which the patches of a token are equal: the gradient of a row
    is divided among its patches."""
    shares = membership / membership.sum(-1, keepdim=True)
    return shares.mT[:, None] @ gradients @ membership[:, None]


def expand_tokens_to_all_tokens(
    tokens: OutputTokens, membership: PatchMembership, earlier_tokens: AllTokens
) -> AllTokens:
    """Return one token per original token: that of its group; a dropped patch keeps its token of `earlier_tokens`."""
    is_dropped = membership.sum(1) == 0
    return torch.where(is_dropped[..., None], earlier_tokens, membership.mT @ tokens)


def describe_token_reduction(config: ModelConfig) -> str:
    """Return for example "2 tokens merged per block"; empty if all tokens are used."""
    if not config.token_reduction:
        return ""
    removed = config.num_removed_per_block
    limit = "" if min(removed) == max(removed) else "up to "
    verb = "merged" if config.merge_tokens else "dropped"
    return f"{limit}{format_count(max(removed), 'token')} {verb} per block"
