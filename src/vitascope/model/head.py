"""Tokens -> Features: pool the tokens for the classifier. Merged tokens are weighted by their number of patches."""

from collections.abc import Callable

from torch import nn

from vitascope.model.config import ModelConfig
from vitascope.shapes import Features, Tokens, TokenSizes


class ClassTokenPool(nn.Module):
    """Return the class token."""

    def forward(self, tokens: Tokens, _: TokenSizes | None = None) -> Features:
        return tokens[:, 0]


class MeanPool(nn.Module):
    """Average the patch tokens, without class and register tokens."""

    def __init__(self, num_prefix_tokens: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, tokens: Tokens, token_sizes: TokenSizes | None = None) -> Features:
        patches = tokens[:, self.num_prefix_tokens :]
        if token_sizes is None:
            return patches.mean(dim=1)
        token_sizes = token_sizes[:, self.num_prefix_tokens :, None]
        return ((patches * token_sizes).sum(dim=1) / token_sizes.sum(dim=1)).to(tokens.dtype)


class SequencePool(nn.Module):
    """Average the patch tokens with learned weights (Hassani et al. 2021, CCT, section 3.2)."""

    def __init__(self, num_prefix_tokens: int, embed_dim: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.score = nn.Linear(embed_dim, 1)

    def forward(self, tokens: Tokens, token_sizes: TokenSizes | None = None) -> Features:
        patches = tokens[:, self.num_prefix_tokens :]
        scores = self.score(patches)
        if token_sizes is not None:
            scores = scores + token_sizes[:, self.num_prefix_tokens :, None].log().to(scores.dtype)
        weights = scores.softmax(dim=1)
        return (weights * patches).sum(dim=1)


POOLS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "token": lambda config: ClassTokenPool(),
    "avg": lambda config: MeanPool(config.num_prefix_tokens),
    "seq": lambda config: SequencePool(config.num_prefix_tokens, config.embed_dim),
}
