"""Packed queries, keys, values -> what each token gathered: one Triton kernel for images of few tokens, in bfloat16.

With at most 128 tokens all of one image's head fits on the chip: a program loads its queries, keys and values once,
brings queries and keys to one size (QK-norm), turns them (rotary positions), attends, and writes the result where the
output projection reads it. The backward pass computes all of that again, so nothing but the input is kept.

Queries and keys are read as pairs of features (`meeting`).
"""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitascope.kernels.qk_norm_rope import (
    DOT_DTYPE,
    count_rotary_tables,
    normalize_and_rotate,
    normalize_and_rotate_backward,
    pack_bfloat16_pairs,
    unpack_bfloat16_pairs,
)
from vitascope.kernels.reduce import sum_partial_gradients

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _compute_attention_maps(query, query_too, key, key_too, TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Softmax over the keys; queries are scaled already, for powers of two."""
    scores = tl.dot(query_too, tl.trans(key_too), tl.dot(query, tl.trans(key)))
    scores = tl.where(tl.arange(0, TILE)[None, :] < TOKENS, scores, float("-inf"))
    powers = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@triton.jit
def _load_angles(rotation, image, tables, TOKENS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """From the only table, or from the image's own."""
    token, pair = tl.arange(0, TILE)[:, None], tl.arange(0, WIDTH // 2)[None, :]
    place = rotation + ((image % tables) * TOKENS + token) * (WIDTH // 2) + pair
    cosine = tl.load(place, mask=token < TOKENS, other=1.0)
    return cosine, tl.load(place + tables * TOKENS * (WIDTH // 2), mask=token < TOKENS, other=0.0)


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
    row, here = image * TOKENS + token, head * WIDTH
    place = (row * 3 * ALL + here) // 2 + pair
    query, query_too = unpack_bfloat16_pairs(tl.load(pairs + place, mask=inside, other=0))
    key, key_too = unpack_bfloat16_pairs(tl.load(pairs + place + ALL // 2, mask=inside, other=0))
    at_value = row * 3 * ALL + 2 * ALL + here + feature
    value = tl.load(qkv + at_value, mask=inside, other=0.0).to(DOT_DTYPE)
    cosine, sine = 1.0, 0.0
    if ROTARY:
        cosine, sine = _load_angles(rotation, image, tables, TOKENS, WIDTH, TILE)
    query, query_too = normalize_and_rotate(
        query, query_too, q_weight, cosine, sine, SCALE * LOG2_E, WIDTH, NORM, ROTARY, EPS
    )
    key, key_too = normalize_and_rotate(key, key_too, k_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    maps = _compute_attention_maps(query, query_too, key, key_too, TOKENS, TILE)
    gathered = tl.dot(maps.to(DOT_DTYPE), value)
    tl.store(out + row * ALL + here + feature, gathered.to(tl.bfloat16), mask=inside)


@triton.jit
def _short_attention_backward_kernel(
    qkv, pairs, q_weight, k_weight, rotation, tables, gradient, to_qkv, to_pairs, to_weights,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    token, feature, pair = tl.arange(0, TILE)[:, None], tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH // 2)[None, :]
    inside = token < TOKENS
    ALL: tl.constexpr = HEADS * WIDTH
    row, here = image * TOKENS + token, head * WIDTH
    place = (row * 3 * ALL + here) // 2 + pair
    query_in, query_in_too = unpack_bfloat16_pairs(tl.load(pairs + place, mask=inside, other=0))
    key_in, key_in_too = unpack_bfloat16_pairs(tl.load(pairs + place + ALL // 2, mask=inside, other=0))
    at_value = row * 3 * ALL + 2 * ALL + here + feature
    value = tl.load(qkv + at_value, mask=inside, other=0.0).to(DOT_DTYPE)
    above = tl.load(gradient + row * ALL + here + feature, mask=inside, other=0.0).to(DOT_DTYPE)
    cosine, sine = 1.0, 0.0
    if ROTARY:
        cosine, sine = _load_angles(rotation, image, tables, TOKENS, WIDTH, TILE)
    query, query_too = normalize_and_rotate(
        query_in, query_in_too, q_weight, cosine, sine, SCALE * LOG2_E, WIDTH, NORM, ROTARY, EPS
    )
    key, key_too = normalize_and_rotate(key_in, key_in_too, k_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    maps = _compute_attention_maps(query, query_too, key, key_too, TOKENS, TILE)
    to_value = tl.dot(tl.trans(maps.to(DOT_DTYPE)), above)
    tl.store(to_qkv + at_value, to_value.to(tl.bfloat16), mask=inside)
    to_maps = tl.dot(above, tl.trans(value))
    to_scores = (maps * (to_maps - tl.sum(maps * to_maps, 1)[:, None])).to(DOT_DTYPE)
    weights_row = to_weights + tl.program_id(0) * 2 * WIDTH
    first, second = normalize_and_rotate_backward(
        tl.dot(to_scores, key) * SCALE, tl.dot(to_scores, key_too) * SCALE, query_in, query_in_too,
        q_weight, weights_row, cosine, sine, WIDTH, NORM, ROTARY, EPS,
    )  # fmt: skip
    tl.store(to_pairs + place, pack_bfloat16_pairs(first, second), mask=inside)
    back = tl.trans(to_scores)
    first, second = normalize_and_rotate_backward(
        tl.dot(back, query) / LOG2_E, tl.dot(back, query_too) / LOG2_E, key_in, key_in_too,
        k_weight, weights_row + WIDTH, cosine, sine, WIDTH, NORM, ROTARY, EPS,
    )  # fmt: skip
    tl.store(to_pairs + place + ALL // 2, pack_bfloat16_pairs(first, second), mask=inside)


@torch.library.custom_op("vitascope::short_attention", mutates_args=())
def short_attention(
    packed_qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    rotation: Tensor | None,
    num_heads: int,
    eps: float,
) -> Tensor:
    """(batch, token, 3 × head × width) -> (batch, token, head × width).

    RMS norm of queries and keys where their weights are given; turned where a rotation table is: cosine and sine ×
    token × pair for all images, or cosine and sine × image × 1 × token × pair.
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


@torch.library.custom_op("vitascope::short_attention_backward", mutates_args=())
def short_attention_backward(
    grad_output: Tensor, packed_qkv: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, rotation: Tensor | None,
    num_heads: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and, two rows, of the norms' weights."""
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
    to_qkv = torch.empty_like(packed_qkv)
    programs = batch * num_heads if q_norm_weight is not None else 0
    to_weights = packed_qkv.new_empty(programs, 2, features // 3 // num_heads, dtype=torch.float32)
    _short_attention_backward_kernel[(batch * num_heads,)](
        *inputs, grad_output, to_qkv, to_qkv.view(torch.int32), to_weights,
        **_collect_kernel_constants(packed_qkv, q_norm_weight, rotation, num_heads, eps),
    )  # fmt: skip
    return to_qkv, sum_partial_gradients(to_weights)


def _collect_kernel_constants(
    packed_qkv: Tensor, q_norm_weight: Tensor | None, rotation: Tensor | None, num_heads: int, eps: float
) -> dict[str, Any]:
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
def _(qkv, *_):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


@short_attention_backward.register_fake
def _(gradient, qkv, *rest):
    *_, heads, _ = rest
    return qkv.new_empty(qkv.shape), gradient.new_empty(2, qkv.shape[2] // 3 // heads, dtype=torch.float32)


# Many models at once (training/together.py): their images are one longer batch. The norms' weights would differ.
@short_attention.register_vmap
def _(_, in_dims, qkv, *rest):
    q_weight, _, rotation, heads, eps = rest
    if q_weight is not None or in_dims[3] is not None:
        raise NotImplementedError("Norms and rotations that differ from model to model.")
    every = qkv.movedim(in_dims[0], 0)
    return short_attention(every.flatten(0, 1), None, None, rotation, heads, eps).unflatten(0, every.shape[:2]), 0


def _save_for_backward(ctx, inputs, output):
    del output
    *tensors, ctx.heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _compute_gradients(ctx, grad_output):
    tensors = ctx.saved_tensors
    to_qkv, to_weights = short_attention_backward(grad_output, *tensors, ctx.heads, ctx.eps)
    to_query, to_key = (None, None) if tensors[1] is None else to_weights
    return to_qkv, to_query, to_key, None, None, None


short_attention.register_autograd(_compute_gradients, setup_context=_save_for_backward)
