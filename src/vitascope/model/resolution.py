"""Images of another size -> Features: apply a model with its positions resampled to the other grid."""

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.model.positions import make_rotary_table, resample_position_table
from vitascope.model.precision import to_autocast_dtype
from vitascope.model.tokens import concat_prefix_tokens, prepend_prefix_and_add_positions
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import DepthNoise, Features


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
        self.num_outputs = 1 if config.global_pool == "token" else None
        grid = (image_size[0] // config.patch_shape[0], image_size[1] // config.patch_shape[1])
        prefix = config.num_prefix_tokens
        self.register_buffer("resampling_matrix", _make_position_resampling_matrix(config, grid), persistent=False)
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
        encoded = model.encode(tokens, num_outputs=self.num_outputs, rotation=self.rotation, depth_noise=depth_noise)
        return model.forward_head(encoded, pre_logits=True)


def _make_position_resampling_matrix(config: ModelConfig, new_grid: tuple[int, int]) -> Tensor | None:
    """Return the matrix of the resampling, 1 × new position × old position: the resampled identity."""
    if config.absolute_positions == "none":
        return None
    prefix = 0 if config.no_embed_class else config.num_prefix_tokens
    return resample_position_table(torch.eye(prefix + config.num_patches)[None], config.grid, new_grid, prefix)
