"""Tokens and a branch -> their sum, or the tokens alone: stochastic depth, image by image, while training.

Huang et al. 2016; per image and scaled up by what is kept, as in timm, so that the expectation is unchanged.
"""

import torch
from torch import nn

from vitascope.shapes import Tokens


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, tokens: Tokens, branch: Tokens) -> Tokens:
        """The tokens and, where it is kept, the branch."""
        if self.rate == 0.0 or not self.training:
            return tokens + branch
        keep = 1.0 - self.rate
        kept = branch.new_empty(branch.shape[0], 1, 1).bernoulli_(keep)
        return torch.addcmul(tokens, branch, kept / keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"
