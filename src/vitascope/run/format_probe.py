"""Measure the speed of a number format relative to float32 on this CPU, in a separate process.

Some virtual machines list CPU instructions and then stop a program that uses them, so the caller must not try them.
"""

import subprocess
import sys
import time
from functools import cache

TIMEOUT_SECONDS = 60
NUM_ROUNDS = 12
MAX_SLOWDOWN = 3  # times slower than float32: stop after two rounds


@cache
def measure_bf16_speedup() -> float:
    """Return the speed-up of bfloat16 in training; 0 if it does not work."""
    return _run_probe_process("bfloat16", "train")


@cache
def measure_inference_speedup(number_format: str, embed_dim: int, num_threads: int) -> float:
    """Return the speed-up of int8 or bfloat16 at inference for this width; 0 if it does not work."""
    return _run_probe_process(number_format, "answer", str(embed_dim), str(num_threads))


def _run_probe_process(*args: str) -> float:
    try:
        done = subprocess.run(
            [sys.executable, __file__, *args], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
        return float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def _measure_speedup(number_format: str, task: str, embed_dim: int = 256, num_threads: int = 0) -> float:
    import torch

    if num_threads:
        torch.set_num_threads(num_threads)
    plain, tokens = torch.nn.Linear(embed_dim, 4 * embed_dim), torch.randn(2048, embed_dim)
    if task == "train":
        narrow, narrow_tokens = torch.nn.Linear(embed_dim, 4 * embed_dim).bfloat16(), tokens.bfloat16()
        ways = [lambda: plain(tokens).sum().backward(), lambda: narrow(narrow_tokens).sum().backward()]
    elif number_format == "int8":
        from vitascope.model.int8 import Int8Linear

        small = Int8Linear(plain)
        ways = [lambda: plain(tokens), lambda: small(tokens)]
    else:
        narrow = torch.nn.Linear(embed_dim, 4 * embed_dim).bfloat16()
        ways = [lambda: plain(tokens), lambda: narrow(tokens.bfloat16()).float()]
    times: list[list[float]] = [[], []]
    with torch.set_grad_enabled(task == "train"):
        for done in range(NUM_ROUNDS):
            if done > 1 and min(times[1]) > MAX_SLOWDOWN * min(times[0]):
                break
            for way, taken in zip(ways, times, strict=True):  # alternate, so that both have the same noise
                start = time.perf_counter()
                way()
                taken.append(time.perf_counter() - start)
    return min(times[0]) / min(times[1])


if __name__ == "__main__":
    form, task, *numbers = sys.argv[1:]
    print(_measure_speedup(form, task, *map(int, numbers)))
