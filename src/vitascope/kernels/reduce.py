"""Sum the partial gradients of a weight that the programs of a kernel have stored."""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 256, 16  # of a program's tile: there are many partial gradients of few features


@triton.jit(do_not_specialize=["COUNT"])  # otherwise compiled again for the small counts of the second pass
def _sum_rows_kernel(partial_gradients, out, COUNT, WIDTH, ROWS_PER_PROGRAM: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.load(
        partial_gradients + row * WIDTH + column[None, :], mask=(row < COUNT) & (column < WIDTH)[None, :], other=0.0
    )
    tl.store(out + tl.program_id(1) * WIDTH + column, tl.sum(tile, 0), mask=column < WIDTH)


def sum_partial_gradients(partial_gradients: Tensor) -> Tensor:
    """(part, …) -> (…), float32: sum groups of ROWS parts, then the sums, always in the same order (deterministic)."""
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
