"""Replace linear layers by int8 ones: weights are quantised once, activations at each call."""

import warnings
from functools import cache

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """Linear layer with PyTorch's fbgemm int8 kernels, for inference only.

    Weights have one scale per output feature, tokens one per call. Tokens use 8 bits, or 7 if 8 would overflow."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.packed_weight = _pack_int8_weight(linear.weight.detach().float().cpu(), bias)
        self.reduce_range = needs_reduced_range()

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(tokens, self.packed_weight, self.reduce_range)


def _pack_int8_weight(weight: Tensor, bias: Tensor | None) -> torch.ScriptObject:
    scales = weight.abs().amax(1).clamp(min=1e-8).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.15 announces the removal of this format
        return torch.ops.quantized.linear_prepack(
            torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), bias
        )


@cache
def needs_reduced_range() -> bool:
    """Return whether 8-bit products overflow on this processor, tested with ones.

    Processors without VNNI add two products, up to 2 · 255 · 127, in 16 bits."""
    ones = torch.ones(1, 64)
    return bool((torch.ops.quantized.linear_dynamic(ones, _pack_int8_weight(ones, None), False) - 64).abs() > 1)


def replace_linear_with_int8(model: nn.Module, excluded_layers: set[nn.Module]) -> nn.Module:
    """Replace every linear layer in place, except `excluded_layers`, and return the model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child not in excluded_layers:
                setattr(module, name, Int8Linear(child))
    return model
