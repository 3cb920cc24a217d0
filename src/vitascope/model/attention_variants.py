"""Single-head attention with three inputs, and self-attention over the cells of a 2-d grid.

Sheet A: three inputs of one width, no output projection. Sheet C: keys of width 64, values of width 256.
"""

from einops import rearrange
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention
from vitascope.model.inputs import check_tokens
from vitascope.model.scaled_dot_product import attend, compute_attention_maps
from vitascope.shapes import AttentionMaps, Images, Tokens


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
        return compute_attention_maps(self.query(queries), self.key(queries if keys is None else keys), mask)


class SelfAttention2d(nn.Module):
    """SelfAttention over the cells of a grid: each cell is a token, its channels are the features."""

    def __init__(self, embed_dim: int, num_heads: int = 1, **settings: bool | float | str) -> None:
        super().__init__()
        self.attn = SelfAttention(embed_dim, num_heads, **settings)  # pyright: ignore[reportArgumentType]

    def forward(self, grid: Tensor, mask: Tensor | None = None) -> Images:
        tokens = self.attn(self.flatten_grid(grid), mask)
        return rearrange(tokens, "batch (height width) channel -> batch channel height width", height=grid.shape[2])

    def maps(self, grid: Tensor, mask: Tensor | None = None) -> AttentionMaps:
        """Return the attention maps, batch × head × cell × cell, cells in reading order."""
        return self.attn.maps(self.flatten_grid(grid), mask)

    def mix(self, maps: AttentionMaps, grid: Tensor) -> Images:
        """Average the values with the maps as weights: `mix(maps(grid), grid) == forward(grid)`."""
        tokens = self.attn.mix(maps, self.flatten_grid(grid))
        return rearrange(tokens, "batch (height width) channel -> batch channel height width", height=grid.shape[2])

    def flatten_grid(self, grid: Tensor) -> Tokens:
        """Return the cells as tokens, in reading order."""
        if grid.ndim != 4 or grid.shape[1] != self.attn.embed_dim:
            raise UserError(
                f"The grid must be batch × {self.attn.embed_dim} channels × height × width; this one has shape "
                f"{list(grid.shape)}."
            )
        return rearrange(grid, "batch channel height width -> batch (height width) channel")
