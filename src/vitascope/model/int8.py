"""A linear layer -> one whose products are made of 8-bit integers: rows scaled once, tokens at each call."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """PyTorch's fbgemm kernels: signed weights per output feature, tokens with one scale per call, in 8 bits or, where
    that would overflow, 7. Not for training."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.packed_weight = _pack_int8_weight(linear.weight.detach().float().cpu(), bias)
        self.reduce_range = needs_reduced_range()

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(tokens, self.packed_weight, self.reduce_range)


def _pack_int8_weight(weight: Tensor, bias: Tensor | None) -> Any:
    scales = weight.abs().amax(1).clamp(min=1e-8).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.15 announces that this format will go; then float32 stays
        return torch.ops.quantized.linear_prepack(
            torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), bias
        )


@cache
def needs_reduced_range() -> bool:
    """Processors without VNNI add two products in 16 bits, where 2 · 255 · 127 does not fit: tried, with ones."""
    ones = torch.ones(1, 64)
    return bool((torch.ops.quantized.linear_dynamic(ones, _pack_int8_weight(ones, None), False) - 64).abs() > 1)


def replace_linear_with_int8(model: nn.Module, excluded_layers: set[nn.Module]) -> nn.Module:
    """Every linear layer replaced in place, except some."""
    for module in list(model.modules()):
        for name, part in module.named_children():
            if isinstance(part, nn.Linear) and part not in excluded_layers:
                setattr(module, name, Int8Linear(part))
    return model
