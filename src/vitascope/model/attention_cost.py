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
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vitascope.draw.growth import Curves, draw_growth
from vitascope.model.exact import exact_float32
from vitascope.model.scaled_dot_product import attend, attend_fused

WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"written out": attend, "fused": attend_fused}
LABELS = {"written out": "explicit", "fused": "fused"}  # for tables and figures; the keys are also in stored results
TOKEN_COUNTS = (64, 128, 256, 512, 1024, 2048, 4096)
GPU_COUNTS = (512, 1024, 2048, 4096, 8192, 16384)  # with fewer than 4096 a large one mostly waits for work
CAPTION = (
    "Forward pass of attention alone, batch 1, float32. Explicit attention stores the attention maps. The fused kernel "
    "computes the same result without storing them."
)
THEORY = "In theory, time grows with tokens². Memory grows with tokens² (explicit) or with tokens (fused)."


@dataclass(frozen=True)
class Cost:
    """One measurement: the time of the fastest call, and the peak memory without the inputs."""

    way: str
    tokens: int
    seconds: float
    peak_bytes: int


def token_counts(heads: int, device: str = "cpu") -> tuple[int, ...]:
    """Enough tokens to show quadratic growth. On a GPU: only counts whose maps fit three times in free memory."""
    if not device.startswith("cuda"):
        return TOKEN_COUNTS
    free = torch.cuda.mem_get_info()[0]
    return tuple(count for count in GPU_COUNTS if 3 * 4 * heads * count**2 < free)


def measure_attention(heads: int, width: int, counts: tuple[int, ...], device: str = "cpu") -> list[Cost]:
    """Forward pass, batch 1, float32, for each way and token count."""
    costs = []
    with exact_float32():
        for tokens in counts:
            query, key, value = torch.randn(3, 1, heads, tokens, width, device=device)
            for way, function in WAYS.items():
                call = _closed(function, query, key, value)
                costs.append(Cost(way, tokens, _seconds(call, device), _peak_bytes(call, device)))
    return costs


def measure_parts(images: int, tokens: int, *, width: int, heads: int, device: str = "cpu") -> dict[str, float]:
    """Seconds of a forward pass in float32: the four projections, and attention between them in both versions."""
    given = torch.randn(images, tokens, width, device=device)
    layers = [torch.nn.Linear(width, 3 * width, device=device), torch.nn.Linear(width, width, device=device)]
    query, key, value = torch.randn(3, images, heads, tokens, width // heads, device=device)
    with exact_float32():
        found = {"the four projections": _seconds(lambda: [layer(given) for layer in layers][-1], device)}
        for way, function in WAYS.items():
            found[f"maps and gathering {way}"] = _seconds(_closed(function, query, key, value), device)
    return found


def exponent(counts: list[int], values: list[float]) -> float:
    """The slope of log(value) over log(count) through the larger half of the counts, by least squares."""
    pairs = list(zip(counts, values, strict=True))[len(counts) // 2 :]
    points = [(math.log(count), math.log(value)) for count, value in pairs]
    centre = sum(x for x, _ in points) / len(points)
    return sum((x - centre) * y for x, y in points) / sum((x - centre) ** 2 for x, _ in points)


def exponents(costs: list[Cost]) -> dict[str, dict[str, float]]:
    """Per way, how seconds and peak_bytes grow."""
    found = {}
    for way in WAYS:
        own = [cost for cost in costs if cost.way == way]
        fields = {name: [float(getattr(cost, name)) for cost in own] for name in ("seconds", "peak_bytes")}
        found[way] = {name: exponent([cost.tokens for cost in own], values) for name, values in fields.items()}
    return found


def describe_fit(costs: list[Cost]) -> str:
    """The range of the fit, as a sentence."""
    counts = sorted({cost.tokens for cost in costs})
    return f"log-log slope from {counts[len(counts) // 2]} to {counts[-1]} tokens, including fixed overhead."


def draw_costs(costs: list[Cost], title: str) -> Figure:
    fits = exponents(costs)
    curves = {way: [cost for cost in costs if cost.way == way] for way in WAYS}
    panels: dict[str, Curves] = {
        panel: {
            f"{LABELS[way]} (tokens^{fits[way][name]:.2f})": [
                (cost.tokens, getattr(cost, name) * factor) for cost in curve
            ]
            for way, curve in curves.items()
        }
        for panel, name, factor in (("time in ms", "seconds", 1e3), ("peak memory in MiB", "peak_bytes", 2.0**-20))
    }
    return draw_growth(
        panels, x="tokens", title=title, caption_text=f"{CAPTION} Legend: {describe_fit(costs)} {THEORY}"
    )


def _closed(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    return lambda: function(*inputs)


@torch.inference_mode()
def _seconds(call: Callable[[], Tensor], device: str, calls: int = 7) -> float:
    """Seconds of the fastest of several calls, which is disturbed least by other programs."""
    call()
    times = []
    for _ in range(calls):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


@torch.inference_mode()
def _peak_bytes(call: Callable[[], Tensor], device: str) -> int:
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    return _peak_of_trace(profiler)


def _peak_of_trace(profiler: profile) -> int:
    """The highest sum of allocations so far, from the allocator's own events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    held = peak = 0
    for event in memory:
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
