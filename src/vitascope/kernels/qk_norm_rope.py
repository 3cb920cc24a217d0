"""QK-norm and rotary positions of packed queries and keys, in one pass, with the gradient.

They are read as pairs of features, two bfloat16 numbers in one 32-bit word: the rotation turns pairs, and a product
over all features is the sum of the products over the pairs' first and second features. For the kernels beside it.

Where an image's head does not fit on the chip (`short_attention`), PyTorch's attention is used, and QK-norm and rotary
positions would be passes over memory of their own, with copies between layouts: together longer than attention itself.
Here each token's queries and keys are read once, brought to one size, turned and written; values are written beside
them. The backward pass computes the sizes again and writes the packed gradient at once.
"""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitascope.kernels import USES_INTERPRETER
from vitascope.kernels.reduce import sum_partial_gradients

# What products are made of. Triton's interpreter, with which the tests run this on a CPU, cannot multiply bfloat16.
DOT_DTYPE = tl.constexpr(tl.float32 if USES_INTERPRETER else tl.bfloat16)


@triton.jit
def unpack_bfloat16_pairs(pairs):
    """A 32-bit word -> its two bfloat16 numbers, as float32: bfloat16 is float32's upper half."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack_bfloat16_pairs(first, second):
    low = first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return (second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low


@triton.jit
def _compute_inverse_rms(first, second, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """One over the root mean square of each token's features."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + EPS)[:, None]


