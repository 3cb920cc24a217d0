"""Images of another size -> Features by a model's own weights: its positions resampled to the other grid."""

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.model.positions import resample
from vitascope.model.precision import narrowed
from vitascope.model.rotary import rotation
from vitascope.model.tokens import assemble, join_prefix
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Features


class OtherSize(nn.Module):
    """How models of one config see images of `size`. Without weights: the model comes along with the images."""

    resampling: Tensor | None
    rotation: Tensor | None

    def __init__(self, config: ModelConfig, size: tuple[int, int]) -> None:
        super().__init__()
        if any(side % patch for side, patch in zip(size, config.patch_shape, strict=True)):
            raise UserError(f"patch_size={config.patch_size} does not divide images of {size[0]}×{size[1]} pixels.")
        self.first = 1 if config.global_pool == "token" else None
        grid = (size[0] // config.patch_shape[0], size[1] // config.patch_shape[1])
        prefix = config.num_prefix_tokens
        self.register_buffer("resampling", _resampling(config, grid), persistent=False)
        turned = rotation(grid, config.head_width, config.rotary_base, prefix) if config.rotary else None
        self.register_buffer("rotation", turned, persistent=False)

    def forward(self, model: VisionTransformer, images: Tensor) -> Features:
        prefix = join_prefix(model.cls_token, model.reg_token)
        table = None if self.resampling is None or model.pos_embed is None else self.resampling @ model.pos_embed
        tokens = narrowed(model.pos_drop(assemble(model.patch_embed(images), prefix, table)))
        return model.forward_head(model.encode(tokens, first=self.first, rotation=self.rotation), pre_logits=True)


def _resampling(config: ModelConfig, grid: tuple[int, int]) -> Tensor | None:
    """1 × new position × old position: resampling is linear, so it can be read off from what it does to an identity."""
    if config.absolute_positions == "none":
        return None
    prefix = 0 if config.no_embed_class else config.num_prefix_tokens
    return resample(torch.eye(prefix + config.num_patches)[None], config.grid, grid, prefix)
