"""Tokens -> normalised Tokens: RMSNorm and LayerNorm with one read and one write, in the output dtype.

Under autocast, PyTorch's norms compute in float32, and each conversion is a separate pass over memory. This kernel
reads a row, normalises it in float32 and writes it. The backward pass recomputes the row's mean and standard deviation.
All kernels sum partial gradients with `sum_partial_gradients`.
"""

# Triton code is not typed Python.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitascope.kernels.launch import kernel_operator

MAX_PROGRAMS = 1024  # of the backward pass; each processes many rows and sums a partial gradient of the weight
TILE_ELEMENTS = 2048  # per tile
SUM_ROWS, SUM_COLUMNS = 256, 16  # of the tile of a program that sums: there are many partial gradients of few features


@triton.jit(do_not_specialize=["COUNT"])  # otherwise compiled again for the small counts of the second pass
def _sum_rows_kernel(partial_gradients, out, COUNT, WIDTH, ROWS_PER_PROGRAM: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.load(
        partial_gradients + row * WIDTH + column[None, :], mask=(row < COUNT) & (column < WIDTH)[None, :], other=0.0
    )
    tl.store(out + tl.program_id(1) * WIDTH + column, tl.sum(tile, 0), mask=column < WIDTH)


def sum_partial_gradients(partial_gradients: Tensor) -> Tensor:
    """(part, …) -> (…), float32: sum groups of SUM_ROWS parts, then the sums, in a fixed order (deterministic)."""
    if not len(partial_gradients):
        return partial_gradients.new_zeros(partial_gradients.shape[1:])
    while True:
        width, parts = partial_gradients[0].numel(), triton.cdiv(len(partial_gradients), SUM_ROWS)
        out = partial_gradients.new_empty(parts, *partial_gradients.shape[1:])
        _sum_rows_kernel[triton.cdiv(width, SUM_COLUMNS), parts](
            partial_gradients, out, len(partial_gradients), width, SUM_ROWS, SUM_COLUMNS
        )
        if parts == 1:
            return out[0]
        partial_gradients = out


@triton.jit
def _normalize_rows(x, inside, WIDTH: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, EPS: tl.constexpr):
    """Return rows, minus their mean for LayerNorm, times 1 / standard deviation (or RMS), and that factor."""
    if SUBTRACT_MEAN:
        x = tl.where(inside, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + EPS)[:, None]
    return x * factor, factor


@triton.jit
def _norm_kernel(
    x, weight, bias, out, COUNT,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    feature = tl.arange(0, TILE)[None, :]
    is_feature, inside = feature < WIDTH, (row < COUNT) & (feature < WIDTH)
    values = tl.load(x + row * WIDTH + feature, mask=inside, other=0.0).to(tl.float32)
    values, _ = _normalize_rows(values, inside, WIDTH, SUBTRACT_MEAN, EPS)
    values *= tl.load(weight + feature, mask=is_feature, other=0.0)
    if SUBTRACT_MEAN:
        values += tl.load(bias + feature, mask=is_feature, other=0.0)
    tl.store(out + row * WIDTH + feature, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    grad_output, x, weight, grad_x, sums, COUNT, STEPS,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    feature = tl.arange(0, TILE)[None, :]
    is_feature = feature < WIDTH
    scale = tl.load(weight + feature, mask=is_feature, other=0.0)
    weight_sum, bias_sum = tl.zeros((ROWS, TILE), tl.float32), tl.zeros((ROWS, TILE), tl.float32)
    for step in range(STEPS):
        row = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < COUNT) & is_feature
        offset = row * WIDTH + feature
        values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_output + offset, mask=inside, other=0.0).to(tl.float32)
        normalized, factor = _normalize_rows(values, inside, WIDTH, SUBTRACT_MEAN, EPS)
        weight_sum += grad * normalized
        bias_sum += grad
        grad *= scale
        change = grad - normalized * (tl.sum(grad * normalized, 1) / WIDTH)[:, None]
        if SUBTRACT_MEAN:
            change -= (tl.sum(grad, 1) / WIDTH)[:, None]
        tl.store(grad_x + offset, (change * factor).to(grad_x.dtype.element_ty), mask=inside)
    column = tl.arange(0, TILE)
    partial_sums = sums + tl.program_id(0) * (1 + SUBTRACT_MEAN) * WIDTH + column
    tl.store(partial_sums, tl.sum(weight_sum, 0), mask=column < WIDTH)
    if SUBTRACT_MEAN:
        tl.store(partial_sums + WIDTH, tl.sum(bias_sum, 0), mask=column < WIDTH)


@kernel_operator("vitascope::layer_or_rms_norm")
def layer_or_rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, output_dtype: torch.dtype) -> Tensor:
    """Apply LayerNorm if there is a bias, else RMSNorm, over the last axis; the result has `output_dtype`."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=output_dtype, device=x.device)
    width, tile, rows = _choose_width_tile_and_rows(x)
    count = x.numel() // width
    _norm_kernel[(triton.cdiv(count, rows),)](x, weight, bias, out, count, width, tile, rows, bias is not None, eps)
    return out


@kernel_operator("vitascope::layer_or_rms_norm_backward")
def layer_or_rms_norm_backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, subtract_mean: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, as rows, of the weight and of the bias if there is one."""
    x, grad_output = x.contiguous(), grad_output.contiguous()
    width, tile, rows = _choose_width_tile_and_rows(x)
    count = x.numel() // width
    programs = min(MAX_PROGRAMS, triton.cdiv(count, rows))
    grad_x, sums = torch.empty_like(x), x.new_empty(programs, 1 + subtract_mean, width, dtype=torch.float32)
    steps = triton.cdiv(count, rows * programs)
    _norm_backward_kernel[(programs,)](
        grad_output, x, weight, grad_x, sums, count, steps, width, tile, rows, subtract_mean, eps
    )
    return grad_x, sum_partial_gradients(sums)


class NormTile(NamedTuple):
    """Size of a program's tile."""

    width: int  # features
    padded_width: int  # the next power of two
    num_rows: int


def _choose_width_tile_and_rows(x: Tensor) -> NormTile:
    padded_width = triton.next_power_of_2(x.shape[-1])
    return NormTile(x.shape[-1], padded_width, max(1, TILE_ELEMENTS // padded_width))


@layer_or_rms_norm.register_fake
def _fake_norm(x: Tensor, *args: Any) -> Tensor:
    *_, output_dtype = args
    return torch.empty(x.shape, dtype=output_dtype, device=x.device)


@layer_or_rms_norm_backward.register_fake
def _fake_norm_backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, subtract_mean: bool, eps: float
) -> tuple[Tensor, Tensor]:
    del grad_output, eps
    return x.new_empty(x.shape), x.new_empty(1 + subtract_mean, len(weight), dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    x, weight, bias, ctx.eps, _ = inputs
    ctx.subtract_mean = bias is not None
    ctx.save_for_backward(x, weight)


def _compute_gradients(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, sums = layer_or_rms_norm_backward(grad_output, *ctx.saved_tensors, ctx.subtract_mean, ctx.eps)
    return grad_x, sums[0], sums[1] if ctx.subtract_mean else None, None, None


layer_or_rms_norm.register_autograd(_compute_gradients, setup_context=_save_for_backward)
