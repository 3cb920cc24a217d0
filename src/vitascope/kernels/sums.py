"""What many programs found -> its sum: a weight's gradient, of which each program of a kernel has stored its share."""

# Triton's language is not Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARES, COLUMNS = 256, 16  # of a program's tile: the shares are many, a weight's features few


@triton.jit
def _sum(shares, out, COUNT, WIDTH, SHARES: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((SHARES, COLUMNS), tl.float32)
    for start in range(0, COUNT, SHARES):
        row = start + tl.arange(0, SHARES)[:, None]
        total += tl.load(shares + row * WIDTH + column, mask=(row < COUNT) & (column < WIDTH), other=0.0)
    whole = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + whole, tl.sum(total, 0), mask=whole < WIDTH)


def sum_shares(shares: Tensor) -> Tensor:
    """(share, …) -> (…), float32, always in the same order."""
    out = torch.empty_like(shares[0]) if len(shares) else shares.new_zeros(shares.shape[1:])
    if len(shares):
        grid = (triton.cdiv(out.numel(), COLUMNS),)
        _sum[grid](shares, out, len(shares), out.numel(), SHARES, COLUMNS)
    return out
