"""Tokens -> Tokens: multi-head self-attention, with fused kernels, and explicitly in two steps (maps, mix)."""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope import kernels
from vitascope.errors import UserError
from vitascope.model.config import check_heads_divide_width
from vitascope.model.norm import make_norm
from vitascope.model.positions import apply_rotary_positions
from vitascope.model.scaled_dot_product import (
    BACKENDS,
    attend_fused,
    causal_mask,
    check_mask_dtype_and_shape,
    compute_attention_maps,
    off_diagonal_mask,
    prefer_sdpa_backend,
    to_additive_mask,
)
from vitascope.shapes import AttentionMaps, HeadTokens, OutputTokens, Queries, RotaryTable, Tokens, TokenSizes

PACKED_HEADS_PATTERN = "batch token (part head width) -> part batch head token width"
UNFUSED_KERNEL = "written"  # explicit attention: fused kernels cannot be batched over several models


class QueriesKeysValues(NamedTuple):
    """Queries, keys and values per head, after QK-norm and rotary positions."""

    query: Queries
    key: HeadTokens
    value: HeadTokens


class QkNormRopeArgs(NamedTuple):
    """Arguments of the Triton kernels after the packed projection."""

    q_norm_weight: Tensor | None
    k_norm_weight: Tensor | None
    rotation: Tensor | None
    num_heads: int
    eps: float


