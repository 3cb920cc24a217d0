"""Measure the speed of a number format relative to float32 on this CPU, in a separate process.

Some virtual machines list CPU instructions and then stop a program that uses them, so the caller must not try them.
"""

import subprocess
import sys
import time
from functools import cache

SECONDS = 60
ROUNDS = 12
HOPELESS = 3  # times slower than float32: stop after two rounds


@cache
def bf16_speedup() -> float:
    """Return the speed-up of bfloat16 in training; 0 if it does not work."""
    return _asked("bfloat16", "train")


@cache
def answering_speedup(form: str, width: int, threads: int) -> float:
    """Return the speed-up of int8 or bfloat16 at inference for this width; 0 if it does not work."""
    return _asked(form, "answer", str(width), str(threads))


def _asked(*words: str) -> float:
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, timeout=SECONDS, check=True
        )
        return float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def _measure(form: str, task: str, width: int = 256, threads: int = 0) -> float:
    import torch

    if threads:
        torch.set_num_threads(threads)
    plain, tokens = torch.nn.Linear(width, 4 * width), torch.randn(2048, width)
    if task == "train":
        narrow, narrow_tokens = torch.nn.Linear(width, 4 * width).bfloat16(), tokens.bfloat16()
        ways = [lambda: plain(tokens).sum().backward(), lambda: narrow(narrow_tokens).sum().backward()]
    elif form == "int8":
        from vitascope.model.int8 import Int8Linear

        small = Int8Linear(plain)
        ways = [lambda: plain(tokens), lambda: small(tokens)]
    else:
        narrow = torch.nn.Linear(width, 4 * width).bfloat16()
        ways = [lambda: plain(tokens), lambda: narrow(tokens.bfloat16()).float()]
    times: list[list[float]] = [[], []]
    with torch.set_grad_enabled(task == "train"):
        for done in range(ROUNDS):
            if done > 1 and min(times[1]) > HOPELESS * min(times[0]):
                break
            for way, taken in zip(ways, times, strict=True):  # alternate, so that both have the same noise
                start = time.perf_counter()
                way()
                taken.append(time.perf_counter() - start)
    return min(times[0]) / min(times[1])


if __name__ == "__main__":
    form, task, *numbers = sys.argv[1:]
    print(_measure(form, task, *map(int, numbers)))
