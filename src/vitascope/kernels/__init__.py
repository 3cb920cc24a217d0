"""Triton kernels, each with a plain-PyTorch twin in the model that the tests compare it with; a measurement decides.

Nothing here imports Triton before a kernel is used: it exists for some systems only.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

HERE = find_spec("triton") is not None
HEAD_WIDTHS = (32, 64, 128)  # that our attention kernels take
SHORT = 128  # tokens of one image's head that fit into a program
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, slowly: for tests


def can_run(tensor: Tensor) -> bool:
    return HERE and (tensor.is_cuda or INTERPRETED)


def can_attend(packed: Tensor, head_width: int) -> bool:
    """Whether a head's features are a power of two that suits: (batch, token, 3 × head × width), bfloat16."""
    return can_run(packed) and packed.dtype == torch.bfloat16 and head_width in HEAD_WIDTHS


def is_short(packed: Tensor) -> bool:
    """Whether all tokens of one image's head fit into a program."""
    return packed.shape[1] <= SHORT


def can_bend(tokens: Tensor, hidden_width: int) -> bool:
    """Whether the MLP's matrices divide into tiles."""
    narrow = tokens.dtype == torch.bfloat16 or INTERPRETED
    return can_run(tokens) and narrow and tokens.shape[-1] % 64 == 0 and hidden_width % 128 == 0
