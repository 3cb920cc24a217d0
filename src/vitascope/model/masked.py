"""Images -> Tokens of some patches only, and those tokens -> all patches' pixels: MAE's encoder and decoder.

He et al. 2022 (arXiv 2111.06377), section 3: the encoder sees the visible patches alone; a small decoder gets its
tokens and a mask token at every hidden place, and paints the pixels.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.model.block import Block
from vitascope.model.config import ModelConfig
from vitascope.model.norm import make_norm
from vitascope.model.positions import sincos2d
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Asked, Logits, Noise, Order, Patches, Tokens, Visible


def visible_count(patches: int, mask: float) -> int:
    """How many patches stay visible: the nearest whole number, at least one, and at least one is hidden."""
    return min(patches - 1, max(1, patches - round(patches * mask)))


def visible_patches(noise: Noise, count: int) -> tuple[Visible, Order]:
    """The `count` patches of least noise, and for every patch its place among (visible, then hidden) ones."""
    order = noise.argsort(dim=1)
    return order[:, :count], order.argsort(dim=1)


def encode_visible(model: VisionTransformer, images: Tensor, visible: Visible) -> Asked:
    """Class and register tokens, then the visible patches in the order given, through all blocks."""
    prefix = model.config.num_prefix_tokens
    front = torch.arange(prefix, device=visible.device).expand(len(visible), -1)
    chosen = torch.cat([front, prefix + visible], dim=1)
    tokens = model.embed(images)
    tokens = tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[2]))
    turned = None if model.rotation is None else model.rotation[:, chosen][:, :, None]
    return model.encode(tokens, rotation=turned)


class SomePatches(nn.Module):
    """A model that answers from some patches of each image: those with the least noise (Liu et al. 2023)."""

    def __init__(self, model: VisionTransformer, count: int) -> None:
        super().__init__()
        self.model, self.count = model, count

    def forward(self, images: Tensor, noise: Noise) -> Logits:
        visible, _ = visible_patches(noise, self.count)
        return self.model.forward_head(encode_visible(self.model, images, visible))


def decoder_config(config: ModelConfig, embed_dim: int, depth: int, num_heads: int) -> ModelConfig:
    """The decoder's blocks beside this encoder."""
    return replace(
        config,
        embed_dim=embed_dim, depth=depth, num_heads=num_heads, mlp_ratio=4.0, mlp="gelu", positions="sincos2d",
        attention="plain", initialize="timm", attn_drop_rate=0.0, proj_drop_rate=0.0,
    )  # fmt: skip


class Decoder(nn.Module):
    """The encoder's tokens -> a patch of pixels for every place."""

    positions: Tensor

    def __init__(self, config: ModelConfig, *, embed_dim: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.prefix = config.num_prefix_tokens
        own = decoder_config(config, embed_dim, depth, num_heads)
        # Mean pooling leaves the normalising to what comes after the encoder.
        unnormalised = config.global_pool == "avg"
        self.norm_in = make_norm(config.norm, config.embed_dim, config.norm_eps) if unnormalised else nn.Identity()
        self.embed = nn.Linear(config.embed_dim, embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        table = F.pad(sincos2d(config.grid, embed_dim).float(), (0, 0, self.prefix, 0))
        self.register_buffer("positions", table[None], persistent=False)
        self.blocks = nn.ModuleList([Block(own) for _ in range(depth)])
        self.norm = make_norm(config.norm, embed_dim, config.norm_eps)
        self.pred = nn.Linear(embed_dim, config.in_chans * config.patch_shape[0] * config.patch_shape[1])
        self._initialize()

    def forward(self, tokens: Tokens, places: Order) -> Patches:
        """`places`: where each patch stands among the visible tokens and, behind them, the hidden."""
        tokens = self.embed(self.norm_in(tokens))
        hidden = self.mask_token.to(tokens.dtype).expand(
            len(tokens), self.prefix + places.shape[1] - tokens.shape[1], -1
        )
        crowd = torch.cat([tokens[:, self.prefix :], hidden], dim=1)
        patches = crowd.gather(1, places[..., None].expand(-1, -1, crowd.shape[2]))
        tokens = torch.cat([tokens[:, : self.prefix], patches], dim=1) + self.positions.to(tokens.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        return self.pred(self.norm(tokens[:, self.prefix :]))

    def _initialize(self) -> None:
        """Xavier's rule, as MAE's."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias) if module.bias is not None else None
        nn.init.normal_(self.mask_token, std=0.02)
