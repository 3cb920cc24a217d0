"""Modules for training without labels: MAE's encoder and decoder, patch dropout, DINO's head and smaller crops.

He et al. 2022 (arXiv 2111.06377), section 3: the encoder receives only the visible patches. A small decoder receives
its tokens and a mask token for every hidden patch, and predicts the pixels.
"""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.model.block import Block
from vitascope.model.config import ModelConfig
from vitascope.model.norm import make_norm
from vitascope.model.positions import make_rotary_table, make_sincos2d_table, resample_position_table
from vitascope.model.precision import to_autocast_dtype
from vitascope.model.tokens import concat_prefix_tokens, prepend_prefix_and_add_positions
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import (
    DepthNoise,
    Features,
    Logits,
    OutputTokens,
    Patches,
    PatchNoise,
    TokenIndices,
    Tokens,
    VisibleIndices,
)


def count_visible_patches(num_patches: int, mask_ratio: float) -> int:
    """Return the number of visible patches: rounded, at least one, and at least one patch is hidden."""
    return min(num_patches - 1, max(1, num_patches - round(num_patches * mask_ratio)))


class VisiblePatches(NamedTuple):
    """Indices of the visible patches, and of every patch in the sequence (visible, then hidden): MAE's ids_restore."""

    visible_indices: VisibleIndices
    restore_indices: TokenIndices


def select_visible_and_restore_indices(noise: PatchNoise, num_visible: int) -> VisiblePatches:
    """Select the `num_visible` patches with the least noise."""
    order = noise.argsort(dim=1)
    return VisiblePatches(order[:, :num_visible], order.argsort(dim=1))


def encode_visible_patches(
    model: VisionTransformer, images: Tensor, visible_indices: VisibleIndices, depth_noise: DepthNoise | None = None
) -> OutputTokens:
    """Encode class and register tokens and the visible patches, in the order of `visible_indices`."""
    prefix = model.config.num_prefix_tokens
    prefix_indices = torch.arange(prefix, device=visible_indices.device).expand(len(visible_indices), -1)
    indices = torch.cat([prefix_indices, prefix + visible_indices], dim=1)
    tokens = model.embed(images)
    tokens = tokens.gather(1, indices[..., None].expand(-1, -1, tokens.shape[2]))
    rotation = None if model.rotation is None else model.rotation[:, indices][:, :, None]
    return model.encode(tokens, rotation=rotation, depth_noise=depth_noise)


class PatchDropout(nn.Module):
    """Classify each image from its `num_visible` patches with the least noise (Liu et al. 2023)."""

    def __init__(self, model: VisionTransformer, num_visible: int) -> None:
        super().__init__()
        self.model, self.num_visible = model, num_visible

    def forward(self, images: Tensor, noise: PatchNoise, depth_noise: DepthNoise | None = None) -> Logits:
        visible, _ = select_visible_and_restore_indices(noise, self.num_visible)
        return self.model.forward_head(encode_visible_patches(self.model, images, visible, depth_noise))


def make_decoder_config(encoder_config: ModelConfig, embed_dim: int, depth: int, num_heads: int) -> ModelConfig:
    """Return the settings of the decoder's blocks for this encoder."""
    return replace(
        encoder_config,
        embed_dim=embed_dim, depth=depth, num_heads=num_heads, mlp_ratio=4.0, mlp="gelu", positions="sincos2d",
        attention="plain", initialize="timm", attn_drop_rate=0.0, proj_drop_rate=0.0,
    )  # fmt: skip


