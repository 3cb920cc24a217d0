"""Report of an export, and checks before a file is written."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging import WARNING, disable, root
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from vitascope.errors import UserError
from vitascope.export.speed import Timing
from vitascope.run.files import make_folder


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the float32 and the int8 file on the same images."""

    images: int
    which: str  # validation or training
    float32: float  # accuracy
    int8: float
    agreement: float  # fraction of images with the same prediction


@dataclass(frozen=True)
class Int8:
    """Size and accuracy of the int8 file beside float32."""

    method: str  # dynamic or static
    float32_bytes: int
    accuracy: Accuracy | None  # None: the run's images are not available


@dataclass(frozen=True)
class Written:
    """One exported file."""

    path: Path
    format: str
    bytes: int
    differences: dict[str, float]  # per output, relative to the model's largest value
    compared_on: str  # validation, training or random images
    speed: list[Timing]
    int8: Int8 | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def check_place(path: Path, ending: str) -> None:
    """Check the file ending and that the file can be written, before exporting."""
    if path.suffix != ending:
        raise UserError(f"The file '{path.name}' must end in {ending}.")
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file that ends in {ending}.")
    make_folder(path.parent, "Choose another file with --out.")
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(f"{path.parent} is not writable: {error.strerror}. Choose another file with --out.") from error


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the exporters' log messages; the result is verified afterwards."""
    before = root.manager.disable
    disable(WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        disable(before)
