"""Variants of self-attention: one head with three inputs, the cells of a 2-d grid, and a low-rank update (LoRA).

Sheet A: three inputs of one width, no output projection. Sheet C: keys of width 64, values of width 256.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention, check_token_shape_and_dtype
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
            check_token_shape_and_dtype(tokens, self.query.in_features)
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


class LoraProjection(nn.Module):
    """W = W₀ + α/r · B A for queries and for values, W₀ frozen (Hu et al. 2022, section 4.1; B starts at 0).

    `weight` is the complete W, so that code that reads the weight of the projection gets the effective one.
    """

    def __init__(self, projection: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        width = projection.in_features
        self.base = nn.Parameter(projection.weight.detach().clone(), requires_grad=False)
        self.bias = projection.bias
        self.lora_down = nn.Parameter(projection.weight.new_empty(2, rank, width).uniform_(-(width**-0.5), width**-0.5))
        self.lora_up = nn.Parameter(projection.weight.new_zeros(2, width, rank))  # queries, values
        self.scaling = alpha / rank

    @property
    def weight(self) -> Tensor:
        query, value = self.scaling * torch.bmm(self.lora_up, self.lora_down)
        return self.base + torch.cat([query, torch.zeros_like(query), value])

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(tokens, self.weight, self.bias)


def add_lora(model: nn.Module, rank: int, alpha: float) -> None:
    """Replace the projection of every attention layer by a LoraProjection. The outputs are unchanged at first."""
    for module in list(model.modules()):
        if isinstance(module, SelfAttention) and isinstance(module.qkv, nn.Linear):
            module.qkv = LoraProjection(module.qkv, rank, alpha)  # pyright: ignore[reportAttributeAccessIssue]


def make_lora_merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with the LoRA updates added to the weights, for a model without LoRA."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, LoraProjection):
            for part in ("base", "lora_down", "lora_up"):
                del state[f"{name}.{part}"]
            state[f"{name}.weight"] = module.weight.detach()
    return state
