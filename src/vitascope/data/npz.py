"""Read a .npz file in the layout of Keras: x_train, y_train, x_test, y_test."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitascope.data.source import Source, Split
from vitascope.errors import UserError

KEYS = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}


def npz(path: Path, name: str | None = None, classes: list[str] | None = None, *, to_train: bool = True) -> Source:
    """Without `classes`, the class names are the numbers in y_train, or in y_test if there is no training split."""
    names = _keys(path)
    splits = tuple(split for split, keys in KEYS.items() if all(key in names for key in keys))
    wanted = KEYS["train"] if to_train or "test" not in splits else KEYS["test"]
    if missing := [key for key in wanted if key not in names]:
        raise UserError(f"{path} has no {' and no '.join(missing)}; it contains {', '.join(names) or 'nothing'}.")
    key = KEYS[splits[0]][1]
    labels = _read(path, key)
    if not np.issubdtype(labels.dtype, np.integer) or not labels.size:
        raise UserError(f"{key} in {path} must contain integers, one per image; its type is {labels.dtype}.")
    count = int(labels.max()) + 1
    if count < 2 and to_train:
        raise UserError(f"{key} in {path} has only one class. Training needs at least two.")
    numbers = [str(number) for number in range(count)]
    told = classes or numbers
    return Source(name or path.stem, told, lambda split: _load(path, split, len(told)), splits, named=bool(classes))


def _load(path: Path, split: str, classes: int) -> Split:
    images_key, labels_key = KEYS[split]
    images, labels = _read(path, images_key), _read(path, labels_key).reshape(-1)
    if images.dtype != np.uint8:
        raise UserError(f"{images_key} in {path} has type {images.dtype}; images must be uint8, 0 to 255.")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise UserError(
            f"{images_key} in {path} has shape {images.shape}; "
            "it must be image × height × width, or image × height × width × channel with 1 or 3 channels."
        )
    if len(images) != len(labels) or not len(images):
        raise UserError(f"{path} has {len(images)} images and {len(labels)} labels in its {split} split.")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= classes:
        raise UserError(f"{labels_key} in {path} must contain integers from 0 to {classes - 1}.")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return Split(pixels, torch.from_numpy(labels.astype(np.int64)))


def _keys(path: Path) -> list[str]:
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not a complete .npz file.")
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
