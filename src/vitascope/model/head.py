"""Tokens -> Features: pool the tokens for the classifier. Merged tokens are weighted by their number of patches.

Every pool is a weighted mean of tokens; `compute_weights` returns the weights, for explanations.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.model.config import ModelConfig
from vitascope.shapes import Features, Tokens, TokenSizes, TokenWeights


class ClassTokenPool(nn.Module):
    """Return the class token."""

    def forward(self, tokens: Tokens, _: TokenSizes | None = None) -> Features:
        return tokens[:, 0]

    def compute_weights(self, tokens: Tokens, _: TokenSizes | None = None) -> TokenWeights:
        return F.pad(torch.ones_like(tokens[:, :1, 0]), (0, tokens.shape[1] - 1))


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

    def compute_weights(self, tokens: Tokens, token_sizes: TokenSizes | None = None) -> TokenWeights:
        sizes = torch.ones_like(tokens[..., 0]) if token_sizes is None else token_sizes.to(tokens.dtype)
        patch_sizes = sizes[:, self.num_prefix_tokens :]
        return F.pad(patch_sizes / patch_sizes.sum(dim=1, keepdim=True), (self.num_prefix_tokens, 0))


class SequencePool(nn.Module):
    """Average the patch tokens with learned weights (Hassani et al. 2021, CCT, section 3.2)."""

    def __init__(self, num_prefix_tokens: int, embed_dim: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.score = nn.Linear(embed_dim, 1)

    def forward(self, tokens: Tokens, token_sizes: TokenSizes | None = None) -> Features:
        patches = tokens[:, self.num_prefix_tokens :]
        return (self._compute_patch_weights(tokens, token_sizes) * patches).sum(dim=1)

    def compute_weights(self, tokens: Tokens, token_sizes: TokenSizes | None = None) -> TokenWeights:
        return F.pad(self._compute_patch_weights(tokens, token_sizes)[..., 0], (self.num_prefix_tokens, 0))

    def _compute_patch_weights(self, tokens: Tokens, token_sizes: TokenSizes | None) -> Tensor:
        """Return the softmax of the patches' scores, image × patch × 1."""
        scores = self.score(tokens[:, self.num_prefix_tokens :])
        if token_sizes is not None:
            scores = scores + token_sizes[:, self.num_prefix_tokens :, None].log().to(scores.dtype)
        return scores.softmax(dim=1)


POOLS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "token": lambda config: ClassTokenPool(),
    "avg": lambda config: MeanPool(config.num_prefix_tokens),
    "seq": lambda config: SequencePool(config.num_prefix_tokens, config.embed_dim),
}
