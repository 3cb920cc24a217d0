"""Packed queries, keys and values -> attention output: one Triton kernel for short sequences, in bfloat16.

With at most 128 tokens, one head of one image fits on the chip. A program loads its queries, keys and values once,
normalises queries and keys (QK-norm), rotates them (rotary positions), attends, and writes the result in the layout of
the output projection. The backward pass recomputes all of this, so only the input is stored.

Queries and keys are read as pairs of features (see `qk_norm_rope`).
"""

# Triton code is not typed Python.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitascope.kernels.launch import kernel_operator
from vitascope.kernels.norm import sum_partial_gradients
from vitascope.kernels.qk_norm_rope import (
    DOT_DTYPE,
    count_rotary_tables,
    normalize_and_rotate,
    normalize_and_rotate_backward,
    pack_bfloat16_pairs,
    unpack_bfloat16_pairs,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _compute_attention_maps(query_first, query_second, key_first, key_second, TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Compute the softmax over the keys; queries are already multiplied by scale · log2(e), for exp2."""
    scores = tl.dot(query_second, tl.trans(key_second), tl.dot(query_first, tl.trans(key_first)))
    scores = tl.where(tl.arange(0, TILE)[None, :] < TOKENS, scores, float("-inf"))
    powers = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@triton.jit
def _load_cosines_and_sines(rotation, image, tables, TOKENS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Load cosines and sines from the shared rotary table, or from the image's own."""
    token, pair = tl.arange(0, TILE)[:, None], tl.arange(0, WIDTH // 2)[None, :]
    offset = rotation + ((image % tables) * TOKENS + token) * (WIDTH // 2) + pair
    cosine = tl.load(offset, mask=token < TOKENS, other=1.0)
    return cosine, tl.load(offset + tables * TOKENS * (WIDTH // 2), mask=token < TOKENS, other=0.0)


@triton.jit
def _short_attention_kernel(
    qkv, pairs, q_weight, k_weight, rotation, tables, out,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    token, feature, pair = tl.arange(0, TILE)[:, None], tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH // 2)[None, :]
    inside = token < TOKENS
    ALL: tl.constexpr = HEADS * WIDTH
    row, head_offset = image * TOKENS + token, head * WIDTH
    offset = (row * 3 * ALL + head_offset) // 2 + pair
    query, query_second = unpack_bfloat16_pairs(tl.load(pairs + offset, mask=inside, other=0))
    key, key_second = unpack_bfloat16_pairs(tl.load(pairs + offset + ALL // 2, mask=inside, other=0))
    value_offset = row * 3 * ALL + 2 * ALL + head_offset + feature
    value = tl.load(qkv + value_offset, mask=inside, other=0.0).to(DOT_DTYPE)
    cosine, sine = 1.0, 0.0
    if ROTARY:
        cosine, sine = _load_cosines_and_sines(rotation, image, tables, TOKENS, WIDTH, TILE)
    query, query_second = normalize_and_rotate(
        query, query_second, q_weight, cosine, sine, SCALE * LOG2_E, WIDTH, NORM, ROTARY, EPS
    )
    key, key_second = normalize_and_rotate(key, key_second, k_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    maps = _compute_attention_maps(query, query_second, key, key_second, TOKENS, TILE)
    gathered = tl.dot(maps.to(DOT_DTYPE), value)
    tl.store(out + row * ALL + head_offset + feature, gathered.to(tl.bfloat16), mask=inside)


@triton.jit
def _short_attention_backward_kernel(
    qkv, pairs, q_weight, k_weight, rotation, tables, grad_output, grad_qkv, grad_pairs, grad_weights,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    token, feature, pair = tl.arange(0, TILE)[:, None], tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH // 2)[None, :]
    ALL: tl.constexpr = HEADS * WIDTH
    inside, row, head_offset = token < TOKENS, image * TOKENS + token, head * WIDTH
    offset = (row * 3 * ALL + head_offset) // 2 + pair
    raw_query, raw_query_second = unpack_bfloat16_pairs(tl.load(pairs + offset, mask=inside, other=0))
    raw_key, raw_key_second = unpack_bfloat16_pairs(tl.load(pairs + offset + ALL // 2, mask=inside, other=0))
    value_offset = row * 3 * ALL + 2 * ALL + head_offset + feature
    value = tl.load(qkv + value_offset, mask=inside, other=0.0).to(DOT_DTYPE)
    grad = tl.load(grad_output + row * ALL + head_offset + feature, mask=inside, other=0.0).to(DOT_DTYPE)
    cosine, sine = 1.0, 0.0
    if ROTARY:
        cosine, sine = _load_cosines_and_sines(rotation, image, tables, TOKENS, WIDTH, TILE)
    query, query_second = normalize_and_rotate(
        raw_query, raw_query_second, q_weight, cosine, sine, SCALE * LOG2_E, WIDTH, NORM, ROTARY, EPS
    )
    key, key_second = normalize_and_rotate(
        raw_key, raw_key_second, k_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS
    )
    maps = _compute_attention_maps(query, query_second, key, key_second, TOKENS, TILE)
    grad_value = tl.dot(tl.trans(maps.to(DOT_DTYPE)), grad)
    tl.store(grad_qkv + value_offset, grad_value.to(tl.bfloat16), mask=inside)
    grad_maps = tl.dot(grad, tl.trans(value))
    grad_scores = (maps * (grad_maps - tl.sum(maps * grad_maps, 1)[:, None])).to(DOT_DTYPE)
    weights_row = grad_weights + tl.program_id(0) * 2 * WIDTH
    first, second = normalize_and_rotate_backward(
        tl.dot(grad_scores, key) * SCALE, tl.dot(grad_scores, key_second) * SCALE, raw_query, raw_query_second,
        q_weight, weights_row, cosine, sine, WIDTH, NORM, ROTARY, EPS,
    )  # fmt: skip
    tl.store(grad_pairs + offset, pack_bfloat16_pairs(first, second), mask=inside)
    grad_scores_t = tl.trans(grad_scores)
    first, second = normalize_and_rotate_backward(
        tl.dot(grad_scores_t, query) / LOG2_E, tl.dot(grad_scores_t, query_second) / LOG2_E, raw_key, raw_key_second,
        k_weight, weights_row + WIDTH, cosine, sine, WIDTH, NORM, ROTARY, EPS,
    )  # fmt: skip
    tl.store(grad_pairs + offset + ALL // 2, pack_bfloat16_pairs(first, second), mask=inside)


@kernel_operator("vitascope::short_attention")
def short_attention(
    packed_qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    rotation: Tensor | None,
    num_heads: int,
    eps: float,
) -> Tensor:
    """(batch, token, 3 × head × width) -> (batch, token, head × width).

    Queries and keys are RMS-normalised if their weights are given, and rotated if a rotary table is given:
    cosine and sine × token × pair for all images, or cosine and sine × image × 1 × token × pair.
    """
    batch, tokens, features = packed_qkv.shape
    packed_qkv, out = packed_qkv.contiguous(), packed_qkv.new_empty(batch, tokens, features // 3)
    inputs = (
        packed_qkv,
        packed_qkv.view(torch.int32),
        q_norm_weight,
        k_norm_weight,
        rotation,
        count_rotary_tables(rotation),
    )
    _short_attention_kernel[(batch * num_heads,)](
        *inputs, out, **_collect_kernel_constants(packed_qkv, q_norm_weight, rotation, num_heads, eps)
    )
    return out


@kernel_operator("vitascope::short_attention_backward")
def short_attention_backward(
    grad_output: Tensor,
    packed_qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    rotation: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of packed_qkv and, as two rows, of the norms' weights."""
    batch, _, features = packed_qkv.shape
    packed_qkv, grad_output = packed_qkv.contiguous(), grad_output.contiguous()
    inputs = (
        packed_qkv,
        packed_qkv.view(torch.int32),
        q_norm_weight,
        k_norm_weight,
        rotation,
        count_rotary_tables(rotation),
    )
    grad_qkv = torch.empty_like(packed_qkv)
    programs = batch * num_heads if q_norm_weight is not None else 0
    grad_weights = packed_qkv.new_empty(programs, 2, features // 3 // num_heads, dtype=torch.float32)
    _short_attention_backward_kernel[(batch * num_heads,)](
        *inputs, grad_output, grad_qkv, grad_qkv.view(torch.int32), grad_weights,
        **_collect_kernel_constants(packed_qkv, q_norm_weight, rotation, num_heads, eps),
    )  # fmt: skip
    return grad_qkv, sum_partial_gradients(grad_weights)


def _collect_kernel_constants(
    packed_qkv: Tensor, q_norm_weight: Tensor | None, rotation: Tensor | None, num_heads: int, eps: float
) -> dict[str, int | float | bool]:
    tokens, width = packed_qkv.shape[1], packed_qkv.shape[2] // 3 // num_heads
    return {
        "TOKENS": tokens,
        "HEADS": num_heads,
        "WIDTH": width,
        "TILE": max(16, triton.next_power_of_2(tokens)),
        "NORM": q_norm_weight is not None,
        "ROTARY": rotation is not None,
        "SCALE": width**-0.5,
        "EPS": eps,
        "num_warps": 1 if tokens <= 16 else 4,
    }


@short_attention.register_fake
def _fake_short_attention(packed_qkv: Tensor, *args: Any) -> Tensor:
    del args
    return packed_qkv.new_empty(*packed_qkv.shape[:2], packed_qkv.shape[2] // 3)


@short_attention_backward.register_fake
def _fake_short_attention_backward(grad_output: Tensor, packed_qkv: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *_, num_heads, _ = args
    grad_weights = grad_output.new_empty(2, packed_qkv.shape[2] // 3 // num_heads, dtype=torch.float32)
    return packed_qkv.new_empty(packed_qkv.shape), grad_weights


# Several models in one batch (training/engines/batched.py): their images become one longer batch.
@short_attention.register_vmap
def _vmap_short_attention(
    info: Any, in_dims: tuple[int | None, ...], packed_qkv: Tensor, *args: Any
) -> tuple[Tensor, int]:
    del info
    q_norm_weight, _, rotation, num_heads, eps = args
    if q_norm_weight is not None or in_dims[3] is not None:
        raise NotImplementedError("Norm weights and rotations that differ from model to model are not supported.")
    by_model = packed_qkv.movedim(in_dims[0], 0)
    output = short_attention(by_model.flatten(0, 1), None, None, rotation, num_heads, eps)
    return output.unflatten(0, by_model.shape[:2]), 0


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.num_heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _compute_gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad_qkv, grad_weights = short_attention_backward(grad_output, *tensors, ctx.num_heads, ctx.eps)
    grad_q_weight, grad_k_weight = (None, None) if tensors[1] is None else grad_weights
    return grad_qkv, grad_q_weight, grad_k_weight, None, None, None


short_attention.register_autograd(_compute_gradients, setup_context=_save_for_backward)
