"""Initial weights: timm's, PyTorch's, attention like a trained model (mimetic) or a convolution (conv_like)."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from vitascope.model.attention import SelfAttention
from vitascope.model.config import ModelConfig
from vitascope.model.positions import compute_rotary_frequencies

FREQUENCY_DECAY = 3.0  # conv_like: the fastest frequency has e³ times the amplitude of the slowest
NEIGHBOUR_DISTANCE = 3  # conv_like, in patches; measured for a grid of 8 × 8 (docs/experiments.md)


def initialize_like_timm(model: nn.Module) -> None:
    """Draw linear layers and learned positions from N(0, 0.02²); biases 0, class and register tokens almost 0.

    timm truncates at ±2, which is 100 standard deviations, so this is a normal distribution.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    _initialize_tokens_and_positions(model, token_std=1e-6, position_std=0.02)


def initialize_like_torch(model: nn.Module) -> None:
    """Keep PyTorch's defaults; draw class token, registers and learned positions from N(0, 1) (sheet A)."""
    _initialize_tokens_and_positions(model, token_std=1.0, position_std=1.0)


@torch.no_grad()
def initialize_mimetic(model: nn.Module) -> None:
    """Initialise like timm, and attention like that of a trained model (Trockman & Kolter 2023, section 4).

    Per head W_Qᵀ W_K ≈ 0.7 Z + 0.7 I: tokens attend to similar tokens. W_proj W_V ≈ 0.4 Z - 0.4 I over all heads. The
    authors combine it with sin-cos positions."""
    initialize_like_timm(model)
    for layer in model.modules():
        if isinstance(layer, SelfAttention) and isinstance(layer.proj, nn.Linear):
            width = layer.embed_dim
            heads = [
                _factorize_noisy_identity(0.7, 0.7, layer.W_Q, width // layer.num_heads) for _ in range(layer.num_heads)
            ]
            layer.W_Q.copy_(torch.cat([query.T for query, _ in heads]))
            layer.W_K.copy_(torch.cat([key for _, key in heads]))
            left, right = _factorize_noisy_identity(0.4, -0.4, layer.W_V, width)
            layer.W_V.copy_(left.T)  # row vectors: tokens @ left @ right
            layer.proj.weight.copy_(right.T)


@torch.no_grad()
def initialize_conv_like(model: nn.Module) -> None:
    """Initialise like timm, and each head like one weight of a dilated 3×3 convolution.

    Each head attends most to one offset: the token itself, or a few patches away in one of eight directions. Rotary
    positions rotate queries and keys, so their biases determine the preferred offset δ: the pair (a, 0) of a key and
    a·(cos ωδ, sin ωδ) of a query give the score a²·cos(ω(Δ - δ)) for a key at offset Δ. Summed over all frequencies ω,
    it is largest at Δ = δ. Fast frequencies have a larger amplitude a, which makes the maximum narrow.

    The attended values are subtracted from the token: W_V is orthogonal with gain 0.5, W_proj = -W_Vᵀ."""
    initialize_like_timm(model)
    config = cast(ModelConfig, model.config)
    frequencies = compute_rotary_frequencies(config.head_width, config.rotary_base)
    amplitudes = torch.exp(-FREQUENCY_DECAY * torch.arange(len(frequencies)) / len(frequencies))
    amplitudes = (amplitudes / amplitudes.square().mean().sqrt()).repeat(2)  # pairs of the rows, then of the columns
    for layer in model.modules():
        if isinstance(layer, SelfAttention):
            query, key, _ = layer.qkv.bias.view(3, config.num_heads, len(amplitudes), 2)
            key[..., 0] = amplitudes
            angles = (_draw_neighbour_offsets(config.num_heads)[..., None] * frequencies).flatten(1)
            query.copy_(amplitudes[:, None] * torch.stack([angles.cos(), angles.sin()], dim=-1))
            if isinstance(layer.proj, nn.Linear):
                nn.init.orthogonal_(layer.W_V, gain=0.5)
                layer.proj.weight.copy_(-layer.W_V.T)


def _draw_neighbour_offsets(num_heads: int) -> Tensor:
    """Draw one (row, column) offset per head from the eight directions and (0, 0), each equally often."""
    offsets = NEIGHBOUR_DISTANCE * torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2))
    rounds = -(-num_heads // len(offsets))
    return torch.cat([offsets[torch.randperm(len(offsets))] for _ in range(rounds)])[:num_heads]


class MatrixFactors(NamedTuple):
    """Two matrices whose product approximates a third one."""

    left: Tensor  # width × rank
    right: Tensor  # rank × width


def _factorize_noisy_identity(
    noise_scale: float, identity_scale: float, reference_weight: Tensor, rank: int
) -> MatrixFactors:
    """Return factors whose product approximates noise_scale · Z + identity_scale · I, with Z from N(0, 1/width).

    `reference_weight` gives the width, dtype and device."""
    width = reference_weight.shape[1]
    noise = noise_scale * torch.randn(width, width, dtype=torch.float64) / width**0.5
    left, values, right = torch.linalg.svd(noise + identity_scale * torch.eye(width, dtype=torch.float64))
    root = values[:rank].sqrt()
    return MatrixFactors(
        (left[:, :rank] * root).to(reference_weight), (root[:, None] * right[:rank]).to(reference_weight)
    )


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
