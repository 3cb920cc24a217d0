"""Measure milliseconds for 1 and for 64 images, alternating between the candidates, with one thread each."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitascope.model.vit import VisionTransformer
from vitascope.training.allocator import keep_freed_memory

BATCHES = (1, 64)
ROUNDS = 30  # at most
SECONDS = 3.0  # per batch size, unless one round takes longer


@dataclass(frozen=True)
class Timing:
    """Medians over several rounds; `times_as_fast` is PyTorch's median divided by the candidate's."""

    batch: int
    milliseconds: dict[str, float]
    times_as_fast: dict[str, float]


def compare_speed(model: VisionTransformer, ways: Mapping[str, Callable[[Tensor], object]]) -> list[Timing]:
    """Compare the speed with one thread each, because several threads give noisy times on a shared machine."""
    keep_freed_memory()
    device, threads = next(model.parameters()).device, torch.get_num_threads()
    racers = {"torch": lambda images: model(images.to(device)).cpu(), **ways}
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [_race(racers, torch.randn(batch, *_image(model))) for batch in BATCHES]
    finally:
        torch.set_num_threads(threads)


def _race(ways: Mapping[str, Callable[[Tensor], object]], images: Tensor) -> Timing:
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + SECONDS
    while not rounds or (len(rounds) <= ROUNDS and time.perf_counter() < end):
        rounds.append({name: _milliseconds(way, images) for name, way in ways.items()})
    rounds = rounds[1:] or rounds  # the first warms up
    medians = {name: statistics.median(told[name] for told in rounds) for name in ways}
    return Timing(len(images), medians, {name: medians["torch"] / medians[name] for name in ways if name != "torch"})


def _milliseconds(way: Callable[[Tensor], object], images: Tensor) -> float:
    start = time.perf_counter()
    way(images)
    return 1000 * (time.perf_counter() - start)


def _image(model: VisionTransformer) -> tuple[int, int, int]:
    return (model.config.in_chans, *model.config.image_shape)
