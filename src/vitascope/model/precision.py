"""Number formats: autocast's dtype, exact float32 without TF32, and linear layers in int8."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn


def get_autocast_or_own_dtype(tensor: Tensor) -> torch.dtype:
    """Return autocast's dtype if it is enabled on the tensor's device, else the tensor's."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def to_autocast_dtype(tensor: Tensor) -> Tensor:
    """Cast to autocast's dtype if autocast is enabled."""
    return tensor.to(get_autocast_or_own_dtype(tensor))


_TF32_LOCK = Lock()
_tf32_flags_before: list[tuple[Any, Any]] = []  # one entry per open context: the flags before the first


@contextmanager
def disable_tf32() -> Iterator[None]:
    """Compute float32 products and convolutions without TF32 inside this context.

    The flags belong to the process: the first of several threads changes them, the last restores them."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    with _TF32_LOCK:
        _tf32_flags_before.append((_tf32_flags_before or [(matmul.allow_tf32, cudnn.allow_tf32)])[0])
        matmul.allow_tf32 = cudnn.allow_tf32 = False  # PyTorch's default for convolutions is True
    try:
        yield
    finally:
        with _TF32_LOCK:
            before = _tf32_flags_before.pop()
            if not _tf32_flags_before:
                matmul.allow_tf32, cudnn.allow_tf32 = before


class Int8Linear(nn.Module):
    """Linear layer with PyTorch's fbgemm int8 kernels, for inference only.

    Weights have one scale per output feature, tokens one per call. Tokens use 8 bits, or 7 if 8 would overflow."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.packed_weight = _quantize_and_pack_int8_weight(linear.weight.detach().float().cpu(), bias)
        self.reduce_range = has_int8_matmul_overflow()

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(tokens, self.packed_weight, self.reduce_range)


def _quantize_and_pack_int8_weight(weight: Tensor, bias: Tensor | None) -> torch.ScriptObject:
    scales = weight.abs().amax(1).clamp(min=1e-8).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.15 announces the removal of this format
        return torch.ops.quantized.linear_prepack(
            torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), bias
        )


@cache
def has_int8_matmul_overflow() -> bool:
    """Return whether 8-bit products overflow on this processor, tested with ones.

    Processors without VNNI add two products, up to 2 · 255 · 127, in 16 bits."""
    ones = torch.ones(1, 64)
    return bool(
        (torch.ops.quantized.linear_dynamic(ones, _quantize_and_pack_int8_weight(ones, None), False) - 64).abs() > 1
    )


def replace_linear_with_int8_in_place(model: nn.Module, excluded_layers: set[nn.Module]) -> nn.Module:
    """Replace every linear layer in place, except `excluded_layers`, and return the model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child not in excluded_layers:
                setattr(module, name, Int8Linear(child))
    return model
