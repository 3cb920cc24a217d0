"""Tokens -> Tokens: the MLP with squared ReLU, bending the hidden layer where the product is made.

For training the product with the first matrix writes the bent hidden layer at once, and nothing else is kept: from
a = relu(h)² the derivative 2·relu(h) = 2·√a comes back. On the way back the product with the second matrix is
multiplied by it before it is written, and its sums over tokens, the bias's gradient, are taken while it is there.
Without gradients, and where a token's features fit, the hidden layer never leaves the chip.
"""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from vitascope.kernels.reduce import sum_partial_gradients

ROWS, COLUMNS, FEATURES_PER_STEP = 128, 128, 64  # of a tile: tokens, hidden features, and features at a time
ON_CHIP_WIDTHS = (128, 256)  # widths for which a tile of tokens stays in registers
HIDDEN_PER_STEP = 64  # hidden features at a time there


@triton.jit
def _linear_relu2_kernel(
    tokens, weight, bias, out, COUNT,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """relu(tokens · weightᵀ + bias)², a tile."""
    row = (tl.program_id(0) // (WIDE // COLUMNS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % (WIDE // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEEP)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, DEEP):
        left = tl.load(tokens + row * WIDTH + start + deep, mask=row < COUNT, other=0.0)
        right = tl.load(weight + column[:, None] * WIDTH + start + deep)
        total = tl.dot(left, tl.trans(right), total)
    if BIAS:
        total += tl.load(bias + column)[None, :]
    total = tl.maximum(total, 0.0)
    tl.store(out + row * WIDE + column[None, :], (total * total).to(out.dtype.element_ty), mask=row < COUNT)


@triton.jit
def _linear_relu2_backward_kernel(
    gradient, weight, bent, out, sums, COUNT,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """(gradient · weight) · 2√bent, a tile, and for a bias its sum over the tile's tokens."""
    tile = tl.program_id(0) // (WIDE // COLUMNS)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % (WIDE // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEEP)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, DEEP):
        left = tl.load(gradient + row * WIDTH + start + deep[None, :], mask=row < COUNT, other=0.0)
        right = tl.load(weight + (start + deep[:, None]) * WIDE + column[None, :])
        total = tl.dot(left, right, total)
    place = row * WIDE + column[None, :]
    total *= 2.0 * tl.sqrt(tl.load(bent + place, mask=row < COUNT, other=0.0).to(tl.float32))
    tl.store(out + place, total.to(out.dtype.element_ty), mask=row < COUNT)
    if BIAS:
        tl.store(sums + tile * WIDE + column, tl.sum(total, 0))


@triton.jit
def _on_chip_mlp_kernel(
    tokens, weight1, bias1, weight2, bias2, out, COUNT,
    WIDE: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Both products for a tile of tokens; the hidden layer comes and goes, a few features at a time."""
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
    """(…, width) -> (…, width); matrices output × input as in nn.Linear, of any precision."""
    rows = tokens.reshape(-1, tokens.shape[-1]).contiguous()
    first, second = weight1.to(rows.dtype), weight2.to(rows.dtype)
    if not torch.is_grad_enabled() and rows.shape[1] in ON_CHIP_WIDTHS:
        return relu2_mlp_on_chip(rows, first, bias1, second, bias2).view(tokens.shape)
    return relu2_mlp_with_hidden(rows, first, bias1, second, bias2)[0].view(tokens.shape)


@torch.library.custom_op("vitascope::relu2_mlp_on_chip", mutates_args=())
def relu2_mlp_on_chip(
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
    _on_chip_mlp_kernel[(triton.cdiv(count, ROWS),)](
        tokens, weight1, bias1, weight2, bias2, out, count, num_warps=8, num_stages=2, **settings
    )
    return out


@torch.library.custom_op("vitascope::relu2_mlp", mutates_args=())
def relu2_mlp_with_hidden(
    tokens: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, and the bent hidden layer for the way back."""
    (count, width), wide = tokens.shape, weight1.shape[0]
    bent = tokens.new_empty(count, wide)
    tile = {
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "DEEP": FEATURES_PER_STEP,
        "num_warps": 4,
        "num_stages": 2 if width <= 256 else 3,
    }
    _linear_relu2_kernel[_compute_launch_grid(count, wide)](
        tokens, weight1, bias1, bent, count, wide, width, bias1 is not None, **tile
    )
    return F.linear(bent, weight2, None if bias2 is None else bias2.to(tokens.dtype)), bent


@torch.library.custom_op("vitascope::relu2_mlp_backward", mutates_args=())
def relu2_hidden_backward(
    grad_output: Tensor, hidden: Tensor, weight2: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the hidden layer before it was bent, and of its bias where it has one."""
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


@relu2_mlp_on_chip.register_fake
def _(rows, *_):
    return torch.empty_like(rows)


@relu2_mlp_with_hidden.register_fake
def _(rows, first, *_):
    return torch.empty_like(rows), rows.new_empty(rows.shape[0], first.shape[0])


@relu2_hidden_backward.register_fake
def _(_, bent, *__):
    return torch.empty_like(bent), bent.new_empty(bent.shape[1], dtype=torch.float32)


def _save_for_backward(ctx, inputs, output):
    rows, first, bias1, second, bias2 = inputs
    ctx.biases = bias1 is not None, bias2 is not None
    ctx.set_materialize_grads(False)  # nobody asks for the hidden layer's
    ctx.save_for_backward(rows, first, second, output[1])


def _compute_gradients(ctx, grad_output, _):
    rows, first, second, bent = ctx.saved_tensors
    grad_output = grad_output.contiguous()
    hidden, bias1 = relu2_hidden_backward(grad_output, bent, second, ctx.biases[0])
    bias2 = grad_output.sum(0, dtype=torch.float32) if ctx.biases[1] else None
    return hidden @ first, hidden.T @ rows, bias1 if ctx.biases[0] else None, grad_output.T @ bent, bias2


relu2_mlp_with_hidden.register_autograd(_compute_gradients, setup_context=_save_for_backward)
