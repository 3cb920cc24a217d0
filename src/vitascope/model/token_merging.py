"""Tokens -> fewer tokens from block to block, at inference: the most alike merged, or the least looked-at dropped.

Merging is Bolya et al. 2023 (ToMe): patches are split in two sets by turns; each of the first finds the most alike of
the second, by the keys of this block's attention; the most alike pairs become one token, their mean, which counts as
many patches as it stands for, in means and in attention (the logarithm of its size is added to its scores). Dropping
keeps the patches that get most attention, from the class token where the head reads it and from all tokens otherwise
(as Liang et al. 2022, without their joining of the rest). Class and register tokens always stay.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.model.scaled_dot_product import compute_attention_maps
from vitascope.shapes import (
    AttentionMaps,
    HeadTokens,
    Images,
    OutputTokens,
    PatchMembership,
    TokenIndices,
    Tokens,
    TokenSizes,
)

if TYPE_CHECKING:
    from vitascope.model.block import Block
    from vitascope.model.vit import VisionTransformer


@dataclass(frozen=True)
class TokenGroups:
    """What is left of the tokens: how many patches each stands for, and in whose place it stands.

    `members`, where somebody wants to know: 1 for every patch that a token stands for, batch × token × patch."""

    tokens: Tokens
    sizes: TokenSizes
    position_indices: TokenIndices
    patch_membership: PatchMembership | None = None

    def add_residual(self, branch: Tokens) -> "TokenGroups":
        return replace(self, tokens=self.tokens + branch)

    def keep_first(self, num_tokens: int) -> "TokenGroups":
        return TokenGroups(
            self.tokens[:, :num_tokens], self.sizes[:, :num_tokens], self.position_indices[:, :num_tokens]
        )

    def select(self, token_indices: TokenIndices) -> "TokenGroups":
        members = None if self.patch_membership is None else _gather_tokens(self.patch_membership, token_indices)
        return TokenGroups(
            _gather_tokens(self.tokens, token_indices),
            self.sizes.gather(1, token_indices),
            self.position_indices.gather(1, token_indices),
            members,
        )


def encode_with_reduction(
    model: "VisionTransformer", tokens: Tokens, num_outputs: int | None
) -> tuple[OutputTokens, TokenSizes]:
    """Through all blocks and the final norm, and how many patches each token stands for at the end.

    With `first`, the last block gives only so many tokens, counted from the front."""
    found = run_blocks_with_reduction(model, _make_singleton_groups(tokens), num_outputs)
    return model.norm(found.tokens), found.sizes


@torch.no_grad()
def assign_patches_to_tokens(model: "VisionTransformer", images: Images) -> TokenIndices:
    """Which token each patch belongs to at the end, batch × patch; -1: it was dropped. For pictures."""
    tokens = model.embed(images)
    everyone = torch.eye(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1, -1)
    crowd = run_blocks_with_reduction(model, replace(_make_singleton_groups(tokens), patch_membership=everyone), None)
    found = everyone if crowd.patch_membership is None else crowd.patch_membership
    told = torch.where(found.sum(1) > 0, found.argmax(1), -1)
    return told[:, model.config.num_prefix_tokens :]


def _make_singleton_groups(tokens: Tokens) -> TokenGroups:
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    return TokenGroups(tokens, torch.ones_like(places, dtype=torch.float32), places)


def run_blocks_with_reduction(model: "VisionTransformer", groups: TokenGroups, num_outputs: int | None) -> TokenGroups:
    """Who is left after all blocks."""
    for number, (block, fewer) in enumerate(zip(model.blocks, model.config.num_removed_per_block, strict=True)):
        asked = num_outputs if number + 1 == len(model.blocks) else None
        groups = _run_block_with_reduction(model, block, groups, fewer, asked)  # pyright: ignore[reportArgumentType]
    return groups


def _run_block_with_reduction(
    model: "VisionTransformer", block: "Block", groups: TokenGroups, num_removed: int, num_outputs: int | None
) -> TokenGroups:
    """One block; those that go, go between attention and MLP. Where only the first are asked for, nobody goes."""
    attn, prefix = block.attn, model.config.num_prefix_tokens
    turned = None if model.rotation is None else model.rotation[:, groups.position_indices][:, :, None]
    query, key, value = attn.compute_queries_keys_values(block.norm1(groups.tokens), turned, num_outputs)
    if model.config.drop_tokens and num_outputs is None:
        maps = compute_attention_maps(query, key, attn.combine_masks(None, key))
        groups = groups.add_residual(block.ls1(attn.concat_and_project_heads(maps @ value)))
        groups = drop_least_attended_patches(groups, maps, prefix, num_removed, model.config.global_pool == "token")
    else:
        alone = groups.tokens.shape[1] == model.config.num_tokens or bool(model.config.drop_tokens)  # nobody merged yet
        gathered = attn.attend_and_project(query, key, value, token_sizes=None if alone else groups.sizes)
        groups = (groups if num_outputs is None else groups.keep_first(num_outputs)).add_residual(block.ls1(gathered))
        groups = merge_similar_patches(groups, key, prefix, num_removed) if num_outputs is None else groups
    return groups.add_residual(block.ls2(block.mlp(block.norm2(groups.tokens))))


def merge_similar_patches(groups: TokenGroups, key: HeadTokens, num_prefix_tokens: int, num_merged: int) -> TokenGroups:
    """`fewer` patches of the first set join their most alike of the second; then: prefix, the rest of the first set,
    the second."""
    if not num_merged:
        return groups
    alike = F.normalize(key.mean(1)[:, num_prefix_tokens:].float(), dim=-1)
    best, partner = (alike[:, ::2] @ alike[:, 1::2].transpose(1, 2)).max(-1)
    order = best.topk(best.shape[1], dim=1).indices  # the most alike first
    going, staying = order[:, :num_merged], order[:, num_merged:].sort(1).values
    front = torch.arange(num_prefix_tokens, device=key.device).expand(key.shape[0], num_prefix_tokens)
    alone = groups.select(torch.cat([front, num_prefix_tokens + 2 * staying], 1))
    seconds = torch.arange(num_prefix_tokens + 1, groups.tokens.shape[1], 2, device=key.device).expand(key.shape[0], -1)
    leaving, others = groups.select(num_prefix_tokens + 2 * going), groups.select(seconds)
    to = partner.gather(1, going)
    sizes = others.sizes.scatter_add(1, to, leaving.sizes)
    sums = (others.tokens * others.sizes[..., None]).scatter_add(
        1, _expand_indices(to, leaving.tokens), (leaving.tokens * leaving.sizes[..., None])
    )
    joined = (sums / sizes[..., None]).to(groups.tokens.dtype)
    members = None
    if (
        leaving.patch_membership is not None
        and others.patch_membership is not None
        and alone.patch_membership is not None
    ):
        members = others.patch_membership.scatter_add(
            1, _expand_indices(to, leaving.patch_membership), leaving.patch_membership
        )
        members = torch.cat([alone.patch_membership, members], 1)
    return TokenGroups(
        torch.cat([alone.tokens, joined], 1),
        torch.cat([alone.sizes, sizes], 1),
        torch.cat([alone.position_indices, others.position_indices], 1),
        members,
    )


def drop_least_attended_patches(
    groups: TokenGroups, maps: AttentionMaps, num_prefix_tokens: int, num_dropped: int, by_class_token: bool
) -> TokenGroups:
    """Without the `fewer` patches that get the least attention; the others stay in their order."""
    if not num_dropped:
        return groups
    looked_at = (maps[:, :, 0] if by_class_token else maps.mean(2)).mean(1)
    kept = (
        looked_at[:, num_prefix_tokens:]
        .topk(maps.shape[-1] - num_prefix_tokens - num_dropped, dim=1)
        .indices.sort(1)
        .values
    )
    front = torch.arange(num_prefix_tokens, device=maps.device).expand(maps.shape[0], num_prefix_tokens)
    return groups.select(torch.cat([front, num_prefix_tokens + kept], 1))


def _gather_tokens(tokens: Tokens, token_indices: TokenIndices) -> OutputTokens:
    return tokens.gather(1, _expand_indices(token_indices, tokens))


def _expand_indices(token_indices: TokenIndices, tokens: Tokens) -> Tensor:
    return token_indices[..., None].expand(-1, -1, tokens.shape[-1])
