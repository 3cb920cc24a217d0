"""A device -> the FLOP/s of one large matrix product: what nothing made of products can pass."""

import time

import torch


def matrix_rate(device: str, precision: str) -> float:
    side = 8192 if device == "cuda" else 1536
    dtype = getattr(torch, precision)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.matmul(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * side**3 / min(times)
