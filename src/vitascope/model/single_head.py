"""Three inputs -> one output: single-head attention with a projection each for queries, keys and values.

Sheet A: three inputs of one width, no output projection. Sheet C: keys of width 64, values of width 256.
"""

from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.inputs import check_tokens
from vitascope.model.scaled_dot_product import attend, attention_maps


class SingleHeadAttention(nn.Module):
    """Attention as in the equations; self-attention is the case of one input."""

    def __init__(
        self, embed_dim: int, *, key_width: int | None = None, value_width: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        key_width = embed_dim if key_width is None else key_width
        value_width = embed_dim if value_width is None else value_width
        if min(embed_dim, key_width, value_width) < 1:
            raise UserError(f"Widths must be at least 1: {embed_dim=}, {key_width=}, {value_width=}.")
        self.query = nn.Linear(embed_dim, key_width, bias=bias)
        self.key = nn.Linear(embed_dim, key_width, bias=bias)
        self.value = nn.Linear(embed_dim, value_width, bias=bias)

    def forward(
        self, queries: Tensor, keys: Tensor | None = None, values: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """(batch, query, feature), (batch, key, feature) twice -> (batch, query, value width)."""
        keys = queries if keys is None else keys
        values = keys if values is None else values
        for tokens in (queries, keys, values):
            check_tokens(tokens, self.query.in_features)
        return attend(self.query(queries), self.key(keys), self.value(values), mask)

    def maps(self, queries: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """(batch, query, key): rows sum to 1."""
        return attention_maps(self.query(queries), self.key(queries if keys is None else keys), mask)
