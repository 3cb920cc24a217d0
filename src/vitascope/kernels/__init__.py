"""Triton kernels, each with a plain-PyTorch twin in the model that the tests compare it with; a measurement decides.

Nothing here imports Triton before a kernel is used: it exists for some systems only.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
SUPPORTED_HEAD_WIDTHS = (32, 64, 128)  # that our attention kernels take
MAX_SHORT_TOKENS = 128  # tokens of one image's head that fit into a program
USES_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, slowly: for tests


def can_run_triton(tensor: Tensor) -> bool:
    return HAS_TRITON and (tensor.is_cuda or USES_INTERPRETER)


def can_fuse_attention(packed_qkv: Tensor, head_width: int) -> bool:
    """Whether a head's features are a power of two that suits: (batch, token, 3 × head × width), bfloat16."""
    return can_run_triton(packed_qkv) and packed_qkv.dtype == torch.bfloat16 and head_width in SUPPORTED_HEAD_WIDTHS


def can_use_short_attention(packed_qkv: Tensor) -> bool:
    """Whether all tokens of one image's head fit into a program."""
    return packed_qkv.shape[1] <= MAX_SHORT_TOKENS


def can_fuse_mlp(tokens: Tensor, hidden_width: int) -> bool:
    """Whether the MLP's matrices divide into tiles."""
    narrow = tokens.dtype == torch.bfloat16 or USES_INTERPRETER
    return can_run_triton(tokens) and narrow and tokens.shape[-1] % 64 == 0 and hidden_width % 128 == 0