class MaeDecoder(nn.Module):
    """Encoder tokens -> the pixels of every patch (MAE)."""

    positions: Tensor

    def __init__(self, encoder_config: ModelConfig, *, embed_dim: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.num_prefix_tokens = encoder_config.num_prefix_tokens
        config = make_decoder_config(encoder_config, embed_dim, depth, num_heads)
        # With mean pooling, the encoder has no final norm.
        unnormalised = encoder_config.global_pool == "avg"
        self.norm_in = (
            make_norm(encoder_config.norm, encoder_config.embed_dim, encoder_config.norm_eps)
            if unnormalised
            else nn.Identity()
        )
        self.embed = nn.Linear(encoder_config.embed_dim, embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        table = F.pad(make_sincos2d_table(encoder_config.grid, embed_dim).float(), (0, 0, self.num_prefix_tokens, 0))
        self.register_buffer("positions", table[None], persistent=False)
        self.blocks = nn.ModuleList([Block(config) for _ in range(depth)])
        self.norm = make_norm(encoder_config.norm, embed_dim, encoder_config.norm_eps)
        self.pred = nn.Linear(
            embed_dim, encoder_config.in_chans * encoder_config.patch_shape[0] * encoder_config.patch_shape[1]
        )
        self._initialize_weights()

    def forward(self, tokens: Tokens, restore_indices: TokenIndices) -> Patches:
        """Predict all patches. `restore_indices`: index of each patch in the sequence (visible, then hidden)."""
        tokens = self.embed(self.norm_in(tokens))
        mask_tokens = self.mask_token.to(tokens.dtype).expand(
            len(tokens), self.num_prefix_tokens + restore_indices.shape[1] - tokens.shape[1], -1
        )
        sequence = torch.cat([tokens[:, self.num_prefix_tokens :], mask_tokens], dim=1)
        patches = sequence.gather(1, restore_indices[..., None].expand(-1, -1, sequence.shape[2]))
        tokens = torch.cat([tokens[:, : self.num_prefix_tokens], patches], dim=1) + self.positions.to(tokens.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        return self.pred(self.norm(tokens[:, self.num_prefix_tokens :]))

    def _initialize_weights(self) -> None:
        """Use Xavier initialisation, as in MAE."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias) if module.bias is not None else None
        nn.init.normal_(self.mask_token, std=0.02)


class PrototypeHead(nn.Module):
    """DINO's projection head: three layers, L2 norm, and cosine similarity to the prototypes (from -1 to 1).

    Prototypes are normalised to length 1 (the authors' `norm_last_layer`), so only their directions are learned.
    `batch_norm` (the authors' choice for convolutional networks) normalises the hidden layers over the batch. This
    removes what all images have in common, which dominates the features of small images early in training."""

    def __init__(
        self, *, embed_dim: int, hidden_width: int, bottleneck_width: int, num_prototypes: int, batch_norm: bool = False
    ) -> None:
        super().__init__()
        widths = [embed_dim, hidden_width, hidden_width]
        self.layers = nn.Sequential()
        for before, after in pairwise(widths):
            self.layers.append(nn.Linear(before, after, bias=not batch_norm))  # batch norm would undo the bias
            if batch_norm:
                self.layers.append(nn.BatchNorm1d(after, track_running_stats=False))
            self.layers.append(nn.GELU())
        self.layers.append(nn.Linear(hidden_width, bottleneck_width))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias) if layer.bias is not None else None
        self.prototypes = nn.Parameter(F.normalize(torch.randn(num_prototypes, bottleneck_width), dim=1))

    def forward(self, features: Features) -> Logits:
        return F.linear(F.normalize(self.layers(features), dim=1), self._normalize_prototypes())

    def _normalize_prototypes(self) -> Tensor:
        return F.normalize(self.prototypes, dim=1)


class ResolutionAdapter(nn.Module):
    """Apply models of one config to images of `image_size`. The model is an argument of `forward`, with the images."""

    resampling_matrix: Tensor | None
    rotation: Tensor | None

    def __init__(self, config: ModelConfig, image_size: tuple[int, int]) -> None:
        super().__init__()
        if any(side % patch for side, patch in zip(image_size, config.patch_shape, strict=True)):
            raise UserError(
                f"patch_size={config.patch_size} does not divide images of {image_size[0]}×{image_size[1]} pixels."
            )
        self.num_output_tokens = 1 if config.global_pool == "token" else None
        grid = (image_size[0] // config.patch_shape[0], image_size[1] // config.patch_shape[1])
        prefix = config.num_prefix_tokens
        self.register_buffer(
            "resampling_matrix", _make_position_resampling_matrix_if_needed(config, grid), persistent=False
        )
        rotation = (
            make_rotary_table(grid, config.head_width, config.rotary_base, prefix) if config.uses_rotary else None
        )
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, model: VisionTransformer, images: Tensor, depth_noise: DepthNoise | None = None) -> Features:
        prefix = concat_prefix_tokens(model.cls_token, model.reg_token)
        table = (
            None
            if self.resampling_matrix is None or model.pos_embed is None
            else self.resampling_matrix @ model.pos_embed
        )
        tokens = to_autocast_dtype(
            model.pos_drop(prepend_prefix_and_add_positions(model.patch_embed(images), prefix, table))
        )
        encoded = model.encode(
            tokens, num_output_tokens=self.num_output_tokens, rotation=self.rotation, depth_noise=depth_noise
        )
        return model.forward_head(encoded, pre_logits=True)


class BackboneWithHead(nn.Module):
    """Crops -> prototype logits: the model and the head. Local crops use resampled position embeddings."""

    def __init__(self, model: VisionTransformer, head: nn.Module, local_crop_encoder: ResolutionAdapter | None) -> None:
        super().__init__()
        self.model, self.head, self.local_crop_encoder = model, head, local_crop_encoder

    def forward(
        self,
        global_crops: Tensor,
        local_crops: Tensor | None = None,
        global_depth_noise: Tensor | None = None,
        local_depth_noise: Tensor | None = None,
    ) -> Logits:
        features = self.model.compute_pooled_features(global_crops, global_depth_noise)
        if local_crops is not None and self.local_crop_encoder is not None:
            local_features = self.local_crop_encoder(self.model, local_crops, local_depth_noise)
            features = torch.cat([features, local_features])
        return self.head(features)


class DinoHeads(nn.Module):
    """The heads of student and teacher, and the centre of the teacher's logits."""

    centre: Tensor
    seen: Tensor

    def __init__(self, student_head: PrototypeHead, teacher_head: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student_head, teacher_head
        self.register_buffer("centre", torch.zeros(len(student_head.prototypes)))
        self.register_buffer(
            "seen", torch.zeros(len(student_head.prototypes))
        )  # mean teacher logits of the current step


def _make_position_resampling_matrix_if_needed(config: ModelConfig, new_grid: tuple[int, int]) -> Tensor | None:
    """Return the matrix of the resampling, 1 × new position × old position: the resampled identity."""
    if config.absolute_positions == "none":
        return None
    prefix = 0 if config.no_embed_class else config.num_prefix_tokens
    return resample_position_table(torch.eye(prefix + config.num_patches)[None], config.grid, new_grid, prefix)
