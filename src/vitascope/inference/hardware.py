"""Device and precision of a forward pass, and a memory setting of the process.

glibc requests every block above a threshold from the operating system and returns it when it is freed. A model's
activations are such blocks, so each step touches millions of new pages: a forward pass of 256×8 on a thousand images
took 1.6 times as long (docs/experiments.md). Other systems' allocators keep freed memory.
"""

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from vitascope.errors import UserError
from vitascope.model.precision import disable_tf32


@dataclass(frozen=True)
class InferenceHardware:
    """Device and precision of a forward pass."""

    device: str
    precision: str  # float32, bfloat16, float16

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.precision != "float32")


def make_float32_inference_hardware(model: nn.Module) -> InferenceHardware:
    """Return the hardware for evaluation and prediction: the model's device, in float32."""
    return InferenceHardware(next(model.parameters()).device.type, "float32")


def disable_tf32_for_float32(hardware: InferenceHardware) -> AbstractContextManager[None]:
    """Return a context that disables TF32 if the precision is float32. Only a GPU has TF32."""
    return disable_tf32() if hardware.device == "cuda" and hardware.precision == "float32" else nullcontext()


def choose_or_check_device(requested: str) -> str:
    """Return the requested device; for `auto` the first available of cuda, mps, cpu."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if requested == "auto":
        return next(name for name, is_available in available.items() if is_available)
    if not available.get(requested):
        names = ", ".join(name for name, is_available in available.items() if is_available)
        raise UserError(f"The device {requested} is not available. Choose one of auto, {names}.")
    return requested


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_THRESHOLD = 2**31 - 1


@cache
def set_malloc_to_keep_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the system. Return whether that was possible."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has none
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST_THRESHOLD))
