"""The interface of a data set: classes, and images with labels split by split, loaded when needed."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

UInt8Images = UInt8[Tensor, "image stored_channel stored_height stored_width"]
Labels = Int[Tensor, "image"]


@dataclass(frozen=True)
class Split:
    """Images as they are stored, 0 to 255, and their class numbers."""

    images: UInt8Images
    labels: Labels
    file_paths: list[str] | None = None  # the files, where images came from files

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor | slice) -> "Split":
        names = None
        if self.file_paths is not None:
            chosen = range(len(self))[indices] if isinstance(indices, slice) else indices.tolist()
            names = [self.file_paths[number] for number in chosen]
        return Split(self.images[indices], self.labels[indices], names)

    def select_evenly(self, max_images: int) -> "Split":
        """At most so many, at equal distances from the first to the last."""
        return self.select(torch.linspace(0, len(self) - 1, min(max_images, len(self))).long())


@dataclass(frozen=True)
class DataSource:
    """Where a data set comes from. `load("test")` is the only way to the test images."""

    name: str
    classes: list[str]
    load_split: Callable[[str], Split]  # "train", "test", and "val" where the data set brings one
    split_names: tuple[str, ...] = ("train", "test")
    skipped_paths: list[str] = field(default_factory=list)  # images that could not be read
    has_class_names: bool = True  # False: the classes have only numbers
