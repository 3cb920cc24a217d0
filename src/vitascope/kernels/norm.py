"""Tokens -> Tokens of a steady size: RMSNorm and LayerNorm that read once and write the products' format once.

PyTorch's norms under autocast compute in float32, and each change of format is a pass over memory of its own. Here a
row is read, normalised in float32 and written. The backward pass computes the row's mean and size again.
"""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitascope.kernels.reduce import sum_partial_gradients

MAX_PROGRAMS = 1024  # each goes through many rows on the way back, and sums its share of the weight's gradient
TILE_ELEMENTS = 2048  # of a tile


@triton.jit
def _normalize_rows(x, inside, WIDTH: tl.constexpr, CENTRE: tl.constexpr, EPS: tl.constexpr):
    """Rows without their mean (for LayerNorm) times one over their size, and that factor."""
    if CENTRE:
        x = tl.where(inside, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + EPS)[:, None]
    return x * factor, factor


@triton.jit
def _norm_kernel(
    x, weight, bias, out, COUNT,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, CENTRE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    feature = tl.arange(0, TILE)[None, :]
    known, inside = feature < WIDTH, (row < COUNT) & (feature < WIDTH)
    here = tl.load(x + row * WIDTH + feature, mask=inside, other=0.0).to(tl.float32)
    here, _ = _normalize_rows(here, inside, WIDTH, CENTRE, EPS)
    here *= tl.load(weight + feature, mask=known, other=0.0)
    if CENTRE:
        here += tl.load(bias + feature, mask=known, other=0.0)
    tl.store(out + row * WIDTH + feature, here.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    gradient, x, weight, to_x, sums, COUNT, STEPS,
    WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, CENTRE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    feature = tl.arange(0, TILE)[None, :]
    known = feature < WIDTH
    scale = tl.load(weight + feature, mask=known, other=0.0)
    weight_sum, bias_sum = tl.zeros((ROWS, TILE), tl.float32), tl.zeros((ROWS, TILE), tl.float32)
    for step in range(STEPS):
        row = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < COUNT) & known
        place = row * WIDTH + feature
        here = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        steady, factor = _normalize_rows(here, inside, WIDTH, CENTRE, EPS)
        weight_sum += above * steady
        bias_sum += above
        above *= scale
        change = above - steady * (tl.sum(above * steady, 1) / WIDTH)[:, None]
        if CENTRE:
            change -= (tl.sum(above, 1) / WIDTH)[:, None]
        tl.store(to_x + place, (change * factor).to(to_x.dtype.element_ty), mask=inside)
    column = tl.arange(0, TILE)
    share = sums + tl.program_id(0) * (1 + CENTRE) * WIDTH + column
    tl.store(share, tl.sum(weight_sum, 0), mask=column < WIDTH)
    if CENTRE:
        tl.store(share + WIDTH, tl.sum(bias_sum, 0), mask=column < WIDTH)


@torch.library.custom_op("vitascope::norm", mutates_args=())
def layer_or_rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, output_dtype: torch.dtype) -> Tensor:
    """LayerNorm where there is a bias, else RMSNorm, over the last axis; written as `dtype`."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=output_dtype, device=x.device)
    width, tile, rows = _choose_tile(x)
    count = x.numel() // width
    _norm_kernel[(triton.cdiv(count, rows),)](x, weight, bias, out, count, width, tile, rows, bias is not None, eps)
    return out


@torch.library.custom_op("vitascope::norm_backward", mutates_args=())
def layer_or_rms_norm_backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, subtract_mean: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x and, in rows, of the weight and of the bias where there is one."""
    x, grad_output = x.contiguous(), grad_output.contiguous()
    width, tile, rows = _choose_tile(x)
    count = x.numel() // width
    programs = min(MAX_PROGRAMS, triton.cdiv(count, rows))
    to_x, sums = torch.empty_like(x), x.new_empty(programs, 1 + subtract_mean, width, dtype=torch.float32)
    steps = triton.cdiv(count, rows * programs)
    _norm_backward_kernel[(programs,)](
        grad_output, x, weight, to_x, sums, count, steps, width, tile, rows, subtract_mean, eps
    )
    return to_x, sum_partial_gradients(sums)


def _choose_tile(x: Tensor) -> tuple[int, int, int]:
    tile = triton.next_power_of_2(x.shape[-1])
    return x.shape[-1], tile, max(1, TILE_ELEMENTS // tile)


@layer_or_rms_norm.register_fake
def _(x, *rest):
    *_, dtype = rest
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@layer_or_rms_norm_backward.register_fake
def _(_, x, weight, centre, __):
    return x.new_empty(x.shape), x.new_empty(1 + centre, len(weight), dtype=torch.float32)


def _save_for_backward(ctx, inputs, output):
    del output
    x, weight, bias, ctx.eps, _ = inputs
    ctx.centre = bias is not None
    ctx.save_for_backward(x, weight)


def _compute_gradients(ctx, grad_output):
    to_x, sums = layer_or_rms_norm_backward(grad_output, *ctx.saved_tensors, ctx.centre, ctx.eps)
    return to_x, sums[0], sums[1] if ctx.centre else None, None, None


layer_or_rms_norm.register_autograd(_compute_gradients, setup_context=_save_for_backward)
