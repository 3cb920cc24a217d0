"""Read data sets from array files: .npz in the layout of Keras, MNIST's idx files, and the built-in digits.

The digits are UCI's "Optical Recognition of Handwritten Digits" (CC BY 4.0; E. Alpaydin, C. Kaynak, 1998). Pixel values
of 0 to 16 are scaled to 0 to 255. Training and test images are the halves of scikit-learn's `train_test_split` with
`test_size=0.5, random_state=0, stratify=labels`; a test compares them with scikit-learn's.
"""

import gzip
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitascope.data.data_root import find_first_existing
from vitascope.data.dataset import DataSource, MemoryDataset, SplitName
from vitascope.errors import UserError, shorten_error_message

DAMAGED_NPZ_ERRORS = (  # of zipfile, zlib and NumPy's reader of headers
    *(OSError, ValueError, TypeError, KeyError, AttributeError, EOFError, OverflowError, MemoryError, SyntaxError),
    *(RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error, RecursionError),
)
ARRAY_NAMES = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}


def open_npz_data_source(
    path: Path, dataset_name: str | None = None, class_names: list[str] | None = None, *, must_be_trainable: bool = True
) -> DataSource:
    """Open an .npz file. Without `class_names`, the classes are named by their index: 0 to the largest label."""
    array_names = _list_array_names(path)
    splits = tuple(split for split, keys in ARRAY_NAMES.items() if all(key in array_names for key in keys))
    required = ARRAY_NAMES["train"] if must_be_trainable or "test" not in splits else ARRAY_NAMES["test"]
    if missing := [key for key in required if key not in array_names]:
        found = f"contains {', '.join(array_names)}" if array_names else "is empty"
        raise UserError(f"{path} has no {' and no '.join(missing)}; it {found}.")
    key = ARRAY_NAMES[splits[0]][1]
    labels = _read_array(path, key)
    if not labels.size:
        raise UserError(f"{path} has no images: {key} is empty.")
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{key} in {path} must contain integers, one per image; its type is {labels.dtype}.")
    if class_names is None:
        _check_labels_are_class_indices(labels, f"{key} in {path}", must_have_all=must_be_trainable)
    count = int(labels.max()) + 1
    if count < 2 and must_be_trainable:
        raise UserError(f"{key} in {path} has only one class. Training needs at least two.")
    names = class_names or [str(index) for index in range(count)]
    return DataSource(
        dataset_name or path.stem,
        names,
        lambda split_name: _load_split(path, split_name, names, has_class_names=bool(class_names)),
        splits,
        has_class_names=bool(class_names),
    )


MAX_CLASSES = 2**16
MAX_NAMED_LABELS = 5


def _check_labels_are_class_indices(labels: NDArray[Any], source_name: str, *, must_have_all: bool) -> None:
    """Reject labels that are no class indices from 0, and gaps between them with `must_have_all`."""
    present = np.unique(labels)
    smallest, largest = int(present[0]), int(present[-1])
    if smallest < 0:
        raise UserError(
            f"{source_name} must contain integers from 0 to {max(largest, 1)}, the numbers of the classes; "
            f"it contains {smallest}."
        )
    if largest >= MAX_CLASSES:
        raise UserError(
            f"{source_name} contains {largest}. Labels are class numbers: number the classes from 0, without gaps."
        )
    missing = np.setdiff1d(np.arange(largest), present).tolist() if must_have_all else []
    if missing:
        some = ", ".join(map(str, missing[:MAX_NAMED_LABELS])) + (", …" if len(missing) > MAX_NAMED_LABELS else "")
        raise UserError(
            f"{source_name} has {len(present)} labels up to {largest}, but none is {some}. Number the classes from 0, "
            "without gaps."
        )


