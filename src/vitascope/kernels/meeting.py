"""Queries and keys of a head -> as they meet: brought to one size (QK-norm) and turned (rotary positions), and back.

They are read as pairs of features, two bfloat16 numbers in one 32-bit word: the rotation turns pairs, and a product
over all features is the sum of the products over the pairs' first and second features. For the kernels beside it.
"""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from vitascope.kernels import INTERPRETED

# What products are made of. Triton's interpreter, with which the tests run this on a CPU, cannot multiply bfloat16.
FACTOR = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)


@triton.jit
def unpack(pairs):
    """A 32-bit word -> its two bfloat16 numbers, as float32: bfloat16 is float32's upper half."""
    return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack(first, second):
    low = first.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return (second.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low


@triton.jit
def _size(first, second, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """One over the root mean square of each token's features."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / WIDTH + EPS)[:, None]


@triton.jit
def prepare(
    first, second, weight, cosine, sine, TIMES: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Queries or keys as they meet: normalised, turned, times a factor."""
    if NORM:
        pair = tl.arange(0, WIDTH // 2)[None, :]
        size = _size(first, second, WIDTH, EPS)
        first, second = (
            first * size * tl.load(weight + 2 * pair),
            second * size * tl.load(weight + 2 * pair + 1),
        )
    if ROTARY:
        first, second = first * cosine - second * sine, second * cosine + first * sine
    return (first * TIMES).to(FACTOR), (second * TIMES).to(FACTOR)


@triton.jit
def prepare_backward(
    to_first, to_second, first, second, weight, to_weight, cosine, sine,
    WIDTH: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The way back: turned the other way, and through the norm, whose weight's share is stored."""
    if ROTARY:
        to_first, to_second = to_first * cosine + to_second * sine, to_second * cosine - to_first * sine
    if NORM:
        pair = tl.arange(0, WIDTH // 2)
        size = _size(first, second, WIDTH, EPS)
        first, second = first * size, second * size
        tl.store(to_weight + 2 * pair, tl.sum(to_first * first, 0))
        tl.store(to_weight + 2 * pair + 1, tl.sum(to_second * second, 0))
        to_first = to_first * tl.load(weight + 2 * pair)[None, :]
        to_second = to_second * tl.load(weight + 2 * pair + 1)[None, :]
        along = ((tl.sum(to_first * first, 1) + tl.sum(to_second * second, 1)) / WIDTH)[:, None]
        to_first, to_second = size * (to_first - first * along), size * (to_second - second * along)
    return to_first, to_second


def tables_of(rotation: Tensor | None) -> int:
    """How many: one per image, or one for all."""
    return rotation.shape[1] if rotation is not None and rotation.ndim == 5 else 1
