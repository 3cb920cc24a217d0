"""Data sets by name: found under the data root in any of the usual layouts, or downloaded through torchvision."""

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitascope.data.idx import idx_folder, read_idx_split
from vitascope.data.npz import npz
from vitascope.data.source import Source, Split
from vitascope.errors import UserError, first_line

FASHION = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@dataclass(frozen=True)
class Named:
    """What is known of a published data set before it is read."""

    classes: list[str]
    theirs: str  # torchvision's class, which downloads
    files: str  # what to put under the root where nothing can be downloaded
    words: str

    def fetch(self, root: str, **how: Any) -> Any:
        """torchvision takes seconds to import, so it is where it is needed."""
        from torchvision import datasets

        return getattr(datasets, self.theirs)(root, **how)


NAMED = {
    "mnist": Named(
        [str(number) for number in range(10)],
        "MNIST",
        "mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz (four files), or mnist.npz",
        "handwritten digits, 28×28 grey, 60,000 + 10,000",
    ),
    "fashion-mnist": Named(
        FASHION,
        "FashionMNIST",
        "fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz (four files), or fashion-mnist.npz",
        "clothes, 28×28 grey, 60,000 + 10,000",
    ),
    "cifar10": Named(
        CIFAR10,
        "CIFAR10",
        "cifar-10-batches-py/ (from cifar-10-python.tar.gz), or cifar10.npz",
        "photos of 10 classes, 32×32 colour, 50,000 + 10,000",
    ),
    "cifar100": Named(
        [str(number) for number in range(100)],
        "CIFAR100",
        "cifar-100-python/ (from cifar-100-python.tar.gz), or cifar100.npz",
        "photos of 100 classes, 32×32 colour, 50,000 + 10,000",
    ),
}
BROKEN = (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError)  # what torn files raise
IDX = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
CIFAR_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def named(name: str, root: Path, *, download: bool) -> Source:
    """The data set, from what lies under the root; fetched there first if it is missing and may be."""
    found = find(name, root)
    if found is None and download:
        _download(name, root)
        found = find(name, root)
    if found is None:
        raise UserError(_where_to_put(name, root))
    return found


def find(name: str, root: Path) -> Source | None:
    """What lies under the root already, or None."""
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
            f"{base / CIFAR_FOLDERS[name]} is not whole ({error}). Delete it and fetch it again."
        ) from error
    return Split(torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets))


def _cifar_classes(name: str, base: Path) -> list[str]:
    try:
        return list(NAMED[name].fetch(str(base), train=False, download=False).classes)
    except BROKEN:
        return NAMED[name].classes


def _download(name: str, root: Path) -> None:
    print(f"{name} is not under {root}; fetching it.", file=sys.stderr, flush=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        NAMED[name].fetch(str(root), download=True)
    except (OSError, RuntimeError) as error:  # no network, a refused folder, a checksum that does not fit
        raise UserError(f"{_where_to_put(name, root)} (Fetching failed: {first_line(error)})") from error


def _where_to_put(name: str, root: Path) -> str:
    return (
        f"There is no {name} under {root}. Put {NAMED[name].files} there, or set data.root or VITASCOPE_DATA to the "
        "folder that has it."
    )
