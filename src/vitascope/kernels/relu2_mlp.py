"""Tokens -> Tokens: the MLP with squared ReLU, fused with its matrix products.

In training, the first product applies the activation before it writes the hidden layer. Only a = relu(h)² is stored:
its derivative is 2·relu(h) = 2·√a. The backward pass multiplies the product with the second matrix by it, writes it,
and sums it over tokens for the gradient of the bias. Without gradients, and for small widths, the hidden layer stays on
the chip.
"""

# Triton code is not typed Python.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vitascope.kernels.launch import kernel_operator
from vitascope.kernels.norm import sum_partial_gradients

ROWS, COLUMNS, FEATURES_PER_STEP = 128, 128, 64  # of a tile: tokens, hidden features, and features per step
ON_CHIP_WIDTHS = (128, 256)  # widths for which a tile of tokens stays in registers
HIDDEN_PER_STEP = 64  # hidden features per step of the on-chip kernel


@triton.jit
def _linear_relu2_kernel(
    tokens, weight, bias, out, COUNT,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of relu(tokens · weightᵀ + bias)²."""
    row = (tl.program_id(0) // (WIDE // COLUMNS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % (WIDE // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    feature_step = tl.arange(0, DEEP)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, DEEP):
        left_tile = tl.load(tokens + row * WIDTH + start + feature_step, mask=row < COUNT, other=0.0)
        right_tile = tl.load(weight + column[:, None] * WIDTH + start + feature_step)
        total = tl.dot(left_tile, tl.trans(right_tile), total)
    if BIAS:
        total += tl.load(bias + column)[None, :]
    total = tl.maximum(total, 0.0)
    tl.store(out + row * WIDE + column[None, :], (total * total).to(out.dtype.element_ty), mask=row < COUNT)


@triton.jit
def _linear_relu2_backward_kernel(
    gradient, weight, hidden, out, sums, COUNT,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of (gradient · weight) · 2√hidden and, for the bias, its sum over the tile's tokens."""
    tile = tl.program_id(0) // (WIDE // COLUMNS)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % (WIDE // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    feature_step = tl.arange(0, DEEP)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, DEEP):
        left_tile = tl.load(gradient + row * WIDTH + start + feature_step[None, :], mask=row < COUNT, other=0.0)
        right_tile = tl.load(weight + (start + feature_step[:, None]) * WIDE + column[None, :])
        total = tl.dot(left_tile, right_tile, total)
    offset = row * WIDE + column[None, :]
    total *= 2.0 * tl.sqrt(tl.load(hidden + offset, mask=row < COUNT, other=0.0).to(tl.float32))
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=row < COUNT)
    if BIAS:
        tl.store(sums + tile * WIDE + column, tl.sum(total, 0))


@triton.jit
def _fused_relu2_mlp_kernel(
    tokens, weight1, bias1, weight2, bias2, out, COUNT,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Compute both products for a tile of tokens, HIDDEN hidden features at a time, without storing them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    feature, some = tl.arange(0, WIDTH), tl.arange(0, HIDDEN)
    here = tl.load(tokens + row * WIDTH + feature[None, :], mask=row < COUNT, other=0.0)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, WIDE, HIDDEN):
        up = tl.load(weight1 + (start + some[:, None]) * WIDTH + feature[None, :])
        hidden = tl.dot(here, tl.trans(up))
        if BIAS:
            hidden += tl.load(bias1 + start + some)[None, :]
        hidden = tl.maximum(hidden, 0.0)
        down = tl.load(weight2 + feature[:, None] * WIDE + start + some[None, :])
        total = tl.dot((hidden * hidden).to(here.dtype), tl.trans(down), total)
    if BIAS:
        total += tl.load(bias2 + feature)[None, :]
    tl.store(out + row * WIDTH + feature[None, :], total.to(out.dtype.element_ty), mask=row < COUNT)


