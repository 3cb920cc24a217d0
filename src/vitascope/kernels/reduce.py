"""What many programs found -> its sum: a weight's gradient, of which each program of a kernel has stored its share."""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 256, 16  # of a program's tile: the shares are many, a weight's features few


@triton.jit(do_not_specialize=["COUNT"])  # else compiled twice: the sums of the sums are few
def _sum_rows_kernel(shares, out, COUNT, WIDTH, SHARES: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1) * SHARES + tl.arange(0, SHARES)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.load(shares + row * WIDTH + column[None, :], mask=(row < COUNT) & (column < WIDTH)[None, :], other=0.0)
    tl.store(out + tl.program_id(1) * WIDTH + column, tl.sum(own, 0), mask=column < WIDTH)


def sum_partial_gradients(partial_gradients: Tensor) -> Tensor:
    """(share, …) -> (…), float32, always in the same order: sums of so many shares, then of those sums."""
    if not len(partial_gradients):
        return partial_gradients.new_zeros(partial_gradients.shape[1:])
    while True:
        width, parts = partial_gradients[0].numel(), triton.cdiv(len(partial_gradients), ROWS)
        out = partial_gradients.new_empty(parts, *partial_gradients.shape[1:])
        _sum_rows_kernel[triton.cdiv(width, COLUMNS), parts](
            partial_gradients, out, len(partial_gradients), width, ROWS, COLUMNS
        )
        if parts == 1:
            return out[0]
        partial_gradients = out
