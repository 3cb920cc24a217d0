"""Measure the FLOP/s of one large matrix product, an upper bound for the models."""

import torch

from benchmarks.timing import time_calls


def measure_matrix_flops_per_second(device: str, precision: str) -> float:
    side = 8192 if device == "cuda" else 1536
    dtype = getattr(torch, precision)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / min(time_calls(lambda: torch.matmul(left, right), device, 12))
