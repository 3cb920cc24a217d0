"""Run the blocks step by step: compute attention maps explicitly, and merge or drop tokens in between.

`Block.forward` is the fast version for training and for full sequences; a test holds both equal.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vitascope.model.attention import QueriesKeysValues, SelfAttention
from vitascope.model.scaled_dot_product import attend_fused, check_maps_reproduce_output
from vitascope.model.token_merging import TokenGroups, make_singleton_groups, remove_tokens
from vitascope.shapes import AttentionMaps, Images, OutputTokens, RotaryTable, TokenIndices, Tokens, TokenSizes

if TYPE_CHECKING:
    from vitascope.model.vit import VisionTransformer

MapEditor = Callable[[int, Tensor], Tensor]  # index of the block, maps -> edited maps


class ExplicitAttention(NamedTuple):
    """How attention maps are computed. The model uses the maps that `edit_maps` returns instead of its own."""

    edit_maps: MapEditor | None = None
    compare_with_fused: bool = True  # raise an error if the maps do not reproduce the fused kernel's output


class BlockResult(NamedTuple):
    groups: TokenGroups  # after the block
    maps: AttentionMaps | None  # None: computed by the fused kernel, which does not return them
    keys_or_maps: Tensor | None  # keys or maps that selected the tokens to merge or drop; None: none were removed


class TokensAndSizes(NamedTuple):
    """Tokens after all blocks, and the number of patches merged into each."""

    tokens: OutputTokens
    token_sizes: TokenSizes


def apply_reducing_blocks_and_final_norm(
    model: "VisionTransformer", tokens: Tokens, num_output_tokens: int | None
) -> TokensAndSizes:
    """Apply all blocks with token reduction and the final norm, with the fused kernel.

    With `num_output_tokens`, the last block returns only the first `num_output_tokens` tokens."""
    groups = apply_blocks_to_groups(model, make_singleton_groups(tokens), num_output_tokens)
    return TokensAndSizes(model.norm(groups.tokens), groups.sizes)


@torch.no_grad()
def compute_final_token_index_per_patch(model: "VisionTransformer", images: Images) -> TokenIndices:
    """Return the index of the token that contains each patch after all blocks, batch × patch; -1: dropped."""
    groups = apply_blocks_to_groups(model, make_singleton_groups(model.embed(images), track_membership=True))
    membership: Any = groups.patch_membership
    token_indices = torch.where(membership.sum(1) > 0, membership.argmax(1), -1)
    return token_indices[:, model.config.num_prefix_tokens :]


def apply_blocks_to_groups(
    model: "VisionTransformer",
    groups: TokenGroups,
    num_output_tokens: int | None = None,
    keys_or_maps_per_block: list[Tensor | None] | None = None,
) -> TokenGroups:
    """Return the groups that remain after all blocks, computed with the fused kernel.

    `keys_or_maps_per_block`: of an earlier `apply_and_record_blocks`, to merge or drop the same tokens again."""
    for index in range(len(model.blocks)):
        keys_or_maps = None if keys_or_maps_per_block is None else keys_or_maps_per_block[index]
        groups = _run_block(model, index, groups, num_output_tokens, None, keys_or_maps).groups
    return groups


def apply_and_record_blocks(
    model: "VisionTransformer", groups: TokenGroups, explicit_attention: ExplicitAttention | None
) -> list[BlockResult]:
    """Return the result of every block; with attention maps if `explicit_attention` says how to compute them."""
    results = []
    for index in range(len(model.blocks)):
        results.append(_run_block(model, index, groups, None, explicit_attention, None))
        groups = results[-1].groups
    return results


def _run_block(
    model: "VisionTransformer",
    index: int,
    groups: TokenGroups,
    num_output_tokens: int | None,
    explicit_attention: ExplicitAttention | None,
    keys_or_maps: Tensor | None,
) -> BlockResult:
    """Apply one block, without dropout; merge or drop tokens between attention and MLP as the settings say.

    With `num_output_tokens`, the last block returns only the first `num_output_tokens` tokens and removes none."""
    block: Any = model.blocks[index]
    attn: SelfAttention = block.attn
    num_output_tokens = num_output_tokens if index + 1 == len(model.blocks) else None
    num_removed = model.config.num_removed_per_block[index] if num_output_tokens is None else 0
    qkv = attn.compute_queries_keys_values(
        block.norm1(groups.tokens), _select_rotary_table_of_groups(model, groups), num_output_tokens
    )
    has_merged_tokens = bool(model.config.merge_tokens) and groups.tokens.shape[1] < model.config.num_tokens
    token_sizes = groups.sizes if has_merged_tokens else None
    if model.config.drop_tokens and num_removed and keys_or_maps is None and explicit_attention is None:
        explicit_attention = ExplicitAttention(compare_with_fused=False)  # the maps select the tokens to drop
    maps = (
        None
        if explicit_attention is None
        else _compute_checked_and_edited_maps(attn, qkv, token_sizes, explicit_attention, index)
    )
    head_outputs = attn.attend(*qkv, token_sizes=token_sizes) if maps is None else maps @ qkv.value
    groups = groups.keep_first(num_output_tokens).add_residual(block.ls1(attn.concat_and_project_heads(head_outputs)))
    if num_removed:
        keys_or_maps = (maps if model.config.drop_tokens else qkv.key) if keys_or_maps is None else keys_or_maps
        groups = remove_tokens(groups, keys_or_maps, model.config, num_removed)  # pyright: ignore[reportArgumentType]
    return BlockResult(groups.add_residual(block.ls2(block.mlp(block.norm2(groups.tokens)))), maps, keys_or_maps)


def _compute_checked_and_edited_maps(
    attn: SelfAttention,
    qkv: QueriesKeysValues,
    token_sizes: TokenSizes | None,
    explicit_attention: ExplicitAttention,
    block_index: int,
) -> AttentionMaps:
    query, key, value = qkv
    maps = attn.compute_maps(query, key, token_sizes=token_sizes)
    if explicit_attention.compare_with_fused:
        with torch.no_grad():
            mask = attn.make_score_mask_or_size_bias(query, key, token_sizes=token_sizes)
            is_causal = attn.causal and mask is None
            fused = attend_fused(query, key, value, mask, causal=is_causal, all_rows_have_a_key=True)
            check_maps_reproduce_output(maps @ value, fused, block_index)
    return maps if explicit_attention.edit_maps is None else explicit_attention.edit_maps(block_index, maps)


def _select_rotary_table_of_groups(model: "VisionTransformer", groups: TokenGroups) -> RotaryTable | None:
    """Return the rotary table of the remaining tokens."""
    if model.rotation is None or not model.config.token_reduction:
        return model.rotation
    return model.rotation[:, groups.position_indices][:, :, None]
