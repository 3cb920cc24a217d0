"""Packed queries, keys, values -> the three as attention wants them, in one pass, in bfloat16: for many tokens.

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

from vitascope.kernels.meeting import pack, prepare, prepare_backward, tables_of, unpack
from vitascope.kernels.sums import sum_shares

ROWS = 64  # tokens of a program, of one head


@triton.jit
def _places(
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
def _split(
    pairs, q_weight, k_weight, rotation, tables, query, key, value, COUNT,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    packed, alone, inside, cosine, sine = _places(rotation, tables, COUNT, TOKENS, HEADS, WIDTH, ROWS, ROTARY)
    ALL: tl.constexpr = HEADS * WIDTH // 2
    first, second = unpack(tl.load(pairs + packed, mask=inside, other=0))
    first, second = prepare(first, second, q_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    tl.store(query + alone, pack(first, second), mask=inside)
    first, second = unpack(tl.load(pairs + packed + ALL, mask=inside, other=0))
    first, second = prepare(first, second, k_weight, cosine, sine, 1.0, WIDTH, NORM, ROTARY, EPS)
    tl.store(key + alone, pack(first, second), mask=inside)
    tl.store(value + alone, tl.load(pairs + packed + 2 * ALL, mask=inside, other=0), mask=inside)


@triton.jit
def _join(
    to_query, to_key, to_value, pairs, q_weight, k_weight, rotation, tables, to_pairs, to_weights, COUNT,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    packed, alone, inside, cosine, sine = _places(rotation, tables, COUNT, TOKENS, HEADS, WIDTH, ROWS, ROTARY)
    ALL: tl.constexpr = HEADS * WIDTH // 2
    shares = to_weights + tl.program_id(0) * 2 * WIDTH
    first, second = unpack(tl.load(pairs + packed, mask=inside, other=0))
    above, above_too = unpack(tl.load(to_query + alone, mask=inside, other=0))
    above, above_too = prepare_backward(
        above, above_too, first, second, q_weight, shares, cosine, sine, WIDTH, NORM, ROTARY, EPS
    )
    tl.store(to_pairs + packed, pack(above, above_too), mask=inside)
    first, second = unpack(tl.load(pairs + packed + ALL, mask=inside, other=0))
    above, above_too = unpack(tl.load(to_key + alone, mask=inside, other=0))
    above, above_too = prepare_backward(
        above, above_too, first, second, k_weight, shares + WIDTH, cosine, sine, WIDTH, NORM, ROTARY, EPS
    )
    tl.store(to_pairs + packed + ALL, pack(above, above_too), mask=inside)
    tl.store(to_pairs + packed + 2 * ALL, tl.load(to_value + alone, mask=inside, other=0), mask=inside)


@torch.library.custom_op("vitascope::ready_heads", mutates_args=())
def ready_heads(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, rotation: Tensor | None, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, token, 3 × head × width) -> queries, keys and values, each (batch, token, head, width).

    RMS norm of queries and keys where their weights are given; turned where a rotation table is, as in
    `short_attention`."""
    qkv = qkv.contiguous()
    query, key, value = (qkv.new_empty(_alone(qkv, heads)) for _ in range(3))
    words = [part.view(torch.int32) for part in (qkv, query, key, value)]
    settings = _settings(qkv, q_weight, rotation, heads, eps)
    _split[_programs(qkv, heads)](
        words[0], q_weight, k_weight, rotation, tables_of(rotation), *words[1:], qkv.shape[0] * qkv.shape[1], **settings
    )
    return query, key, value


@torch.library.custom_op("vitascope::ready_heads_backward", mutates_args=())
def ready_heads_backward(
    to_query: Tensor, to_key: Tensor, to_value: Tensor, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    rotation: Tensor | None, heads: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and, two rows, of the norms' weights."""
    qkv = qkv.contiguous()
    above = [part.contiguous().view(torch.int32) for part in (to_query, to_key, to_value)]
    to_qkv, width = torch.empty_like(qkv), qkv.shape[2] // 3 // heads
    programs = _programs(qkv, heads)
    to_weights = qkv.new_empty(programs[0] if q_weight is not None else 0, 2, width, dtype=torch.float32)
    _join[programs](
        *above, qkv.view(torch.int32), q_weight, k_weight, rotation, tables_of(rotation), to_qkv.view(torch.int32),
        to_weights, qkv.shape[0] * qkv.shape[1], **_settings(qkv, q_weight, rotation, heads, eps),
    )  # fmt: skip
    return to_qkv, sum_shares(to_weights)


def _alone(qkv: Tensor, heads: int) -> tuple[int, int, int, int]:
    return qkv.shape[0], qkv.shape[1], heads, qkv.shape[2] // 3 // heads


def _programs(qkv: Tensor, heads: int) -> tuple[int]:
    return (triton.cdiv(qkv.shape[0] * qkv.shape[1], ROWS) * heads,)


def _settings(qkv: Tensor, q_weight: Tensor | None, rotation: Tensor | None, heads: int, eps: float) -> dict[str, Any]:
    norm, rotary, width = q_weight is not None, rotation is not None, qkv.shape[2] // 3 // heads
    own = {"NORM": norm, "ROTARY": rotary, "EPS": eps, "ROWS": ROWS, "num_warps": 4}
    return {"TOKENS": qkv.shape[1], "HEADS": heads, "WIDTH": width, **own}


@ready_heads.register_fake
def _(qkv, *rest):
    *_, heads, _ = rest
    return tuple(qkv.new_empty(_alone(qkv, heads)) for _ in range(3))


@ready_heads_backward.register_fake
def _(*given):
    *_, qkv, _, _, _, heads, _ = given
    return qkv.new_empty(qkv.shape), qkv.new_empty(2, qkv.shape[2] // 3 // heads, dtype=torch.float32)


def _remember(ctx, inputs, output):
    del output
    *tensors, ctx.heads, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _pass_back(ctx, *above):
    tensors = ctx.saved_tensors
    to_qkv, to_weights = ready_heads_backward(*above, *tensors, ctx.heads, ctx.eps)
    to_query, to_key = (None, None) if tensors[1] is None else to_weights
    return to_qkv, to_query, to_key, None, None, None


ready_heads.register_autograd(_pass_back, setup_context=_remember)
