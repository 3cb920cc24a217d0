"""Initial weights: timm's, PyTorch's, attention like a trained model (mimetic) or a convolution (conv_like)."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from vitascope.model.attention import SelfAttention
from vitascope.model.config import ModelConfig
from vitascope.model.positions import compute_rotary_frequencies

FREQUENCY_DECAY = 3.0  # of `local`: by e^3 the fastest frequency counts more than the slowest
NEIGHBOUR_DISTANCE = 3  # patches, of `local`; measured for a grid of 8 × 8: docs/experiments.md


def initialize_like_timm(model: nn.Module) -> None:
    """Linear layers and learned positions from N(0, 0.02²), biases 0, class and register tokens almost 0.

    timm truncates at ±2, which is 100 standard deviations: a plain normal.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    _initialize_tokens_and_positions(model, token_std=1e-6, position_std=0.02)


def initialize_like_torch(model: nn.Module) -> None:
    """Layers keep PyTorch's defaults; class token, registers and learned positions from N(0, 1) (sheet A)."""
    _initialize_tokens_and_positions(model, token_std=1.0, position_std=1.0)


@torch.no_grad()
def initialize_mimetic(model: nn.Module) -> None:
    """As timm's, but attention starts where training would lead it (Trockman & Kolter 2023, section 4).

    Per head W_Qᵀ W_K ≈ 0.7 Z + 0.7 I: tokens look at what is like them. W_proj W_V ≈ 0.4 Z - 0.4 I over all heads. The
    authors pair it with sin-cos positions."""
    initialize_like_timm(model)
    for layer in model.modules():
        if isinstance(layer, SelfAttention) and isinstance(layer.proj, nn.Linear):
            width = layer.embed_dim
            heads = [
                _factorize_noisy_identity(0.7, 0.7, layer.W_Q, width // layer.num_heads) for _ in range(layer.num_heads)
            ]
            layer.W_Q.copy_(torch.cat([query.T for query, _ in heads]))
            layer.W_K.copy_(torch.cat([key for _, key in heads]))
            first, second = _factorize_noisy_identity(0.4, -0.4, layer.W_V, width)
            layer.W_V.copy_(first.T)  # row vectors: tokens @ first @ second
            layer.proj.weight.copy_(second.T)


@torch.no_grad()
def initialize_conv_like(model: nn.Module) -> None:
    """As timm's, but every head begins by preferring one place, a few patches away in one of eight directions or where
    the token itself is: like one weight of a wide 3×3 convolution, and learning goes on from there.

    Rotary positions turn queries and keys, so what all tokens have in common, their biases, becomes a preference for a
    place: a key's pair (a, 0) and a query's a·(cos ωδ, sin ωδ) give a²·cos(ω(Δ - δ)) for keys at distance Δ, and over
    all frequencies ω that is largest at Δ = δ. Fast frequencies count more, which makes the hill narrow.

    What is gathered there is taken away from the token: W_V is a rotation halved, W_proj = -W_Vᵀ."""
    initialize_like_timm(model)
    config = cast(ModelConfig, model.config)
    turns = compute_rotary_frequencies(config.head_width, config.rotary_base)
    size = torch.exp(-FREQUENCY_DECAY * torch.arange(len(turns)) / len(turns))
    size = (size / size.square().mean().sqrt()).repeat(2)  # rows' pairs, then columns'
    for layer in model.modules():
        if isinstance(layer, SelfAttention):
            query, key, _ = layer.qkv.bias.view(3, config.num_heads, len(size), 2)
            key[..., 0] = size
            angles = (_draw_neighbour_offsets(config.num_heads)[..., None] * turns).flatten(1)
            query.copy_(size[:, None] * torch.stack([angles.cos(), angles.sin()], dim=-1))
            if isinstance(layer.proj, nn.Linear):
                nn.init.orthogonal_(layer.W_V, gain=0.5)
                layer.proj.weight.copy_(-layer.W_V.T)


def _draw_neighbour_offsets(num_heads: int) -> Tensor:
    """So many steps (rows, columns) in the eight directions or none, by chance, each as often as the others."""
    around = NEIGHBOUR_DISTANCE * torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2))
    rounds = -(-num_heads // len(around))
    return torch.cat([around[torch.randperm(len(around))] for _ in range(rounds)])[:num_heads]


def _factorize_noisy_identity(
    noise_scale: float, identity_scale: float, reference_weight: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Two matrices, width × rank and rank × width, whose product is nearly noise · Z + identity · I.

    Z is drawn from N(0, 1/width)."""
    width = reference_weight.shape[1]
    whole = noise_scale * torch.randn(width, width, dtype=torch.float64) / width**0.5
    left, values, right = torch.linalg.svd(whole + identity_scale * torch.eye(width, dtype=torch.float64))
    root = values[:rank].sqrt()
    return (left[:, :rank] * root).to(reference_weight), (root[:, None] * right[:rank]).to(reference_weight)


INITIALIZERS: dict[str, Callable[[nn.Module], None]] = {
    "timm": initialize_like_timm,
    "torch": initialize_like_torch,
    "mimetic": initialize_mimetic,
    "conv_like": initialize_conv_like,
}


def _initialize_tokens_and_positions(model: nn.Module, *, token_std: float, position_std: float) -> None:
    for name, std in (("cls_token", token_std), ("reg_token", token_std), ("pos_embed", position_std)):
        parameter = getattr(model, name)
        if isinstance(parameter, nn.Parameter):
            nn.init.normal_(parameter, std=std)