def _load_split(path: Path, split_name: SplitName, class_names: list[str], *, has_class_names: bool) -> MemoryDataset:
    images_key, labels_key = ARRAY_NAMES[split_name]
    images, labels = _read_array(path, images_key), _read_array(path, labels_key).reshape(-1)
    if images.dtype != np.uint8:
        raise UserError(f"{images_key} in {path} has type {images.dtype}; images must be uint8, 0 to 255.")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise UserError(
            f"{images_key} in {path} has shape {images.shape}; "
            "it must be image × height × width, or image × height × width × channel with 1 or 3 channels."
        )
    if not images[:1].size and len(images):
        raise UserError(f"{images_key} in {path} has shape {images.shape}: its images have no pixels.")
    if len(images) != len(labels) or not len(images):
        raise UserError(f"{path} has {len(images)} images and {len(labels)} labels in its {split_name} split.")
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{labels_key} in {path} must contain integers, one per image; its type is {labels.dtype}.")
    if labels.min() < 0 or labels.max() >= len(class_names):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        origin = "" if has_class_names else ", the largest label in y_train"
        raise UserError(
            f"{labels_key} in {path} must contain integers from 0 to {len(class_names) - 1}{origin}; "
            f"it contains {wrong}."
        )
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return MemoryDataset(pixels, torch.from_numpy(labels.astype(np.int64)), class_names)


def _list_array_names(path: Path) -> list[str]:
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not a complete .npz file.")
    try:
        with np.load(path, allow_pickle=False) as file:
            return list(file)
    except DAMAGED_NPZ_ERRORS as error:
        raise UserError(f"{path} cannot be read as an .npz file ({shorten_error_message(error)}).") from error


def _read_array(path: Path, array_name: str) -> NDArray[Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            array = file[array_name]
    except DAMAGED_NPZ_ERRORS as error:
        raise UserError(f"{array_name} cannot be read from {path} ({shorten_error_message(error)}).") from error
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise UserError(f"{array_name} in {path} is not an array with one entry per image.")
    return array


SPLIT_PREFIXES = {"train": "train", "test": "t10k"}
FILE_ENDINGS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def list_possible_idx_folders(root: Path, dataset_name: str, torchvision_name: str) -> list[Path]:
    """Return the possible folders: ROOT/NAME as published, and torchvision's ROOT/Name/raw."""
    return [root / dataset_name, root / torchvision_name / "raw"]


def find_complete_idx_folder(root: Path, dataset_name: str, torchvision_name: str) -> Path | None:
    """Return the first folder that contains all four files, or None."""
    for folder in list_possible_idx_folders(root, dataset_name, torchvision_name):
        if all(_find_idx_file(folder, split, ending) for split in SPLIT_PREFIXES for ending in FILE_ENDINGS):
            return folder
    return None


def read_idx_split(folder: Path, split_name: SplitName, class_names: list[str]) -> MemoryDataset:
    """Read the images and labels of one split."""
    images, labels = (read_idx_file(_find_idx_file(folder, split_name, ending)) for ending in FILE_ENDINGS)
    if len(images) != len(labels):
        raise UserError(f"{folder} has {len(images)} images but {len(labels)} labels in its {split_name} split.")
    return MemoryDataset(images[:, None], labels.long(), class_names)


def read_idx_file(path: Path | None) -> Tensor:
    """Read an idx file: two zero bytes, type 8 (uint8), number of axes, axis sizes as big-endian int32, then bytes."""
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


def _find_idx_file(folder: Path, split_name: SplitName, file_ending: str) -> Path | None:
    name = f"{SPLIT_PREFIXES[split_name]}-{file_ending}"
    return find_first_existing([folder / f"{name}.gz", folder / name, folder / name.replace("-idx", ".idx")])


DIGITS_FILE = Path(__file__).with_name("digits.npz")
DIGIT_NAMES = [str(digit) for digit in range(10)]


def open_builtin_digits() -> DataSource:
    """Open the digits that ship with the package."""
    return DataSource("digits", DIGIT_NAMES, load_digits_split)


def load_digits_split(split_name: SplitName) -> MemoryDataset:
    """Load the training or test half of the digits."""
    with np.load(DIGITS_FILE) as arrays:
        images, labels = arrays[f"{split_name}_images"], arrays[f"{split_name}_labels"]
    return MemoryDataset(torch.from_numpy(images)[:, None], torch.from_numpy(labels).long(), DIGIT_NAMES)
