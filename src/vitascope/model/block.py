"""Tokens -> Tokens: a transformer block: attention, then the MLP, each added to its input."""

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention
from vitascope.model.config import ModelConfig
from vitascope.model.mlp import Mlp
from vitascope.model.norm import make_norm
from vitascope.shapes import BranchNoise, DepthNoise, OutputTokens, RotaryTable, Tokens


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)) (Dosovitskiy et al. 2021, equations 2 and 3)."""

    def __init__(self, config: ModelConfig, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        self.norm1 = make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.attn = make_attention(config)
        self.ls1 = make_layer_scale_or_identity(config)
        self.drop_path1 = DropPath(drop_path_rate)
        self.norm2 = make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.mlp = Mlp(
            embed_dim=config.embed_dim,
            hidden_width=config.hidden_width,
            activation=config.mlp,
            bias=config.proj_bias,
            drop_rate=config.proj_drop_rate,
        )
        self.ls2 = make_layer_scale_or_identity(config)
        self.drop_path2 = DropPath(drop_path_rate)

    def forward(
        self,
        tokens: Tokens,
        mask: Tensor | None = None,
        rotation: RotaryTable | None = None,
        num_output_tokens: int | None = None,
        depth_noise: DepthNoise | None = None,
    ) -> OutputTokens:
        """Apply the block. With `num_output_tokens`, compute and return only the first `num_output_tokens` tokens.

        `depth_noise`: image × (attention, MLP), see `DropPath`."""
        attention_noise, mlp_noise = (None, None) if depth_noise is None else depth_noise.unbind(1)
        attended = self.attn(self.norm1(tokens), mask, rotation, num_output_tokens)
        tokens = self.drop_path1(tokens[:, :num_output_tokens], self.ls1(attended), attention_noise)
        return self.drop_path2(tokens, self.ls2(self.mlp(self.norm2(tokens))), mlp_noise)


def make_attention(config: ModelConfig) -> SelfAttention:
    return SelfAttention(
        config.embed_dim,
        config.num_heads,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        proj_bias=config.proj_bias,
        output_projection=config.output_projection,
        causal=config.causal,
        local=config.attention == "lsa",
        norm=config.norm,
        norm_eps=config.norm_eps,
        attn_drop_rate=config.attn_drop_rate,
        proj_drop_rate=config.proj_drop_rate,
    )


def make_layer_scale_or_identity(config: ModelConfig) -> nn.Module:
    return nn.Identity() if config.init_values is None else LayerScale(config.embed_dim, config.init_values)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): drop a residual branch at random, per image.

    As in timm, remaining branches are divided by the keep probability, so that the expectation is unchanged.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, tokens: Tokens, branch: Tokens, noise: BranchNoise | None = None) -> Tokens:
        """Return tokens + branch, without the branch for a random fraction `rate` of the images.

        `noise`: uniform from 0 to 1; the branch is kept where it is below the keep probability. None: PyTorch's global
        generator decides."""
        if self.rate == 0.0 or not self.training:
            return tokens + branch
        keep_probability = 1.0 - self.rate
        if noise is None:
            is_kept = branch.new_empty(branch.shape[0], 1, 1).bernoulli_(keep_probability)
        else:
            is_kept = (noise[:, None, None] < keep_probability).to(branch.dtype)
        return torch.addcmul(tokens, branch, is_kept / keep_probability)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


class LayerScale(nn.Module):
    """Multiply each feature by a learned factor (Touvron et al. 2021, CaiT)."""

    def __init__(self, embed_dim: int, init_value: float) -> None:
        super().__init__()
        self.init_value = init_value
        self.gamma = nn.Parameter(torch.full((embed_dim,), float(init_value)))

    def forward(self, tokens: Tokens) -> Tokens:
        return (tokens * self.gamma).to(tokens.dtype)

    def extra_repr(self) -> str:
        return f"init_value={self.init_value:g}"


def check_depth_noise_shape(depth_noise: Tensor, num_images: int, num_branches: int) -> None:
    """Raise an error unless there is one number per image and residual branch."""
    if tuple(depth_noise.shape) != (num_images, num_branches):
        raise UserError(
            f"depth_noise has shape {list(depth_noise.shape)}, but {num_images} images and {num_branches} residual "
            f"branches (two per block) were given. Draw it with torch.rand({num_images}, {num_branches})."
        )
