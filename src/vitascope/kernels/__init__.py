"""Triton kernels. Each has a plain PyTorch version in the model, to which tests compare it; the faster one is used.

Triton is imported only when a kernel is used, because it is not available on all systems.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
SUPPORTED_HEAD_WIDTHS = (32, 64, 128)  # of the attention kernels
MAX_SHORT_TOKENS = 128  # tokens of one head that fit into one Triton program
USES_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"  # runs kernels on a CPU, slowly: for tests


def can_run_triton(tensor: Tensor) -> bool:
    """Return whether Triton can run on the tensor's device."""
    return HAS_TRITON and (tensor.is_cuda or USES_INTERPRETER)


def can_use_attention_kernels(packed_qkv: Tensor, head_width: int) -> bool:
    """Return whether the attention kernels support this input: bfloat16 and a supported head width."""
    return can_run_triton(packed_qkv) and packed_qkv.dtype == torch.bfloat16 and head_width in SUPPORTED_HEAD_WIDTHS


def fits_short_attention(packed_qkv: Tensor) -> bool:
    """Return whether all tokens of one head fit into one Triton program."""
    return packed_qkv.shape[1] <= MAX_SHORT_TOKENS


def can_fuse_mlp(tokens: Tensor, hidden_width: int) -> bool:
    """Return whether the MLP kernel supports this input: bfloat16, and widths that divide into tiles."""
    is_supported_dtype = tokens.dtype == torch.bfloat16 or USES_INTERPRETER
    return can_run_triton(tokens) and is_supported_dtype and tokens.shape[-1] % 64 == 0 and hidden_width % 128 == 0
