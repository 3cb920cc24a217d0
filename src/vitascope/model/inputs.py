"""Check images and tokens, with an error message that says what to change."""

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig


def check_images(images: Tensor, config: ModelConfig, weight_dtype: torch.dtype) -> None:
    """Raise an error unless images are float, batch × channel × height × width, with the model's size and channels."""
    if images.ndim != 4:
        hint = " Add a batch axis: images[None]." if images.ndim == 3 else ""
        raise UserError(
            f"Images must be batch × channel × height × width; these have shape {list(images.shape)}.{hint}"
        )
    if images.shape[1] != config.in_chans:
        raise UserError(
            f"The images have {images.shape[1]} channels, the model was built for in_chans={config.in_chans}. "
            f"Convert the images, or build the model with in_chans={images.shape[1]}."
        )
    height, width = config.image_shape
    if tuple(images.shape[2:]) != (height, width):
        raise UserError(
            f"The images are {images.shape[2]}×{images.shape[3]} pixels, the model was built for {height}×{width}. "
            f"Resize the images, or build the model with img_size=({images.shape[2]}, {images.shape[3]})."
        )
    if not images.is_floating_point():
        raise UserError(f"The images are {images.dtype}; the model needs floats. Convert them: images.float() / 255.")
    if images.dtype != weight_dtype and not torch.is_autocast_enabled(images.device.type):
        raise UserError(f"The images are {images.dtype}, the weights {weight_dtype}. Make them equal: images.to(…).")


def check_tokens(tokens: Tensor, embed_dim: int) -> None:
    """Raise an error unless tokens are float, batch × token × feature, with `embed_dim` features."""
    if tokens.ndim != 3:
        raise UserError(f"Tokens must be batch × token × feature; these have shape {list(tokens.shape)}.")
    if not tokens.is_floating_point():
        raise UserError(f"The tokens are {tokens.dtype}; the layer needs floats.")
    if tokens.shape[2] != embed_dim:
        raise UserError(
            f"The tokens have {tokens.shape[2]} features, the layer was built for embed_dim={embed_dim}. "
            f"Project them to {embed_dim} features, or build it with embed_dim={tokens.shape[2]}."
        )


def check_depth_noise(depth_noise: Tensor, num_images: int, num_branches: int) -> None:
    """Raise an error unless there is one number per image and residual branch."""
    if tuple(depth_noise.shape) != (num_images, num_branches):
        raise UserError(
            f"depth_noise has shape {list(depth_noise.shape)}, but {num_images} images and {num_branches} residual "
            f"branches (two per block) were given. Draw it with torch.rand({num_images}, {num_branches})."
        )
