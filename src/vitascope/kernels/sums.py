"""What many programs found -> its sum: a weight's gradient, of which each program of a kernel has stored its share."""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

SHARES, COLUMNS = 256, 16  # of a program's tile: the shares are many, a weight's features few


@triton.jit(do_not_specialize=["COUNT"])  # else compiled twice: the sums of the sums are few
def _sum(shares, out, COUNT, WIDTH, SHARES: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1) * SHARES + tl.arange(0, SHARES)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    own = tl.load(shares + row * WIDTH + column[None, :], mask=(row < COUNT) & (column < WIDTH)[None, :], other=0.0)
    tl.store(out + tl.program_id(1) * WIDTH + column, tl.sum(own, 0), mask=column < WIDTH)


def sum_shares(shares: Tensor) -> Tensor:
    """(share, …) -> (…), float32, always in the same order: sums of so many shares, then of those sums."""
    if not len(shares):
        return shares.new_zeros(shares.shape[1:])
    while True:
        width, parts = shares[0].numel(), triton.cdiv(len(shares), SHARES)
        out = shares.new_empty(parts, *shares.shape[1:])
        _sum[triton.cdiv(width, COLUMNS), parts](shares, out, len(shares), width, SHARES, COLUMNS)
        if parts == 1:
            return out[0]
        shares = out
