"""Grid -> Grid: self-attention over the cells of a 2-d grid, batch × channel × height × width (sheet E)."""

from einops import rearrange
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention
from vitascope.shapes import Images, Maps, Tokens


class SelfAttention2d(nn.Module):
    """Every cell of the grid is a token, its channels are the features; all else is SelfAttention's."""

    def __init__(self, embed_dim: int, num_heads: int = 1, **settings: bool | float | str) -> None:
        super().__init__()
        self.attn = SelfAttention(embed_dim, num_heads, **settings)  # pyright: ignore[reportArgumentType]

    def forward(self, grid: Tensor, mask: Tensor | None = None) -> Images:
        tokens = self.attn(self.tokens(grid), mask)
        return rearrange(tokens, "batch (height width) channel -> batch channel height width", height=grid.shape[2])

    def maps(self, grid: Tensor, mask: Tensor | None = None) -> Maps:
        """Who looks at whom: batch × head × cell × cell, cells in reading order."""
        return self.attn.maps(self.tokens(grid), mask)

    def mix(self, maps: Maps, grid: Tensor) -> Images:
        """The second half, written out: `mix(maps(grid), grid) == forward(grid)`."""
        tokens = self.attn.mix(maps, self.tokens(grid))
        return rearrange(tokens, "batch (height width) channel -> batch channel height width", height=grid.shape[2])

    def tokens(self, grid: Tensor) -> Tokens:
        if grid.ndim != 4 or grid.shape[1] != self.attn.embed_dim:
            raise UserError(
                f"The grid must be batch × {self.attn.embed_dim} channels × height × width; this one has shape "
                f"{list(grid.shape)}."
            )
        return rearrange(grid, "batch channel height width -> batch (height width) channel")
