"""MNIST and Fashion-MNIST from their original idx files, gzipped or not."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitascope.data.places import first_existing
from vitascope.data.source import Split
from vitascope.errors import UserError

PREFIX = {"train": "train", "test": "t10k"}
KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def idx_folders(root: Path, name: str, torchvision_name: str) -> list[Path]:
    """ROOT/NAME as published, or torchvision's ROOT/Name/raw."""
    return [root / name, root / torchvision_name / "raw"]


def idx_folder(root: Path, name: str, torchvision_name: str) -> Path | None:
    """The first folder that holds all four files."""
    for folder in idx_folders(root, name, torchvision_name):
        if all(_file(folder, split, kind) for split in PREFIX for kind in KINDS):
            return folder
    return None


def read_idx_split(folder: Path, split: str) -> Split:
    images, labels = (read_idx(_file(folder, split, kind)) for kind in KINDS)
    if len(images) != len(labels):
        raise UserError(f"{folder} has {len(images)} images but {len(labels)} labels in its {split} split.")
    return Split(images[:, None], labels.long())


def read_idx(path: Path | None) -> Tensor:
    """The format: two zero bytes, type 8 (uint8), number of axes, each axis as 4 bytes big-endian, then the bytes."""
    if path is None:
        raise UserError("An idx file is missing.")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        axes = raw[3]
        shape = np.frombuffer(raw, ">i4", count=axes, offset=4)
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UserError(f"{path} is not a complete idx file ({error}). Delete it and download it again.") from error
    return torch.from_numpy(values.copy())


def _file(folder: Path, split: str, kind: str) -> Path | None:
    name = f"{PREFIX[split]}-{kind}"
    return first_existing([folder / f"{name}.gz", folder / name, folder / name.replace("-idx", ".idx")])
