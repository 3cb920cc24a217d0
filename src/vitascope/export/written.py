"""What was exported -> a report, and a file in its place only when all of it is known to be right."""

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
    """The float32 and the int8 file on the same images."""

    images: int
    which: str  # held-back or training
    float32: float  # share of right answers
    int8: float
    agreement: float  # share of images to which both say the same


@dataclass(frozen=True)
class Int8:
    """What rounding to 8 bits saved and cost."""

    method: str  # dynamic or static
    float32_bytes: int
    accuracy: Accuracy | None  # None: the run's images are not here


@dataclass(frozen=True)
class Written:
    """One exported file."""

    path: Path
    format: str
    bytes: int
    differences: dict[str, float]  # per output, relative to the model's largest value
    compared_on: str  # held-back, training or random images
    speed: list[Timing]
    int8: Int8 | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def check_place(path: Path, ending: str) -> None:
    """Before any work: the ending is right, and a file can be written there."""
    if path.suffix != ending:
        raise UserError(f"The file '{path.name}' must end in {ending}.")
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file that ends in {ending}.")
    make_folder(path.parent, "Choose another place with --out.")
    try:
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(
            f"Nothing can be written into {path.parent}: {error.strerror}. Choose another place with --out."
        ) from error


@contextmanager
def quietly() -> Iterator[None]:
    """The exporters' remarks to their own developers stay off the terminal; what matters is compared afterwards."""
    before = root.manager.disable
    disable(WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        disable(before)
