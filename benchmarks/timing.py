"""Time repeated calls, including the work on the device."""

import time
from collections.abc import Callable

import torch


def synchronize_device(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_calls(call: Callable[[], object], device: str, num_repeats: int) -> list[float]:
    times = []
    for _ in range(num_repeats):
        synchronize_device(device)
        start = time.perf_counter()
        call()
        synchronize_device(device)
        times.append(time.perf_counter() - start)
    return times
