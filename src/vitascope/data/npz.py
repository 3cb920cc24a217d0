"""A Keras-layout .npz file (x_train y_train x_test y_test) -> splits."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitascope.data.source import Source, Split
from vitascope.errors import UserError

KEYS = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}


def npz(path: Path, name: str | None = None, classes: list[str] | None = None) -> Source:
    """The classes are the numbers in y_train, unless their names are given."""
    names = _keys(path)
    missing = [key for key in KEYS["train"] if key not in names]
    if missing:
        raise UserError(f"{path} has no {' and no '.join(missing)}; it holds {', '.join(names) or 'nothing'}.")
    labels = _read(path, "y_train")
    if not np.issubdtype(labels.dtype, np.integer) or not labels.size:
        raise UserError(f"y_train in {path} must hold whole numbers, one per image; it is {labels.dtype}.")
    count = int(labels.max()) + 1
    if count < 2:
        raise UserError(f"y_train in {path} names one class only; there is nothing to tell apart.")
    splits = tuple(split for split, keys in KEYS.items() if all(key in names for key in keys))
    classes = classes or [str(number) for number in range(count)]
    return Source(name or path.stem, classes, lambda split: _load(path, split, len(classes)), splits)


def _load(path: Path, split: str, classes: int) -> Split:
    images_key, labels_key = KEYS[split]
    images, labels = _read(path, images_key), _read(path, labels_key).reshape(-1)
    if images.dtype != np.uint8:
        raise UserError(f"{images_key} in {path} is {images.dtype}; images must be uint8, 0 to 255.")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise UserError(
            f"{images_key} in {path} has shape {images.shape}; it must be image × height × width (× 1 or 3)."
        )
    if len(images) != len(labels) or not len(images):
        raise UserError(f"{path} has {len(images)} images and {len(labels)} labels in its {split} part.")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= classes:
        raise UserError(f"{labels_key} in {path} must hold whole numbers from 0 to {classes - 1}.")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return Split(pixels, torch.from_numpy(labels.astype(np.int64)))


def _keys(path: Path) -> list[str]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return list(file)
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as an .npz file ({error}).") from error


def _read(path: Path, key: str) -> NDArray[Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return file[key]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{key} cannot be read from {path} ({error}).") from error