@triton.jit
def normalize_and_rotate(
    first, second, weight, cosine, sine, TIMES: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Queries or keys as they meet: normalised, turned, times a factor."""
    if NORM:
        pair = tl.arange(0, WIDTH // 2)[None, :]
        size = _compute_inverse_rms(first, second, WIDTH, EPS)
        first, second = (
            first * size * tl.load(weight + 2 * pair),
            second * size * tl.load(weight + 2 * pair + 1),
        )
    if ROTARY:
        first, second = first * cosine - second * sine, second * cosine + first * sine
    return (first * TIMES).to(DOT_DTYPE), (second * TIMES).to(DOT_DTYPE)


@triton.jit
def normalize_and_rotate_backward(
    to_first, to_second, first, second, weight, to_weight, cosine, sine,
    WIDTH: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The way back: turned the other way, and through the norm, whose weight's share is stored."""
    if ROTARY:
        to_first, to_second = to_first * cosine + to_second * sine, to_second * cosine - to_first * sine
    if NORM:
        pair = tl.arange(0, WIDTH // 2)
        size = _compute_inverse_rms(first, second, WIDTH, EPS)
        first, second = first * size, second * size
        tl.store(to_weight + 2 * pair, tl.sum(to_first * first, 0))
        tl.store(to_weight + 2 * pair + 1, tl.sum(to_second * second, 0))
        to_first = to_first * tl.load(weight + 2 * pair)[None, :]
        to_second = to_second * tl.load(weight + 2 * pair + 1)[None, :]
        along = ((tl.sum(to_first * first, 1) + tl.sum(to_second * second, 1)) / WIDTH)[:, None]
        to_first, to_second = size * (to_first - first * along), size * (to_second - second * along)
    return to_first, to_second


def count_rotary_tables(rotation: Tensor | None) -> int:
    """How many: one per image, or one for all."""
    return rotation.shape[1] if rotation is not None and rotation.ndim == 5 else 1


TOKENS_PER_PROGRAM = 64  # tokens of a program, of one head


@triton.jit
def _compute_offsets_and_angles(
    rotation, tables, COUNT,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Where a program's pairs of features are, packed and alone, which rows there are, and their angles."""
    row = (tl.program_id(0) // HEADS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    here = tl.program_id(0) % HEADS * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    inside = row < COUNT
    ALL: tl.constexpr = HEADS * WIDTH // 2
    cosine, sine = 1.0, 0.0
    if ROTARY:
        own = (row // TOKENS % tables) * TOKENS + row % TOKENS
        place = rotation + own * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        cosine = tl.load(place, mask=inside, other=1.0)
        sine = tl.load(place + tables * TOKENS * (WIDTH // 2), mask=inside, other=0.0)
    return row * 3 * ALL + here, row * ALL + here, inside, cosine, sine


@triton.jit
def _qk_norm_rope_kernel(
    pairs, q_weight, k_weight, rotation, tables, query, key, value, COUNT,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    packed, alone, inside, cosine, sine = _compute_offsets_and_angles(
        rotation, tables, COUNT, TOKENS, HEADS, WIDTH, ROWS, ROTARY
    )
    ALL: tl.constexpr = HEADS * WIDTH // 2
    first, second = unpack_bfloat16_pairs(tl.load(pairs + packed, mask=inside, other=0))
    first, second = normalize_and_rotate(first, second, q_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    tl.store(query + alone, pack_bfloat16_pairs(first, second), mask=inside)
    first, second = unpack_bfloat16_pairs(tl.load(pairs + packed + ALL, mask=inside, other=0))
    first, second = normalize_and_rotate(first, second, k_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    tl.store(key + alone, pack_bfloat16_pairs(first, second), mask=inside)
    tl.store(value + alone, tl.load(pairs + packed + 2 * ALL, mask=inside, other=0), mask=inside)


@triton.jit
def _qk_norm_rope_backward_kernel(
    to_query, to_key, to_value, pairs, q_weight, k_weight, rotation, tables, to_pairs, to_weights, COUNT,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    packed, alone, inside, cosine, sine = _compute_offsets_and_angles(
        rotation, tables, COUNT, TOKENS, HEADS, WIDTH, ROWS, ROTARY
    )
    ALL: tl.constexpr = HEADS * WIDTH // 2
    shares = to_weights + tl.program_id(0) * 2 * WIDTH
    first, second = unpack_bfloat16_pairs(tl.load(pairs + packed, mask=inside, other=0))
    above, above_too = unpack_bfloat16_pairs(tl.load(to_query + alone, mask=inside, other=0))
    above, above_too = normalize_and_rotate_backward(
        above, above_too, first, second, q_weight, shares, cosine, sine, WIDTH, NORM, ROTARY, EPS
    )
    tl.store(to_pairs + packed, pack_bfloat16_pairs(above, above_too), mask=inside)
    first, second = unpack_bfloat16_pairs(tl.load(pairs + packed + ALL, mask=inside, other=0))
    above, above_too = unpack_bfloat16_pairs(tl.load(to_key + alone, mask=inside, other=0))
    above, above_too = normalize_and_rotate_backward(
        above, above_too, first, second, k_weight, shares + WIDTH, cosine, sine, WIDTH, NORM, ROTARY, EPS
    )
    tl.store(to_pairs + packed + ALL, pack_bfloat16_pairs(above, above_too), mask=inside)
    tl.store(to_pairs + packed + 2 * ALL, tl.load(to_value + alone, mask=inside, other=0), mask=inside)


@torch.library.custom_op("vitascope::ready_heads", mutates_args=())
def qk_norm_rope(
    packed_qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    rotation: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, token, 3 × head × width) -> queries, keys and values, each (batch, token, head, width).

    RMS norm of queries and keys where their weights are given; turned where a rotation table is, as in
    `short_attention`."""
    packed_qkv = packed_qkv.contiguous()
    query, key, value = (packed_qkv.new_empty(_compute_head_shape(packed_qkv, num_heads)) for _ in range(3))
    words = [part.view(torch.int32) for part in (packed_qkv, query, key, value)]
    settings = _collect_kernel_constants(packed_qkv, q_norm_weight, rotation, num_heads, eps)
    _qk_norm_rope_kernel[_compute_launch_grid(packed_qkv, num_heads)](
        words[0],
        q_norm_weight,
        k_norm_weight,
        rotation,
        count_rotary_tables(rotation),
        *words[1:],
        packed_qkv.shape[0] * packed_qkv.shape[1],
        **settings,
    )
    return query, key, value


@torch.library.custom_op("vitascope::ready_heads_backward", mutates_args=())
def qk_norm_rope_backward(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, packed_qkv: Tensor, q_norm_weight: Tensor | None, k_norm_weight: Tensor | None,
    rotation: Tensor | None, num_heads: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and, two rows, of the norms' weights."""
    packed_qkv = packed_qkv.contiguous()
    above = [part.contiguous().view(torch.int32) for part in (grad_query, grad_key, grad_value)]
    to_qkv, width = torch.empty_like(packed_qkv), packed_qkv.shape[2] // 3 // num_heads
    programs = _compute_launch_grid(packed_qkv, num_heads)
    to_weights = packed_qkv.new_empty(programs[0] if q_norm_weight is not None else 0, 2, width, dtype=torch.float32)
    _qk_norm_rope_backward_kernel[programs](
        *above, packed_qkv.view(torch.int32), q_norm_weight, k_norm_weight, rotation, count_rotary_tables(rotation), to_qkv.view(torch.int32),
        to_weights, packed_qkv.shape[0] * packed_qkv.shape[1], **_collect_kernel_constants(packed_qkv, q_norm_weight, rotation, num_heads, eps),
    )  # fmt: skip
    return to_qkv, sum_partial_gradients(to_weights)


def _compute_head_shape(packed_qkv: Tensor, num_heads: int) -> tuple[int, int, int, int]:
    return packed_qkv.shape[0], packed_qkv.shape[1], num_heads, packed_qkv.shape[2] // 3 // num_heads


def _compute_launch_grid(packed_qkv: Tensor, num_heads: int) -> tuple[int]:
    return (triton.cdiv(packed_qkv.shape[0] * packed_qkv.shape[1], TOKENS_PER_PROGRAM) * num_heads,)


def _collect_kernel_constants(
    packed_qkv: Tensor, q_norm_weight: Tensor | None, rotation: Tensor | None, num_heads: int, eps: float
) -> dict[str, Any]:
    norm, rotary, width = q_norm_weight is not None, rotation is not None, packed_qkv.shape[2] // 3 // num_heads
    own = {"NORM": norm, "ROTARY": rotary, "EPS": eps, "ROWS": TOKENS_PER_PROGRAM, "num_warps": 4}
    return {"TOKENS": packed_qkv.shape[1], "HEADS": num_heads, "WIDTH": width, **own}


@qk_norm_rope.register_fake
def _(qkv, *rest):
    *_, heads, _ = rest
    return tuple(qkv.new_empty(_compute_head_shape(qkv, heads)) for _ in range(3))


@qk_norm_rope_backward.register_fake
def _(*given):
    *_, qkv, _, _, _, heads, _ = given
    return qkv.new_empty(qkv.shape), qkv.new_empty(2, qkv.shape[2] // 3 // heads, dtype=torch.float32)


def _save_for_backward(ctx, inputs, output):
    del output
    *tensors, ctx.heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _compute_gradients(ctx, *grad_outputs):
    tensors = ctx.saved_tensors
    to_qkv, to_weights = qk_norm_rope_backward(*grad_outputs, *tensors, ctx.heads, ctx.eps)
    to_query, to_key = (None, None) if tensors[1] is None else to_weights
    return to_qkv, to_query, to_key, None, None, None


qk_norm_rope.register_autograd(_compute_gradients, setup_context=_save_for_backward)
