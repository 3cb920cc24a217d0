"""QK-norm and rotary positions of packed queries and keys, in one pass, with the gradient.

Features are read as pairs, two bfloat16 numbers in one 32-bit word: the rotation acts on pairs, and a dot product over
all features is the sum of the dot products of the pairs' first and second features. `short_attention` uses the same
functions.

For sequences that are too long for `short_attention`, PyTorch's attention is used. QK-norm and rotary positions would
then be separate passes over memory, with copies between layouts, which take longer than attention itself. This kernel
reads each token's queries and keys once, normalises, rotates and writes them, and copies the values. The backward pass
recomputes the norms and writes the packed gradient.
"""

# Triton code is not typed Python.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitascope.kernels import USES_INTERPRETER
from vitascope.kernels.launch import kernel_operator
from vitascope.kernels.norm import sum_partial_gradients

# Dtype of dot products. Triton's interpreter, which runs the tests on a CPU, cannot multiply bfloat16.
DOT_DTYPE = tl.constexpr(tl.float32 if USES_INTERPRETER else tl.bfloat16)


@triton.jit
def unpack_bfloat16_pairs(pairs):
    """Return the two bfloat16 numbers of 32-bit words as float32: bfloat16 is the upper half of float32."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack_bfloat16_pairs(first, second):
    """Return two numbers, rounded to bfloat16, in one 32-bit word."""
    low = first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return (second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low


@triton.jit
def _compute_inverse_rms(first, second, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / root mean square of each token's features."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + EPS)[:, None]


@triton.jit
def normalize_and_rotate(
    first, second, weight, cosine, sine, FACTOR: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate queries or keys, and multiply them by a factor."""
    if NORM:
        pair = tl.arange(0, WIDTH // 2)[None, :]
        size = _compute_inverse_rms(first, second, WIDTH, EPS)
        first, second = (
            first * size * tl.load(weight + 2 * pair),
            second * size * tl.load(weight + 2 * pair + 1),
        )
    if ROTARY:
        first, second = first * cosine - second * sine, second * cosine + first * sine
    return (first * FACTOR).to(DOT_DTYPE), (second * FACTOR).to(DOT_DTYPE)


@triton.jit
def normalize_and_rotate_backward(
    grad_first, grad_second, first, second, weight, grad_weight, cosine, sine,
    WIDTH: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Backward pass: rotate back, and differentiate the norm; its partial weight gradient is stored."""
    if ROTARY:
        grad_first, grad_second = grad_first * cosine + grad_second * sine, grad_second * cosine - grad_first * sine
    if NORM:
        pair = tl.arange(0, WIDTH // 2)
        size = _compute_inverse_rms(first, second, WIDTH, EPS)
        first, second = first * size, second * size
        tl.store(grad_weight + 2 * pair, tl.sum(grad_first * first, 0))
        tl.store(grad_weight + 2 * pair + 1, tl.sum(grad_second * second, 0))
        grad_first = grad_first * tl.load(weight + 2 * pair)[None, :]
        grad_second = grad_second * tl.load(weight + 2 * pair + 1)[None, :]
        along = ((tl.sum(grad_first * first, 1) + tl.sum(grad_second * second, 1)) / WIDTH)[:, None]
        grad_first, grad_second = size * (grad_first - first * along), size * (grad_second - second * along)
    return grad_first, grad_second


def count_rotary_tables(rotation: Tensor | None) -> int:
    """Return the number of rotary tables: one per image, or one for all images."""
    return rotation.shape[1] if rotation is not None and rotation.ndim == 5 else 1


TOKENS_PER_PROGRAM = 64  # of one head


@triton.jit
def _compute_offsets_and_load_cosines_sines(
    rotation, tables, COUNT,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Return offsets of a program's feature pairs (packed and per tensor), a mask of valid rows, cosines and sines."""
    row = (tl.program_id(0) // HEADS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % HEADS * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    inside = row < COUNT
    ALL: tl.constexpr = HEADS * WIDTH // 2
    cosine, sine = 1.0, 0.0
    if ROTARY:
        table_row = (row // TOKENS % tables) * TOKENS + row % TOKENS
        offset = rotation + table_row * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        cosine = tl.load(offset, mask=inside, other=1.0)
        sine = tl.load(offset + tables * TOKENS * (WIDTH // 2), mask=inside, other=0.0)
    return row * 3 * ALL + column, row * ALL + column, inside, cosine, sine


@triton.jit
def _qk_norm_rope_kernel(
    pairs, q_weight, k_weight, rotation, tables, query, key, value, COUNT,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    packed, unpacked, inside, cosine, sine = _compute_offsets_and_load_cosines_sines(
        rotation, tables, COUNT, TOKENS, HEADS, WIDTH, ROWS, ROTARY
    )
    ALL: tl.constexpr = HEADS * WIDTH // 2
    first, second = unpack_bfloat16_pairs(tl.load(pairs + packed, mask=inside, other=0))
    first, second = normalize_and_rotate(first, second, q_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    tl.store(query + unpacked, pack_bfloat16_pairs(first, second), mask=inside)
    first, second = unpack_bfloat16_pairs(tl.load(pairs + packed + ALL, mask=inside, other=0))
    first, second = normalize_and_rotate(first, second, k_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    tl.store(key + unpacked, pack_bfloat16_pairs(first, second), mask=inside)
    tl.store(value + unpacked, tl.load(pairs + packed + 2 * ALL, mask=inside, other=0), mask=inside)


@triton.jit
def _qk_norm_rope_backward_kernel(
    grad_query, grad_key, grad_value, pairs, q_weight, k_weight, rotation, tables, grad_packed, grad_weights, COUNT,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    packed, unpacked, inside, cosine, sine = _compute_offsets_and_load_cosines_sines(
        rotation, tables, COUNT, TOKENS, HEADS, WIDTH, ROWS, ROTARY
    )
    ALL: tl.constexpr = HEADS * WIDTH // 2
    weight_grads = grad_weights + tl.program_id(0) * 2 * WIDTH
    first, second = unpack_bfloat16_pairs(tl.load(pairs + packed, mask=inside, other=0))
    grad_first, grad_second = unpack_bfloat16_pairs(tl.load(grad_query + unpacked, mask=inside, other=0))
    grad_first, grad_second = normalize_and_rotate_backward(
        grad_first, grad_second, first, second, q_weight, weight_grads, cosine, sine, WIDTH, NORM, ROTARY, EPS
    )
    tl.store(grad_packed + packed, pack_bfloat16_pairs(grad_first, grad_second), mask=inside)
    first, second = unpack_bfloat16_pairs(tl.load(pairs + packed + ALL, mask=inside, other=0))
    grad_first, grad_second = unpack_bfloat16_pairs(tl.load(grad_key + unpacked, mask=inside, other=0))
    grad_first, grad_second = normalize_and_rotate_backward(
        grad_first, grad_second, first, second, k_weight, weight_grads + WIDTH, cosine, sine, WIDTH, NORM, ROTARY, EPS
    )
    tl.store(grad_packed + packed + ALL, pack_bfloat16_pairs(grad_first, grad_second), mask=inside)
    tl.store(grad_packed + packed + 2 * ALL, tl.load(grad_value + unpacked, mask=inside, other=0), mask=inside)


@kernel_operator("vitascope::qk_norm_rope")
def qk_norm_rope(
    packed_qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    rotation: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, token, 3 × head × width) -> queries, keys and values, each (batch, token, head, width).

    Queries and keys are RMS-normalised if their weights are given, and rotated if a rotary table is given, as in
    `short_attention`."""
    packed_qkv = packed_qkv.contiguous()
    query, key, value = (packed_qkv.new_empty(_get_batch_token_head_width(packed_qkv, num_heads)) for _ in range(3))
    pairs = [tensor.view(torch.int32) for tensor in (packed_qkv, query, key, value)]
    constants = _collect_kernel_constants(packed_qkv, q_norm_weight, rotation, num_heads, eps)
    _qk_norm_rope_kernel[_compute_launch_grid(packed_qkv, num_heads)](
        pairs[0],
        q_norm_weight,
        k_norm_weight,
        rotation,
        count_rotary_tables(rotation),
        *pairs[1:],
        packed_qkv.shape[0] * packed_qkv.shape[1],
        **constants,
    )
    return query, key, value


@kernel_operator("vitascope::qk_norm_rope_backward")
def qk_norm_rope_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    packed_qkv: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    rotation: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of packed_qkv and, as two rows, of the norms' weights."""
    packed_qkv = packed_qkv.contiguous()
    grad_pairs = [grad.contiguous().view(torch.int32) for grad in (grad_query, grad_key, grad_value)]
    grad_qkv, width = torch.empty_like(packed_qkv), packed_qkv.shape[2] // 3 // num_heads
    programs = _compute_launch_grid(packed_qkv, num_heads)
    grad_weights = packed_qkv.new_empty(programs[0] if q_norm_weight is not None else 0, 2, width, dtype=torch.float32)
    _qk_norm_rope_backward_kernel[programs](
        *grad_pairs,
        packed_qkv.view(torch.int32),
        q_norm_weight,
        k_norm_weight,
        rotation,
        count_rotary_tables(rotation),
        grad_qkv.view(torch.int32),
        grad_weights,
        packed_qkv.shape[0] * packed_qkv.shape[1],
        **_collect_kernel_constants(packed_qkv, q_norm_weight, rotation, num_heads, eps),
    )
    return grad_qkv, sum_partial_gradients(grad_weights)


def _get_batch_token_head_width(packed_qkv: Tensor, num_heads: int) -> tuple[int, int, int, int]:
    """Return (batch, token, head, head width)."""
    return packed_qkv.shape[0], packed_qkv.shape[1], num_heads, packed_qkv.shape[2] // 3 // num_heads


def _compute_launch_grid(packed_qkv: Tensor, num_heads: int) -> tuple[int]:
    return (triton.cdiv(packed_qkv.shape[0] * packed_qkv.shape[1], TOKENS_PER_PROGRAM) * num_heads,)


def _collect_kernel_constants(
    packed_qkv: Tensor, q_norm_weight: Tensor | None, rotation: Tensor | None, num_heads: int, eps: float
) -> dict[str, int | float | bool]:
    norm, rotary, width = q_norm_weight is not None, rotation is not None, packed_qkv.shape[2] // 3 // num_heads
    options = {"NORM": norm, "ROTARY": rotary, "EPS": eps, "ROWS": TOKENS_PER_PROGRAM, "num_warps": 4}
    return {"TOKENS": packed_qkv.shape[1], "HEADS": num_heads, "WIDTH": width, **options}


@qk_norm_rope.register_fake
def _fake_qk_norm_rope(packed_qkv: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *_, num_heads, _ = args
    return tuple(packed_qkv.new_empty(_get_batch_token_head_width(packed_qkv, num_heads)) for _ in range(3))


@qk_norm_rope_backward.register_fake
def _fake_qk_norm_rope_backward(*args: Any) -> tuple[Tensor, Tensor]:
    *_, packed_qkv, _, _, _, num_heads, _ = args
    grad_weights = packed_qkv.new_empty(2, packed_qkv.shape[2] // 3 // num_heads, dtype=torch.float32)
    return packed_qkv.new_empty(packed_qkv.shape), grad_weights


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    *tensors, ctx.num_heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _compute_gradients(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad_qkv, grad_weights = qk_norm_rope_backward(*grad_outputs, *tensors, ctx.num_heads, ctx.eps)
    grad_q_weight, grad_k_weight = (None, None) if tensors[1] is None else grad_weights
    return grad_qkv, grad_q_weight, grad_k_weight, None, None, None


qk_norm_rope.register_autograd(_compute_gradients, setup_context=_save_for_backward)
