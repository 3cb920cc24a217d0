"""Tokens -> Features: what the classifier gets to see. A token that stands for many patches counts for all of them."""

from collections.abc import Callable

from torch import nn

from vitascope.model.config import ModelConfig
from vitascope.shapes import Features, Sizes, Tokens


class ClassTokenPool(nn.Module):
    """The first token, which gathered from all others."""

    def forward(self, tokens: Tokens, _: Sizes | None = None) -> Features:
        return tokens[:, 0]


class MeanPool(nn.Module):
    """The mean over patches; class and register tokens stay out."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Tokens, sizes: Sizes | None = None) -> Features:
        patches = tokens[:, self.prefix :]
        if sizes is None:
            return patches.mean(dim=1)
        sizes = sizes[:, self.prefix :, None]
        return ((patches * sizes).sum(dim=1) / sizes.sum(dim=1)).to(tokens.dtype)


class SequencePool(nn.Module):
    """A weighted mean over patches with learned weights (Hassani et al. 2021, CCT, section 3.2)."""

    def __init__(self, prefix: int, embed_dim: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.score = nn.Linear(embed_dim, 1)

    def forward(self, tokens: Tokens, sizes: Sizes | None = None) -> Features:
        patches = tokens[:, self.prefix :]
        scores = self.score(patches)
        if sizes is not None:
            scores = scores + sizes[:, self.prefix :, None].log().to(scores.dtype)
        weights = scores.softmax(dim=1)
        return (weights * patches).sum(dim=1)


POOLS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "token": lambda config: ClassTokenPool(),
    "avg": lambda config: MeanPool(config.num_prefix_tokens),
    "seq": lambda config: SequencePool(config.num_prefix_tokens, config.embed_dim),
}
