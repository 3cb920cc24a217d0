"""Verify an exported file (outputs and speed), describe it in a report, and check its path before it is written."""

import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging import WARNING, disable, root
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor

import vitascope
from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.inference.fast import compute_max_relative_error
from vitascope.inference.hardware import set_malloc_to_keep_memory
from vitascope.model.precision import disable_tf32
from vitascope.model.replay import compute_logits_with_all_tokens, record_attention
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import make_folder
from vitascope.run.images import RunSample
from vitascope.shapes import Images
from vitascope.weights.model_info import ModelInfo

BATCH_SIZES = (1, 2, 7)  # several, to test the dynamic batch size
OUTPUT_NAMES = ("logits", "maps")
TIMED_BATCHES = (1, 64)
MAX_ROUNDS = 30  # at most
MAX_SECONDS = 3.0  # per batch size, unless one round takes longer
METADATA_FILE = "vitascope.json"  # inside a .pt2 file; ONNX files have metadata fields
ExportedModel = Callable[[Tensor], Sequence[Tensor]]  # prepared images -> logits, and maps if the file has them
SpeedCandidates = Mapping[str, Callable[[Tensor], object]]  # name -> a function of prepared images


class ComparisonImages(NamedTuple):
    images: Images
    description: str  # validation, training or random


def select_run_or_random_images(
    model: VisionTransformer, preprocessing: Preprocessing, run_sample: RunSample | None
) -> ComparisonImages:
    """Return images to fill the batches; random images if the run's are not available."""
    num_images = sum(BATCH_SIZES)
    if run_sample is None:
        generator = torch.Generator().manual_seed(0)
        return ComparisonImages(torch.randn(num_images, *_get_image_shape(model), generator=generator), "random")
    images = preprocessing(run_sample.samples.select_evenly(num_images).images)
    return ComparisonImages(images[torch.arange(num_images) % len(images)], run_sample.description)


def compute_max_relative_error_per_output(
    model: VisionTransformer, exported_model: ExportedModel, images: Images
) -> dict[str, float]:
    """Return each output's largest difference, relative to the PyTorch model's largest value; several batch sizes."""
    batches = images.split(BATCH_SIZES)
    exported_outputs = [torch.cat(parts) for parts in zip(*(exported_model(batch) for batch in batches), strict=True)]
    expected_outputs = [
        torch.cat(parts)
        for parts in zip(
            *(_compute_logits_and_optional_maps(model, batch, len(exported_outputs)) for batch in batches), strict=True
        )
    ]
    return {
        name: compute_max_relative_error(*outputs)
        for name, *outputs in zip(OUTPUT_NAMES, exported_outputs, expected_outputs, strict=False)
    }


def raise_if_export_inaccurate(relative_errors: dict[str, float], tolerance: float) -> None:
    for name, error in relative_errors.items():
        if not error <= tolerance:
            raise UserError(
                f"The exported {name} differ from the PyTorch model's by {error:.1e} of the PyTorch model's largest "
                f"value (allowed: {tolerance:.0e}). "
                "No file was written. Please report this, with the model's settings."
            )


@torch.no_grad()
def _compute_logits_and_optional_maps(model: VisionTransformer, images: Images, num_outputs: int) -> Sequence[Tensor]:
    """Compute the expected outputs independently of the file: all tokens, and maps recorded at the fused attention."""
    images = images.to(next(model.parameters()).device)
    with disable_tf32():
        if num_outputs == 1:
            return (compute_logits_with_all_tokens(model, images).cpu(),)
        recording = record_attention(model, images)
        return recording.logits.cpu(), torch.stack(recording.maps, dim=1).cpu()


@dataclass(frozen=True)
class Timing:
    """Medians over several rounds; `times_as_fast` is PyTorch's median divided by the candidate's."""

    batch: int
    milliseconds: dict[str, float]
    times_as_fast: dict[str, float]


def time_candidates_with_one_thread(model: VisionTransformer, candidates: SpeedCandidates) -> list[Timing]:
    """Compare the speed with one thread each, because several threads give noisy times on a shared machine."""
    set_malloc_to_keep_memory()
    device, threads = next(model.parameters()).device, torch.get_num_threads()
    candidates_and_torch = {"torch": lambda images: model(images.to(device)).cpu(), **candidates}
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [
                _measure_median_milliseconds(candidates_and_torch, torch.randn(batch, *_get_image_shape(model)))
                for batch in TIMED_BATCHES
            ]
    finally:
        torch.set_num_threads(threads)


def _measure_median_milliseconds(candidates: SpeedCandidates, images: Tensor) -> Timing:
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + MAX_SECONDS
    while not rounds or (len(rounds) <= MAX_ROUNDS and time.perf_counter() < end):
        rounds.append(
            {name: _measure_one_call_milliseconds(candidate, images) for name, candidate in candidates.items()}
        )
    rounds = rounds[1:] or rounds  # the first warms up
    medians = {name: statistics.median(times[name] for times in rounds) for name in candidates}
    return Timing(
        len(images), medians, {name: medians["torch"] / medians[name] for name in candidates if name != "torch"}
    )


def _measure_one_call_milliseconds(candidate: Callable[[Tensor], object], images: Tensor) -> float:
    start = time.perf_counter()
    candidate(images)
    return 1000 * (time.perf_counter() - start)


def _get_image_shape(model: VisionTransformer) -> tuple[int, int, int]:
    """Return channels, rows and columns of a prepared image."""
    return (model.config.in_chans, *model.config.image_shape)


@dataclass(frozen=True)
class AccuracyComparison:
    """Accuracy of the float32 and the int8 file on the same images."""

    images: int
    which: str  # validation or training
    float32: float  # accuracy
    int8: float
    agreement: float  # fraction of images with the same prediction


@dataclass(frozen=True)
class Int8Report:
    """Size of the float32 file, and accuracy of both files."""

    method: str  # dynamic or static
    float32_bytes: int
    accuracy: AccuracyComparison | None  # None: the run's images are not available


@dataclass(frozen=True)
class ExportReport:
    """One exported file."""

    path: Path
    format: str
    bytes: int
    differences: dict[str, float]  # per output, relative to the model's largest value
    compared_on: str  # validation, training or random images
    speed: list[Timing]
    int8: Int8Report | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def check_path_and_create_folder(path: Path, suffix: str) -> None:
    """Check the file ending and that the file can be written, before exporting."""
    if path.suffix != suffix:
        raise UserError(f"The file '{path.name}' must end in {suffix}.")
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file that ends in {suffix}.")
    make_folder(path.parent, "Choose another file with --out.")
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"{path.parent} is not writable: {error.strerror}. Choose another file with --out.") from error


@contextmanager
def suppress_logs_and_warnings() -> Iterator[None]:
    """Suppress the exporters' log messages; the result is verified afterwards."""
    before = root.manager.disable
    disable(WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        disable(before)


def build_string_metadata(model_info: ModelInfo, run_name: str) -> dict[str, str]:
    """Return all values as strings and lists as JSON, because ONNX metadata holds only strings."""
    return {
        "classes": json.dumps(model_info.classes, ensure_ascii=False),
        "mean": json.dumps(model_info.preparation.mean),
        "std": json.dumps(model_info.preparation.std),
        "img_size": json.dumps(model_info.model.image_shape),
        "in_chans": str(model_info.model.in_chans),
        "stored": json.dumps(model_info.stored),
        "temperature": repr(model_info.temperature),
        "preparation": f"{model_info.preprocessing_description}; float32, batch × channels × rows × columns",
        "vitascope": vitascope.__version__,
        "run": run_name,
    }
