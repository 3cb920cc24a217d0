"""Number formats: cast tensors to autocast's dtype, and compute exact float32 without TF32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def get_autocast_or_own_dtype(tensor: Tensor) -> torch.dtype:
    """Return autocast's dtype if it is enabled on the tensor's device, else the tensor's."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def to_autocast_dtype(tensor: Tensor) -> Tensor:
    """Cast to autocast's dtype if autocast is enabled."""
    return tensor.to(get_autocast_or_own_dtype(tensor))


@contextmanager
def disable_tf32() -> Iterator[None]:
    """Compute float32 products and convolutions without TF32 inside this context."""
    matmul_allowed, cudnn_allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # PyTorch's default for convolutions is True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul_allowed
        torch.backends.cudnn.allow_tf32 = cudnn_allowed
