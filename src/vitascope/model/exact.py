"""float32 means float32: no TF32 on CUDA, whatever a training in the same process allowed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32() -> Iterator[None]:
    products, layers = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # in convolutions PyTorch allows it by itself
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = products
        torch.backends.cudnn.allow_tf32 = layers
