"""Number formats: cast tensors to autocast's dtype, and compute exact float32 without TF32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def resolve_autocast_dtype(tensor: Tensor) -> torch.dtype:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def to_autocast_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(resolve_autocast_dtype(tensor))


@contextmanager
def disable_tf32() -> Iterator[None]:
    products, layers = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # in convolutions PyTorch allows it by itself
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.backends.cudnn.allow_tf32 = layers
