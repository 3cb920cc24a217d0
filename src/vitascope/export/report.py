"""Report of an export, metadata of the exported file, and checks before it is written."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging import WARNING, disable, root
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import vitascope
from vitascope.errors import UserError
from vitascope.export.verify import Timing
from vitascope.run.files import make_folder
from vitascope.weights.model_info import ModelInfo


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


METADATA_FILE = "vitascope.json"  # inside a .pt2 file; ONNX files have metadata fields


def build_string_metadata(model_info: ModelInfo, run_name: str) -> dict[str, str]:
    """Return all values as strings and lists as JSON, because ONNX metadata holds only strings."""
    return {
        "classes": json.dumps(model_info.classes, ensure_ascii=False),
        "mean": json.dumps(model_info.preparation.mean),
        "std": json.dumps(model_info.preparation.std),
        "img_size": json.dumps(model_info.model.image_shape),
        "in_chans": str(model_info.model.in_chans),
        "preparation": "centre crop to the shape of img_size (rows, columns), resize to img_size, pixels / 255, "
        "subtract mean, divide by std (per channel); float32, batch × channels × rows × columns",
        "vitascope": vitascope.__version__,
        "run": run_name,
    }
