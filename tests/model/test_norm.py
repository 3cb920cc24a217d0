"""RMSNorm of bfloat16 tokens: PyTorch's result, without its warning."""

import warnings

import torch
from torch.nn import functional as F

from vitascope.model.norm import RMSNorm


def test_bfloat16_tokens_are_normalised_as_by_pytorch_without_a_warning() -> None:
    tokens, norm = torch.randn(50, 64).bfloat16(), RMSNorm(64, eps=1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = F.rms_norm(tokens, (64,), norm.weight, 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normalized = norm(tokens)
    assert normalized.dtype == torch.bfloat16 and torch.equal(normalized, expected)
