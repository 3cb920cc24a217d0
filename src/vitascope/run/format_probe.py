"""Measure the speed of a number format relative to float32 on this CPU, in a separate process.

Some virtual machines list CPU instructions and then stop a program that uses them, so the caller must not try them.
"""

import subprocess
import sys
import time
from functools import cache
from statistics import median
from typing import Literal

TIMEOUT_SECONDS = 60
NUM_ROUNDS = 12
NumberFormat = Literal["int8", "bfloat16"]
ProbeTask = Literal["train", "inference"]
MAX_SLOWDOWN = 3  # times slower than float32: stop after two rounds


@cache
def measure_bf16_training_speedup() -> float:
    """Return the speed-up of bfloat16 in training; 0 if it does not work."""
    return _measure_speedup_in_subprocess("bfloat16", "train")


def measure_median_bf16_speedup(num_runs: int = 3) -> float:
    """Return the median speed-up of several runs, because a single run on a busy machine can be far off."""
    return median(_measure_speedup_in_subprocess("bfloat16", "train") for _ in range(num_runs))


@cache
def measure_inference_speedup(number_format: NumberFormat, embed_dim: int, num_threads: int) -> float:
    """Return the speed-up of int8 or bfloat16 at inference for this width; 0 if it does not work."""
    return _measure_speedup_in_subprocess(number_format, "inference", str(embed_dim), str(num_threads))


def _measure_speedup_in_subprocess(*args: str) -> float:
    """Run this file with these arguments and return the speed-up that it prints; 0 if it fails."""
    try:
        process = subprocess.run(
            [sys.executable, __file__, *args], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
        return float(process.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def _measure_linear_layer_speedup(
    number_format: NumberFormat, task: ProbeTask, embed_dim: int = 256, num_threads: int = 0
) -> float:
    """Time a linear layer in float32 and in the other format; return the median ratio of the times."""
    import torch

    if num_threads:
        torch.set_num_threads(num_threads)
    float32_layer, tokens = torch.nn.Linear(embed_dim, 4 * embed_dim), torch.randn(2048, embed_dim)
    if task == "train":
        bf16_layer, bf16_tokens = torch.nn.Linear(embed_dim, 4 * embed_dim).bfloat16(), tokens.bfloat16()
        steps = [lambda: float32_layer(tokens).sum().backward(), lambda: bf16_layer(bf16_tokens).sum().backward()]
    elif number_format == "int8":
        from vitascope.model.precision import Int8Linear

        int8_layer = Int8Linear(float32_layer)
        steps = [lambda: float32_layer(tokens), lambda: int8_layer(tokens)]
    else:
        bf16_layer = torch.nn.Linear(embed_dim, 4 * embed_dim).bfloat16()
        steps = [lambda: float32_layer(tokens), lambda: bf16_layer(tokens.bfloat16()).float()]
    times: list[list[float]] = [[], []]
    with torch.set_grad_enabled(task == "train"):
        for round_index in range(NUM_ROUNDS):
            if round_index > 1 and min(times[1]) > MAX_SLOWDOWN * min(times[0]):
                break
            for run_step, step_times in zip(steps, times, strict=True):  # alternate, so that both have the same noise
                start = time.perf_counter()
                run_step()
                step_times.append(time.perf_counter() - start)
    # The median of paired rounds: a disturbance affects both steps of a round.
    return median(float32 / other for float32, other in zip(*times, strict=True))


if __name__ == "__main__":
    number_format, task, *sizes = sys.argv[1:]
    print(_measure_linear_layer_speedup(number_format, task, *map(int, sizes)))  # pyright: ignore[reportArgumentType]
