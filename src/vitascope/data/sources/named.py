"""Data sets by name: read from the data root in any common layout, or downloaded with torchvision."""

import pickle
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from vitascope.data.dataset import DataSource, MemoryDataset, SplitName
from vitascope.data.sources.arrays import find_complete_idx_folder, open_npz_data_source, read_idx_split
from vitascope.errors import UserError

FASHION_MNIST_CLASSES = [
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
]
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class TorchvisionDataset(Protocol):
    """The attributes of torchvision's data sets that are used here."""

    data: NDArray[Any]
    targets: list[int]
    classes: list[str]


@dataclass(frozen=True)
class PublishedDataset:
    """Description of a published data set, independent of its files."""

    class_names: list[str]
    torchvision_class: str  # name of torchvision's class, which downloads it
    expected_files: str  # files to put under the data root if it cannot be downloaded
    description: str

    def load_with_torchvision(self, root: str, **options: bool) -> TorchvisionDataset:
        """Call torchvision's class. It is imported here because the import takes seconds."""
        from torchvision import datasets

        return getattr(datasets, self.torchvision_class)(root, **options)


PUBLISHED_DATASETS = {
    "mnist": PublishedDataset(
        [str(digit) for digit in range(10)],
        "MNIST",
        "mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz (four files), or mnist.npz",
        "handwritten digits, 28×28 grayscale, 60,000 training and 10,000 test images",
    ),
    "fashion-mnist": PublishedDataset(
        FASHION_MNIST_CLASSES,
        "FashionMNIST",
        "fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz (four files), or fashion-mnist.npz",
        "clothes, 28×28 grayscale, 60,000 training and 10,000 test images",
    ),
    "cifar10": PublishedDataset(
        CIFAR10_CLASSES,
        "CIFAR10",
        "cifar-10-batches-py/ (from cifar-10-python.tar.gz), or cifar10.npz",
        "photos of 10 classes, 32×32 colour, 50,000 training and 10,000 test images",
    ),
    "cifar100": PublishedDataset(
        [str(index) for index in range(100)],
        "CIFAR100",
        "cifar-100-python/ (from cifar-100-python.tar.gz), or cifar100.npz",
        "photos of 100 classes, 32×32 colour, 50,000 training and 10,000 test images",
    ),
}
DAMAGED_FILE_ERRORS = (
    RuntimeError,
    OSError,
    EOFError,
    KeyError,
    ValueError,
    pickle.UnpicklingError,
)  # raised for incomplete files
IDX_TORCHVISION_NAMES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def open_or_download_published_dataset(dataset_name: str, data_folder: Path, *, download: bool) -> DataSource:
    """Open the data set below `data_folder`. If it is missing and `download` is set, download it first."""
    source = open_published_dataset_if_found(dataset_name, data_folder)
    if source is None and download:
        _print_notice_and_download_dataset(dataset_name, data_folder)
        source = open_published_dataset_if_found(dataset_name, data_folder)
    if source is None:
        raise UserError(
            f"There is no {dataset_name} in {data_folder}. {_format_missing_dataset_hint(dataset_name, data_folder)}"
        )
    return source


def open_published_dataset_if_found(dataset_name: str, data_folder: Path) -> DataSource | None:
    """Open the data set if it is below `data_folder`, else return None."""
    dataset = PUBLISHED_DATASETS[dataset_name]
    if (data_folder / f"{dataset_name}.npz").is_file():
        return open_npz_data_source(data_folder / f"{dataset_name}.npz", dataset_name, dataset.class_names)
    if dataset_name in IDX_TORCHVISION_NAMES and (
        folder := find_complete_idx_folder(data_folder, dataset_name, IDX_TORCHVISION_NAMES[dataset_name])
    ):
        names = dataset.class_names
        return DataSource(dataset_name, names, lambda split_name: read_idx_split(folder, split_name, names))
    if dataset_name in CIFAR_FOLDERS:
        for base in (data_folder, data_folder / dataset_name):
            if (base / CIFAR_FOLDERS[dataset_name]).is_dir():
                names = _read_cifar_class_names_or_default(dataset_name, base)
                return DataSource(
                    dataset_name,
                    names,
                    partial(_load_cifar_split, dataset_name, base, names),
                )
    return None


def _load_cifar_split(
    dataset_name: str, parent_folder: Path, class_names: list[str], split_name: SplitName
) -> MemoryDataset:
    try:
        data = PUBLISHED_DATASETS[dataset_name].load_with_torchvision(
            str(parent_folder), train=split_name == "train", download=False
        )
    except DAMAGED_FILE_ERRORS as error:
        raise UserError(
            f"{parent_folder / CIFAR_FOLDERS[dataset_name]} is incomplete or damaged ({error}). "
            "Delete it and download it again."
        ) from error
    pixels = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
    return MemoryDataset(pixels, torch.tensor(data.targets), class_names)


def _read_cifar_class_names_or_default(dataset_name: str, parent_folder: Path) -> list[str]:
    try:
        return list(
            PUBLISHED_DATASETS[dataset_name]
            .load_with_torchvision(str(parent_folder), train=False, download=False)
            .classes
        )
    except DAMAGED_FILE_ERRORS:
        return PUBLISHED_DATASETS[dataset_name].class_names


def _print_notice_and_download_dataset(dataset_name: str, data_folder: Path) -> None:
    print(f"{_describe_missing_dataset(dataset_name, data_folder)} Downloading it.", file=sys.stderr, flush=True)
    try:
        data_folder.mkdir(parents=True, exist_ok=True)
        PUBLISHED_DATASETS[dataset_name].load_with_torchvision(str(data_folder), download=True)
    except (OSError, RuntimeError) as error:  # no network, no write permission, or a wrong checksum
        raise UserError(
            f"{dataset_name} could not be downloaded ({_get_last_message_line(error)}). "
            f"{_format_missing_dataset_hint(dataset_name, data_folder)}"
        ) from error


def _describe_missing_dataset(dataset_name: str, data_folder: Path) -> str:
    """Say that the data set is missing. A folder of its name may have other files."""
    folder = data_folder / dataset_name
    if folder.is_dir() and any(folder.iterdir()):
        return f"{folder} has no {dataset_name} files in a known form."
    return f"{dataset_name} is not in {data_folder}."


def _get_last_message_line(error: Exception) -> str:
    """Return the last line of torchvision's error; earlier lines list the mirrors."""
    lines = [line.strip(" <>:") for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if line), type(error).__name__)[:120]


def _format_missing_dataset_hint(dataset_name: str, data_folder: Path) -> str:
    """Return what to do if the data set is missing."""
    return (
        f"Put into {data_folder}: {PUBLISHED_DATASETS[dataset_name].expected_files}. "
        "Or set data.root or VITASCOPE_DATA to the folder that contains it."
    )
