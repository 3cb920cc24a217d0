"""Time repeated calls, including the work on the device."""

import time
from collections.abc import Callable

import torch


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], device: str, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        wait_for(device)
        start = time.perf_counter()
        call()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return times
