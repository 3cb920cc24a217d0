"""Data sets by name: read from the data root in any common layout, or downloaded with torchvision."""

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitascope.data.idx import idx_folder, read_idx_split
from vitascope.data.npz import npz
from vitascope.data.source import Source, Split
from vitascope.errors import UserError

FASHION = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@dataclass(frozen=True)
class Named:
    """Facts about a published data set that do not need its files."""

    classes: list[str]
    theirs: str  # torchvision's class, which downloads
    files: str  # what to put under the root where nothing can be downloaded
    words: str

    def fetch(self, root: str, **how: Any) -> Any:
        """Call torchvision's class. It is imported here because the import takes seconds."""
        from torchvision import datasets

        return getattr(datasets, self.theirs)(root, **how)


NAMED = {
    "mnist": Named(
        [str(number) for number in range(10)],
        "MNIST",
        "mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz (four files), or mnist.npz",
        "handwritten digits, 28×28 grayscale, 60,000 training and 10,000 test images",
    ),
    "fashion-mnist": Named(
        FASHION,
        "FashionMNIST",
        "fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz (four files), or fashion-mnist.npz",
        "clothes, 28×28 grayscale, 60,000 training and 10,000 test images",
    ),
    "cifar10": Named(
        CIFAR10,
        "CIFAR10",
        "cifar-10-batches-py/ (from cifar-10-python.tar.gz), or cifar10.npz",
        "photos of 10 classes, 32×32 colour, 50,000 training and 10,000 test images",
    ),
    "cifar100": Named(
        [str(number) for number in range(100)],
        "CIFAR100",
        "cifar-100-python/ (from cifar-100-python.tar.gz), or cifar100.npz",
        "photos of 100 classes, 32×32 colour, 50,000 training and 10,000 test images",
    ),
}
BROKEN = (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError)  # what torn files raise
IDX = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def named(name: str, root: Path, *, download: bool) -> Source:
    """Open the data set below `root`. If it is missing and `download` is set, download it first."""
    found = find(name, root)
    if found is None and download:
        _download(name, root)
        found = find(name, root)
    if found is None:
        raise UserError(f"There is no {name} in {root}. {_where_to_put(name, root)}")
    return found


def find(name: str, root: Path) -> Source | None:
    """Open the data set if it is below `root`, else return None."""
    facts = NAMED[name]
    if (root / f"{name}.npz").is_file():
        return npz(root / f"{name}.npz", name, facts.classes)
    if name in IDX and (place := idx_folder(root, name, IDX[name])):
        return Source(name, facts.classes, lambda split: read_idx_split(place, split))
    if name in CIFAR_FOLDERS:
        for base in (root, root / name):
            if (base / CIFAR_FOLDERS[name]).is_dir():
                return Source(
                    name, _cifar_classes(name, base), lambda split, base=base: _cifar_split(name, base, split)
                )
    return None


def _cifar_split(name: str, base: Path, split: str) -> Split:
    try:
        data = NAMED[name].fetch(str(base), train=split == "train", download=False)
    except BROKEN as error:
        raise UserError(
            f"{base / CIFAR_FOLDERS[name]} is incomplete or damaged ({error}). Delete it and download it again."
        ) from error
    return Split(torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets))


def _cifar_classes(name: str, base: Path) -> list[str]:
    try:
        return list(NAMED[name].fetch(str(base), train=False, download=False).classes)
    except BROKEN:
        return NAMED[name].classes


def _download(name: str, root: Path) -> None:
    print(f"{name} is not in {root}. Downloading it.", file=sys.stderr, flush=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        NAMED[name].fetch(str(root), download=True)
    except (OSError, RuntimeError) as error:  # no network, a refused folder, a checksum that does not fit
        raise UserError(f"{name} could not be downloaded ({_reason(error)}). {_where_to_put(name, root)}") from error


def _reason(error: Exception) -> str:
    """The last line of torchvision's error: with several mirrors, the lines before name the addresses."""
    lines = [line.strip(" <>") for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if line), type(error).__name__)[:120]


def _where_to_put(name: str, root: Path) -> str:
    return f"Put into {root}: {NAMED[name].files}. Or set data.root or VITASCOPE_DATA to the folder that contains it."