class SelfAttention(nn.Module):
    """Multi-head self-attention: each head computes a weighted mean of the values of all tokens.

    In eval mode `mix(maps(tokens), tokens) == forward(tokens)`: `forward` is fast, `maps` and `mix` give access to the
    attention maps. Masks: True means that the query may attend to the key; shapes query × key, batch × query × key, or
    batch × head × query × key. With `local` (LSA: Lee, Lee & Song 2021, section 3.3) no token attends to itself, and
    the factor of the scores is learned per head (`scale`). `kernel`, one of KERNELS, selects the implementation that
    `forward` uses if it is available; results differ only by rounding.
    """

    KERNELS = ("default", "own", *BACKENDS)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        output_projection: bool = True,
        causal: bool = False,
        local: bool = False,
        norm: str = "layernorm",
        norm_eps: float = 1e-6,
        attn_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_heads_divide_width(embed_dim, num_heads)
        if causal and local:
            raise UserError("With causal and local, the first token has no token to attend to. Choose one of them.")
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        head_width = embed_dim // num_heads
        self.scale = nn.Parameter(torch.full((num_heads,), head_width**-0.5)) if local else None
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.q_norm = make_norm(norm, head_width, norm_eps) if qk_norm else nn.Identity()
        self.k_norm = make_norm(norm, head_width, norm_eps) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop_rate)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=proj_bias) if output_projection else nn.Identity()
        self.proj_drop = nn.Dropout(proj_drop_rate)
        self.kernel = "default"

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        rotation: Tensor | None = None,
        num_output_tokens: int | None = None,
    ) -> OutputTokens:
        """Attend. With `num_output_tokens`, only the first `num_output_tokens` tokens are queries and outputs."""
        check_token_shape_and_dtype(tokens, self.embed_dim)
        if num_output_tokens is not None:
            qkv = self.compute_queries_keys_values(tokens, rotation, num_output_tokens)
            return self.concat_and_project_heads(self.attend(*qkv, mask))
        packed = self.qkv(tokens)
        is_plain = mask is None and not self.causal and self.scale is None and not (self.training and self.attn_drop.p)
        if is_plain and self._can_use_triton_kernel(packed) and kernels.fits_short_attention(packed):
            from vitascope.kernels.short_attention import short_attention

            return self.proj_drop(self.proj(short_attention(packed, *self._collect_qk_norm_and_rope_args(rotation))))
        qkv = self._normalize_and_rotate_packed(packed, rotation)
        return self.concat_and_project_heads(self.attend(*qkv, mask))

    def attend(
        self,
        query: Queries,
        key: HeadTokens,
        value: HeadTokens,
        mask: Tensor | None = None,
        token_sizes: TokenSizes | None = None,
    ) -> Queries:
        """Return each head's output, with the fused kernel. `token_sizes`: number of patches merged into each key."""
        dropout = self.attn_drop.p if self.training else 0.0
        if self.kernel == UNFUSED_KERNEL and not dropout:
            return self.compute_maps(query, key, mask, token_sizes) @ value
        has_no_empty_row = mask is None and key.shape[2] > 1  # causal and local masks leave every query a key
        score_mask = self.make_score_mask_or_size_bias(query, key, mask, token_sizes)
        with prefer_sdpa_backend(self.kernel):
            return attend_fused(
                query,
                key,
                value,
                score_mask,
                causal=self.causal and score_mask is None,
                dropout_rate=dropout,
                all_rows_have_a_key=has_no_empty_row,
            )

    def compute_maps(
        self, query: Queries, key: HeadTokens, mask: Tensor | None = None, token_sizes: TokenSizes | None = None
    ) -> AttentionMaps:
        """Return the attention maps of these queries and keys; `attend` averages the values with them as weights."""
        mask = self.make_score_mask_or_size_bias(query, key, mask, token_sizes)
        if mask is None and self.causal:
            mask = causal_mask(key.shape[2], key.device)[: query.shape[2]]
        return compute_attention_maps(query, key, mask)

    def make_score_mask_or_size_bias(
        self, query: Queries, key: HeadTokens, mask: Tensor | None = None, token_sizes: TokenSizes | None = None
    ) -> Tensor | None:
        """Combine the caller's mask with the layer's, for these queries; None: no mask, or only the causal one."""
        mask = (
            self.combine_with_causal_or_local_mask(mask, key)
            if token_sizes is None
            else self.compute_size_bias(token_sizes, key)
        )
        return mask if mask is None else mask[..., : query.shape[2], :]

    def maps(self, tokens: Tensor, mask: Tensor | None = None, rotation: Tensor | None = None) -> AttentionMaps:
        """Return the attention maps, (batch, head, query, key); rows sum to 1."""
        check_token_shape_and_dtype(tokens, self.embed_dim)
        query, key, _ = self.compute_queries_keys_values(tokens, rotation)
        return self.compute_maps(query, key, mask)

    def mix(self, maps: AttentionMaps, tokens: Tokens) -> Tokens:
        """Average the values with the maps as weights, concatenate the heads, project."""
        check_token_shape_and_dtype(tokens, self.embed_dim)
        _, _, value = self.compute_queries_keys_values(tokens)
        return self.concat_and_project_heads(self.attn_drop(maps) @ value)

    def compute_queries_keys_values(
        self, tokens: Tokens, rotation: RotaryTable | None = None, num_queries: int | None = None
    ) -> QueriesKeysValues:
        """Project tokens to queries, keys and values per head. `num_queries`: only the first tokens are queries."""
        if num_queries is None:
            return self._normalize_and_rotate_packed(self.qkv(tokens), rotation)
        weights = self.qkv.weight.tensor_split([self.embed_dim])
        biases = (None, None) if self.qkv.bias is None else self.qkv.bias.tensor_split([self.embed_dim])
        packed_query, packed_key_value = (
            F.linear(t, w, b) for t, w, b in zip((tokens[:, :num_queries], tokens), weights, biases, strict=True)
        )
        query = rearrange(packed_query, "batch token (head width) -> batch head token width", head=self.num_heads)
        key, value = rearrange(packed_key_value, PACKED_HEADS_PATTERN, part=2, head=self.num_heads)
        return self._normalize_and_rotate(query, key, value, rotation)

    def _normalize_and_rotate_packed(self, packed_qkv: Tensor, rotation: RotaryTable | None) -> QueriesKeysValues:
        """Split the packed projection into heads, normalise and rotate, with the Triton kernel if possible."""
        if not self._can_use_triton_kernel(packed_qkv):
            query, key, value = rearrange(packed_qkv, PACKED_HEADS_PATTERN, part=3, head=self.num_heads)
            return self._normalize_and_rotate(query, key, value, rotation)
        from vitascope.kernels.qk_norm_rope import qk_norm_rope

        query, key, value = (
            part.transpose(1, 2) for part in qk_norm_rope(packed_qkv, *self._collect_qk_norm_and_rope_args(rotation))
        )
        return QueriesKeysValues(self._apply_learned_scale(query), key, value)

    def _normalize_and_rotate(
        self, query: Queries, key: HeadTokens, value: HeadTokens, rotation: RotaryTable | None
    ) -> QueriesKeysValues:
        query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = (
                apply_rotary_positions(query, rotation[..., : query.shape[2], :]),
                apply_rotary_positions(key, rotation),
            )
        return QueriesKeysValues(self._apply_learned_scale(query), key, value)

    def _apply_learned_scale(self, query: Queries) -> Queries:
        """Multiply by LSA's learned scale and by √width, by which attention divides."""
        if self.scale is None:
            return query
        return query * (self.scale * query.shape[-1] ** 0.5).to(query.dtype)[:, None, None]

    def _can_use_triton_kernel(self, packed_qkv: Tensor) -> bool:
        is_supported_norm = isinstance(self.q_norm, nn.RMSNorm | nn.Identity)
        return (
            self.kernel == "own"
            and is_supported_norm
            and kernels.can_use_attention_kernels(packed_qkv, self.embed_dim // self.num_heads)
        )

    def _collect_qk_norm_and_rope_args(self, rotation: RotaryTable | None) -> QkNormRopeArgs:
        query, key = (norm.weight if isinstance(norm, nn.RMSNorm) else None for norm in (self.q_norm, self.k_norm))
        eps = self.q_norm.eps if isinstance(self.q_norm, nn.RMSNorm) else None
        table = None if rotation is None else rotation.contiguous()
        return QkNormRopeArgs(query, key, table, self.num_heads, eps or 0.0)

    def concat_and_project_heads(self, head_outputs: Queries) -> OutputTokens:
        """Concatenate the heads' outputs and apply the output projection."""
        joined = rearrange(head_outputs, "batch head token width -> batch token (head width)")
        return self.proj_drop(self.proj(joined))

    def combine_with_causal_or_local_mask(self, mask: Tensor | None, key: HeadTokens) -> Tensor | None:
        """Return the caller's mask with a head axis, combined with the causal or local mask; None if none is needed."""
        tokens = key.shape[2]
        if mask is None:
            return None if self.scale is None else off_diagonal_mask(tokens, key.device)
        mask = mask[:, None] if mask.ndim == 3 else mask
        check_mask_dtype_and_shape(mask, torch.Size([*key.shape[:3], tokens]))
        if not self.causal and self.scale is None:
            return mask
        layer_mask = (causal_mask if self.causal else off_diagonal_mask)(tokens, key.device)
        return mask & layer_mask if mask.dtype == torch.bool else mask + to_additive_mask(layer_mask)

    def compute_size_bias(self, token_sizes: TokenSizes, key: HeadTokens) -> Tensor:
        """Return log(size), added to the scores: a merged token gets the attention of all its patches (ToMe).

        With `local`, a merged token attends to its size - 1 other patches: log(size - 1) on the diagonal."""
        bias = token_sizes.log().to(key.dtype)[:, None, None, :]
        if self.scale is None:
            return bias
        diagonal = torch.eye(key.shape[2], dtype=torch.bool, device=key.device)
        return torch.where(diagonal, (token_sizes - 1).log().to(key.dtype)[:, None, None, :], bias)

    @property
    def W_Q(self) -> Tensor:
        """The query projection, output × input as in nn.Linear: query = tokens @ W_Q.T (+ bias). A view, not a copy."""
        return self.qkv.weight[: self.embed_dim]

    @property
    def W_K(self) -> Tensor:
        """The key projection, output × input."""
        return self.qkv.weight[self.embed_dim : 2 * self.embed_dim]

    @property
    def W_V(self) -> Tensor:
        """The value projection, output × input."""
        return self.qkv.weight[2 * self.embed_dim :]


def check_token_shape_and_dtype(tokens: Tensor, embed_dim: int) -> None:
    """Raise an error unless tokens are float, batch × token × feature, with `embed_dim` features."""
    if tokens.ndim != 3:
        raise UserError(f"Tokens must be batch × token × feature; these have shape {list(tokens.shape)}.")
    if not tokens.is_floating_point():
        raise UserError(f"The tokens are {tokens.dtype}; the layer needs floats.")
    if tokens.shape[2] != embed_dim:
        raise UserError(
            f"The tokens have {tokens.shape[2]} features, the layer was built for embed_dim={embed_dim}. "
            f"Project them to {embed_dim} features, or build it with embed_dim={tokens.shape[2]}."
        )
