"""Norms of narrow tokens: PyTorch's numbers, and nothing said about it."""

import warnings

import torch
from torch.nn import functional as F

from vitascope.model.norm import RMSNorm


def test_narrow_tokens_are_normalised_as_pytorch_does_without_a_word() -> None:
    tokens, norm = torch.randn(50, 64).bfloat16(), RMSNorm(64, eps=1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = F.rms_norm(tokens, (64,), norm.weight, 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = norm(tokens)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
