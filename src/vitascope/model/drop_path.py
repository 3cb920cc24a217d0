"""Tokens -> Tokens, or zeros: leave a whole branch out, image by image, while training (stochastic depth).

Huang et al. 2016; per image and scaled up by what is kept, as in timm, so that the expectation is unchanged.
"""

from torch import nn

from vitascope.shapes import Tokens


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, tokens: Tokens) -> Tokens:
        if self.rate == 0.0 or not self.training:
            return tokens
        keep = 1.0 - self.rate
        kept = tokens.new_empty(tokens.shape[0], 1, 1).bernoulli_(keep)
        return tokens * (kept / keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"