def relu2_mlp(tokens: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    """(…, width) -> (…, width). Weights are output × input as in nn.Linear, in any dtype."""
    rows = tokens.reshape(-1, tokens.shape[-1]).contiguous()
    first, second = weight1.to(rows.dtype), weight2.to(rows.dtype)
    if not torch.is_grad_enabled() and rows.shape[1] in ON_CHIP_WIDTHS:
        return relu2_mlp_without_storing_hidden(rows, first, bias1, second, bias2).view(tokens.shape)
    return relu2_mlp_with_hidden(rows, first, bias1, second, bias2)[0].view(tokens.shape)


@kernel_operator("vitascope::relu2_mlp_on_chip")
def relu2_mlp_without_storing_hidden(
    tokens: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    out, (count, width) = torch.empty_like(tokens), tokens.shape
    settings = {
        "WIDE": weight1.shape[0],
        "WIDTH": width,
        "BIAS": bias1 is not None,
        "ROWS": ROWS,
        "HIDDEN": HIDDEN_PER_STEP,
    }
    _fused_relu2_mlp_kernel[(triton.cdiv(count, ROWS),)](
        tokens, weight1, bias1, weight2, bias2, out, count, num_warps=8, num_stages=2, **settings
    )
    return out


@kernel_operator("vitascope::relu2_mlp")
def relu2_mlp_with_hidden(
    tokens: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output, and the hidden layer after the activation for the backward pass."""
    (count, width), wide = tokens.shape, weight1.shape[0]
    hidden = tokens.new_empty(count, wide)
    tile = {
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "DEEP": FEATURES_PER_STEP,
        "num_warps": 4,
        "num_stages": 2 if width <= 256 else 3,
    }
    _linear_relu2_kernel[_compute_launch_grid(count, wide)](
        tokens, weight1, bias1, hidden, count, wide, width, bias1 is not None, **tile
    )
    return F.linear(hidden, weight2, None if bias2 is None else bias2.to(tokens.dtype)), hidden


@kernel_operator("vitascope::relu2_mlp_backward")
def relu2_hidden_backward(
    grad_output: Tensor, hidden: Tensor, weight2: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the hidden layer before the activation, and of its bias if it has one."""
    (count, wide), width = hidden.shape, weight2.shape[0]
    tiles = triton.cdiv(count, ROWS) if has_bias else 0
    out, sums = torch.empty_like(hidden), hidden.new_empty(tiles, wide, dtype=torch.float32)
    _linear_relu2_backward_kernel[_compute_launch_grid(count, wide)](
        grad_output,
        weight2,
        hidden,
        out,
        sums,
        count,
        wide,
        width,
        has_bias,
        ROWS,
        COLUMNS,
        FEATURES_PER_STEP,
        num_warps=4,
        num_stages=3,
    )
    return out, sum_partial_gradients(sums)


def _compute_launch_grid(num_tokens: int, hidden_width: int) -> tuple[int]:
    return (triton.cdiv(num_tokens, ROWS) * (hidden_width // COLUMNS),)


@relu2_mlp_without_storing_hidden.register_fake
def _fake_mlp_on_chip(tokens: Tensor, *args: Any) -> Tensor:
    del args
    return torch.empty_like(tokens)


@relu2_mlp_with_hidden.register_fake
def _fake_mlp_with_hidden(tokens: Tensor, weight1: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    del args
    return torch.empty_like(tokens), tokens.new_empty(tokens.shape[0], weight1.shape[0])


@relu2_hidden_backward.register_fake
def _fake_hidden_backward(grad_output: Tensor, hidden: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    del grad_output, args
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[1], dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, weight1, bias1, weight2, bias2 = inputs
    ctx.has_biases = bias1 is not None, bias2 is not None
    ctx.set_materialize_grads(False)  # the gradient of the hidden output is not used
    ctx.save_for_backward(tokens, weight1, weight2, output[1])


def _compute_gradients(ctx: Any, grad_output: Tensor, grad_hidden_output: Tensor | None) -> tuple[Tensor | None, ...]:
    del grad_hidden_output
    tokens, weight1, weight2, hidden = ctx.saved_tensors
    grad_output = grad_output.contiguous()
    grad_hidden, grad_bias1 = relu2_hidden_backward(grad_output, hidden, weight2, ctx.has_biases[0])
    grad_bias2 = grad_output.sum(0, dtype=torch.float32) if ctx.has_biases[1] else None
    return (
        grad_hidden @ weight1,
        grad_hidden.T @ tokens,
        grad_bias1 if ctx.has_biases[0] else None,
        grad_output.T @ hidden,
        grad_bias2,
    )


relu2_mlp_with_hidden.register_autograd(_compute_gradients, setup_context=_save_for_backward)
