"""A linear layer -> one whose products are made of 8-bit integers: rows scaled once, tokens at each call."""

import warnings

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """PyTorch's fbgemm kernels: signed weights per output feature, tokens with one scale per call. Not for training."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float().cpu()
        scales = weight.abs().amax(1).clamp(min=1e-8).double() / 127
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.15 announces that this format will go; then float32 stays
            whole = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            bias = None if linear.bias is None else linear.bias.detach().float()
            self.packed = torch.ops.quantized.linear_prepack(whole, bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(tokens, self.packed, False)


def with_int8_products(model: nn.Module, but: set[nn.Module]) -> nn.Module:
    """Every linear layer replaced in place, except some."""
    for module in list(model.modules()):
        for name, part in module.named_children():
            if isinstance(part, nn.Linear) and part not in but:
                setattr(module, name, Int8Linear(part))
    return model
