"""This CPU -> how many times faster a number format is than float32, measured in a process of its own.

Some virtual machines announce instructions and then stop the program that uses them, so the attempt must not be made in
the process that wants to know.
"""

import subprocess
import sys
import time
from functools import cache

SECONDS = 60
ROUNDS = 12
HOPELESS = 3  # times slower than float32 once warm: two rounds say enough


@cache
def bf16_speedup() -> float:
    """Of bfloat16 in training; 0 where it does not work here."""
    return _asked("bfloat16", "train")


@cache
def answering_speedup(form: str, width: int, threads: int) -> float:
    """Of int8 or bfloat16 products when a model of this width answers; 0 where they do not work here."""
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
            for way, taken in zip(ways, times, strict=True):  # in turns: both meet the same noise
                start = time.perf_counter()
                way()
                taken.append(time.perf_counter() - start)
    return min(times[0]) / min(times[1])


if __name__ == "__main__":
    form, task, *numbers = sys.argv[1:]
    print(_measure(form, task, *map(int, numbers)))
