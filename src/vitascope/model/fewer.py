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

from vitascope.model.scaled_dot_product import attention_maps
from vitascope.shapes import Asked, Heads, Images, Maps, Members, Order, Sizes, Tokens

if TYPE_CHECKING:
    from vitascope.model.block import Block
    from vitascope.model.vit import VisionTransformer


@dataclass(frozen=True)
class Crowd:
    """What is left of the tokens: how many patches each stands for, and in whose place it stands.

    `members`, where somebody wants to know: 1 for every patch that a token stands for, batch × token × patch."""

    tokens: Tokens
    sizes: Sizes
    places: Order
    members: Members | None = None

    def plus(self, found: Tokens) -> "Crowd":
        return replace(self, tokens=self.tokens + found)

    def front(self, count: int) -> "Crowd":
        return Crowd(self.tokens[:, :count], self.sizes[:, :count], self.places[:, :count])

    def only(self, kept: Order) -> "Crowd":
        members = None if self.members is None else _rows(self.members, kept)
        return Crowd(_rows(self.tokens, kept), self.sizes.gather(1, kept), self.places.gather(1, kept), members)


def encode(model: "VisionTransformer", tokens: Tokens, first: int | None) -> tuple[Asked, Sizes]:
    """Through all blocks and the final norm, and how many patches each token stands for at the end.

    With `first`, the last block gives only so many tokens, counted from the front."""
    found = crowd_after(model, _all_of(tokens), first)
    return model.norm(found.tokens), found.sizes


@torch.no_grad()
def groups(model: "VisionTransformer", images: Images) -> Order:
    """Which token each patch belongs to at the end, batch × patch; -1: it was dropped. For pictures."""
    tokens = model.embed(images)
    everyone = torch.eye(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1, -1)
    crowd = crowd_after(model, replace(_all_of(tokens), members=everyone), None)
    found = everyone if crowd.members is None else crowd.members
    told = torch.where(found.sum(1) > 0, found.argmax(1), -1)
    return told[:, model.config.num_prefix_tokens :]


def _all_of(tokens: Tokens) -> Crowd:
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    return Crowd(tokens, torch.ones_like(places, dtype=torch.float32), places)


def crowd_after(model: "VisionTransformer", crowd: Crowd, first: int | None) -> Crowd:
    """Who is left after all blocks."""
    for number, (block, fewer) in enumerate(zip(model.blocks, model.config.fewer_per_block, strict=True)):
        asked = first if number + 1 == len(model.blocks) else None
        crowd = _through(model, block, crowd, fewer, asked)  # pyright: ignore[reportArgumentType]
    return crowd


def _through(model: "VisionTransformer", block: "Block", crowd: Crowd, fewer: int, first: int | None) -> Crowd:
    """One block; those that go, go between attention and MLP. Where only the first are asked for, nobody goes."""
    attn, prefix = block.attn, model.config.num_prefix_tokens
    turned = None if model.rotation is None else model.rotation[:, crowd.places][:, :, None]
    query, key, value = attn.queries_keys_values(block.norm1(crowd.tokens), turned, first)
    if model.config.drop_tokens and first is None:
        maps = attention_maps(query, key, attn.whole_mask(None, key))
        crowd = crowd.plus(block.ls1(attn.join(maps @ value)))
        crowd = dropped(crowd, maps, prefix, fewer, model.config.global_pool == "token")
    else:
        alone = crowd.tokens.shape[1] == model.config.num_tokens or bool(model.config.drop_tokens)  # nobody merged yet
        gathered = attn.gather(query, key, value, sizes=None if alone else crowd.sizes)
        crowd = (crowd if first is None else crowd.front(first)).plus(block.ls1(gathered))
        crowd = merged(crowd, key, prefix, fewer) if first is None else crowd
    return crowd.plus(block.ls2(block.mlp(block.norm2(crowd.tokens))))


def merged(crowd: Crowd, key: Heads, prefix: int, fewer: int) -> Crowd:
    """`fewer` patches of the first set join their most alike of the second; then: prefix, the rest of the first set,
    the second."""
    if not fewer:
        return crowd
    alike = F.normalize(key.mean(1)[:, prefix:].float(), dim=-1)
    best, partner = (alike[:, ::2] @ alike[:, 1::2].transpose(1, 2)).max(-1)
    order = best.topk(best.shape[1], dim=1).indices  # the most alike first
    going, staying = order[:, :fewer], order[:, fewer:].sort(1).values
    front = torch.arange(prefix, device=key.device).expand(key.shape[0], prefix)
    alone = crowd.only(torch.cat([front, prefix + 2 * staying], 1))
    seconds = torch.arange(prefix + 1, crowd.tokens.shape[1], 2, device=key.device).expand(key.shape[0], -1)
    leaving, others = crowd.only(prefix + 2 * going), crowd.only(seconds)
    to = partner.gather(1, going)
    sizes = others.sizes.scatter_add(1, to, leaving.sizes)
    sums = (others.tokens * others.sizes[..., None]).scatter_add(
        1, _wide(to, leaving.tokens), (leaving.tokens * leaving.sizes[..., None])
    )
    joined = (sums / sizes[..., None]).to(crowd.tokens.dtype)
    members = None
    if leaving.members is not None and others.members is not None and alone.members is not None:
        members = others.members.scatter_add(1, _wide(to, leaving.members), leaving.members)
        members = torch.cat([alone.members, members], 1)
    return Crowd(
        torch.cat([alone.tokens, joined], 1),
        torch.cat([alone.sizes, sizes], 1),
        torch.cat([alone.places, others.places], 1),
        members,
    )


def dropped(crowd: Crowd, maps: Maps, prefix: int, fewer: int, by_class: bool) -> Crowd:
    """Without the `fewer` patches that get the least attention; the others stay in their order."""
    if not fewer:
        return crowd
    looked_at = (maps[:, :, 0] if by_class else maps.mean(2)).mean(1)
    kept = looked_at[:, prefix:].topk(maps.shape[-1] - prefix - fewer, dim=1).indices.sort(1).values
    front = torch.arange(prefix, device=maps.device).expand(maps.shape[0], prefix)
    return crowd.only(torch.cat([front, prefix + kept], 1))


def _rows(tokens: Tokens, numbers: Order) -> Asked:
    return tokens.gather(1, _wide(numbers, tokens))


def _wide(numbers: Order, tokens: Tokens) -> Tensor:
    return numbers[..., None].expand(-1, -1, tokens.shape[-1])
