"""Verify an exported file: compare its outputs with the model's, and measure its speed."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitascope.data.dataset import Split
from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.evaluation.fast import relative_error
from vitascope.explain.maps import compute_logits_and_maps, forward_all_tokens
from vitascope.model.vit import VisionTransformer
from vitascope.shapes import Images
from vitascope.training.hardware import disable_tf32_for_float32, keep_freed_memory, make_inference_hardware

ExportedModel = Callable[[Tensor], Sequence[Tensor]]  # prepared images -> logits, and maps if the file has them
RunSample = tuple[Split, str]  # stored images with their classes, and which they are: validation or training

BATCH_SIZES = (1, 2, 7)  # several, to test the dynamic batch size
OUTPUT_NAMES = ("logits", "maps")


def select_comparison_images(
    model: VisionTransformer, preprocessing: Preprocessing, run_sample: RunSample | None
) -> tuple[Images, str]:
    """Return images to fill the batches, and their description; random images if the run's are not available."""
    wanted = sum(BATCH_SIZES)
    if run_sample is None:
        chance = torch.Generator().manual_seed(0)
        return torch.randn(wanted, model.config.in_chans, *model.config.image_shape, generator=chance), "random"
    split, words = run_sample
    images = preprocessing(split.select_evenly(wanted).images)
    return images[torch.arange(wanted) % len(images)], words


def compute_relative_errors(
    model: VisionTransformer, exported_model: ExportedModel, images: Images
) -> dict[str, float]:
    """Return the largest difference of each output, relative to the model's maximum, over several batch sizes."""
    batches = images.split(BATCH_SIZES)
    found = [torch.cat(parts) for parts in zip(*(exported_model(batch) for batch in batches), strict=True)]
    truth = [
        torch.cat(parts)
        for parts in zip(*(_compute_expected_outputs(model, batch, len(found)) for batch in batches), strict=True)
    ]
    return {name: relative_error(*pair) for name, *pair in zip(OUTPUT_NAMES, found, truth, strict=False)}


def reject_inaccurate_export(relative_errors: dict[str, float], tolerance: float) -> None:
    for name, far in relative_errors.items():
        if not far <= tolerance:
            raise UserError(
                f"The exported {name} differ from the model's (relative error {far:.1e}, allowed: {tolerance:.0e}). "
                "No file was written. Please report this, with the model's settings."
            )


@torch.no_grad()
def _compute_expected_outputs(model: VisionTransformer, images: Images, num_outputs: int) -> Sequence[Tensor]:
    """Compute the expected outputs independently of the file: all tokens, and maps recorded at the fused attention."""
    images = images.to(next(model.parameters()).device)
    with disable_tf32_for_float32(make_inference_hardware(model)):
        if num_outputs == 1:
            return (forward_all_tokens(model, images).cpu(),)
        logits, maps = compute_logits_and_maps(model, images)
        return logits.cpu(), torch.stack(maps, dim=1).cpu()


TIMED_BATCHES = (1, 64)
MAX_ROUNDS = 30  # at most
MAX_SECONDS = 3.0  # per batch size, unless one round takes longer


@dataclass(frozen=True)
class Timing:
    """Medians over several rounds; `times_as_fast` is PyTorch's median divided by the candidate's."""

    batch: int
    milliseconds: dict[str, float]
    times_as_fast: dict[str, float]


def compare_speed(model: VisionTransformer, candidates: Mapping[str, Callable[[Tensor], object]]) -> list[Timing]:
    """Compare the speed with one thread each, because several threads give noisy times on a shared machine."""
    keep_freed_memory()
    device, threads = next(model.parameters()).device, torch.get_num_threads()
    racers = {"torch": lambda images: model(images.to(device)).cpu(), **candidates}
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [_time_candidates(racers, torch.randn(batch, *_get_image_shape(model))) for batch in TIMED_BATCHES]
    finally:
        torch.set_num_threads(threads)


def _time_candidates(candidates: Mapping[str, Callable[[Tensor], object]], images: Tensor) -> Timing:
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + MAX_SECONDS
    while not rounds or (len(rounds) <= MAX_ROUNDS and time.perf_counter() < end):
        rounds.append({name: _measure_milliseconds(way, images) for name, way in candidates.items()})
    rounds = rounds[1:] or rounds  # the first warms up
    medians = {name: statistics.median(told[name] for told in rounds) for name in candidates}
    return Timing(
        len(images), medians, {name: medians["torch"] / medians[name] for name in candidates if name != "torch"}
    )


def _measure_milliseconds(candidate: Callable[[Tensor], object], images: Tensor) -> float:
    start = time.perf_counter()
    candidate(images)
    return 1000 * (time.perf_counter() - start)


def _get_image_shape(model: VisionTransformer) -> tuple[int, int, int]:
    return (model.config.in_chans, *model.config.image_shape)
