"""Measure time and peak memory of attention on this machine, for the explicit and the fused version.

Sheet D, question 8: explicit, time and memory grow with the square of the number of tokens. The fused kernel also has
quadratic time, but its memory grows linearly.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vitascope.draw.curves import CurvesByName, draw_log_log_curves
from vitascope.model.precision import disable_tf32
from vitascope.model.scaled_dot_product import attend, attend_fused

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"written out": attend, "fused": attend_fused}
LABELS = {"written out": "explicit", "fused": "fused"}  # for tables and figures; the keys are also in stored results
TOKEN_COUNTS = (64, 128, 256, 512, 1024, 2048, 4096)
GPU_TOKEN_COUNTS = (512, 1024, 2048, 4096, 8192, 16384)  # below 4096, launch overhead dominates on a large GPU
CAPTION = (
    "Forward pass of attention alone, batch 1, float32. Explicit attention stores the attention maps. The fused kernel "
    "computes the same result without storing them."
)
THEORY = (
    "In theory, time grows with tokens². Memory grows with tokens² (explicit) or with tokens (fused). Times vary when "
    "other programs run; repeat on an idle machine."
)


@dataclass(frozen=True)
class AttentionCost:
    """One measurement: the time of the fastest call, and the peak memory without the inputs."""

    way: str
    tokens: int
    seconds: float
    peak_bytes: int


def choose_token_counts_to_measure(num_heads: int, device: str = "cpu") -> tuple[int, ...]:
    """Enough tokens to show quadratic growth. On a GPU: only counts whose maps fit three times in free memory."""
    if not device.startswith("cuda"):
        return TOKEN_COUNTS
    free = torch.cuda.mem_get_info()[0]
    return tuple(count for count in GPU_TOKEN_COUNTS if 3 * 4 * num_heads * count**2 < free)


def measure_attention_costs(
    num_heads: int, head_width: int, token_counts: tuple[int, ...], device: str = "cpu"
) -> list[AttentionCost]:
    """Measure the forward pass, batch 1, float32, for each implementation and token count."""
    costs = []
    with disable_tf32():
        for tokens in token_counts:
            query, key, value = torch.randn(3, 1, num_heads, tokens, head_width, device=device)
            for implementation, function in IMPLEMENTATIONS.items():
                call = partial(function, query, key, value)
                seconds, peak_bytes = _measure_fastest_call_seconds(call, device), _measure_peak_bytes(call, device)
                costs.append(AttentionCost(implementation, tokens, seconds, peak_bytes))
    return costs


def measure_projection_and_attention_seconds(
    num_images: int, num_tokens: int, *, embed_dim: int, num_heads: int, device: str = "cpu"
) -> dict[str, float]:
    """Measure the seconds of a forward pass in float32: the four projections, and both versions of attention."""
    tokens = torch.randn(num_images, num_tokens, embed_dim, device=device)
    layers = [
        torch.nn.Linear(embed_dim, 3 * embed_dim, device=device),
        torch.nn.Linear(embed_dim, embed_dim, device=device),
    ]
    query, key, value = torch.randn(3, num_images, num_heads, num_tokens, embed_dim // num_heads, device=device)
    with disable_tf32():
        seconds = {
            "the four projections": _measure_fastest_call_seconds(
                lambda: [layer(tokens) for layer in layers][-1], device
            )
        }
        for implementation, function in IMPLEMENTATIONS.items():
            call = partial(function, query, key, value)
            seconds[f"maps and gathering {implementation}"] = _measure_fastest_call_seconds(call, device)
    return seconds


def fit_growth_exponent_of_larger_half(token_counts: list[int], values: list[float]) -> float:
    """Return the least-squares slope of log(value) over log(count), for the larger half of the counts."""
    pairs = list(zip(token_counts, values, strict=True))[len(token_counts) // 2 :]
    points = [(math.log(count), math.log(value)) for count, value in pairs]
    centre = sum(x for x, _ in points) / len(points)
    return sum((x - centre) * y for x, y in points) / sum((x - centre) ** 2 for x, _ in points)


def fit_exponents_by_implementation(costs: list[AttentionCost]) -> dict[str, dict[str, float]]:
    """Return the growth exponents of `seconds` and `peak_bytes` for each implementation."""
    exponents = {}
    for implementation in IMPLEMENTATIONS:
        rows = [cost for cost in costs if cost.way == implementation]
        columns = {name: [float(getattr(cost, name)) for cost in rows] for name in ("seconds", "peak_bytes")}
        exponents[implementation] = {
            name: fit_growth_exponent_of_larger_half([cost.tokens for cost in rows], values)
            for name, values in columns.items()
        }
    return exponents


def describe_fitted_token_range(costs: list[AttentionCost]) -> str:
    """Return the range of the fit, as a sentence."""
    counts = sorted({cost.tokens for cost in costs})
    return f"log-log slope from {counts[len(counts) // 2]} to {counts[-1]} tokens, including fixed overhead."


def draw_attention_costs(costs: list[AttentionCost], title: str) -> Figure:
    """Draw time and memory over the number of tokens, both axes logarithmic."""
    exponents = fit_exponents_by_implementation(costs)
    curves = {key: [cost for cost in costs if cost.way == key] for key in IMPLEMENTATIONS}
    panels: dict[str, CurvesByName] = {
        panel: {
            f"{LABELS[key]} (tokens^{exponents[key][name]:.2f})": [
                (cost.tokens, getattr(cost, name) * factor) for cost in curve
            ]
            for key, curve in curves.items()
        }
        for panel, name, factor in (("time in ms", "seconds", 1e3), ("peak memory in MiB", "peak_bytes", 2.0**-20))
    }
    return draw_log_log_curves(
        panels,
        x_label="tokens",
        title=title,
        caption_text=f"{CAPTION} Legend: {describe_fitted_token_range(costs)} {THEORY}",
    )


@torch.inference_mode()
def _measure_fastest_call_seconds(call: Callable[[], Tensor], device: str, num_calls: int = 7) -> float:
    """Return the seconds of the fastest of several calls, which other programs disturb least."""
    call()
    times = []
    for _ in range(num_calls):
        _synchronize_if_cuda(device)
        start = time.perf_counter()
        call()
        _synchronize_if_cuda(device)
        times.append(time.perf_counter() - start)
    return min(times)


@torch.inference_mode()
def _measure_peak_bytes(call: Callable[[], Tensor], device: str) -> int:
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no profiler messages on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    return _compute_profiled_peak_bytes(profiler)


def _compute_profiled_peak_bytes(profiler: profile) -> int:
    """Return the largest running sum of allocations and frees, from the allocator's events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    allocated = peak = 0
    for event in memory:
        allocated += event["args"]["Bytes"]
        peak = max(peak, allocated)
    return peak


def _synchronize_if_cuda(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
