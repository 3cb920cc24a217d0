"""The interface of a data set: its classes, and the images and labels of each split, loaded when needed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

UInt8Images = UInt8[Tensor, "image stored_channel stored_height stored_width"]
Labels = Int[Tensor, "image"]
ImageSize: TypeAlias = tuple[int, int]  # rows, columns
SplitName: TypeAlias = str  # "train", "val" or "test"


@dataclass(frozen=True)
class Split:
    """Stored images, 0 to 255, and their class indices."""

    images: UInt8Images
    labels: Labels
    file_paths: list[str] | None = None  # if the images were read from files

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor | slice) -> "Split":
        """Return the images at these indices."""
        file_paths = None
        if self.file_paths is not None:
            selected = range(len(self))[indices] if isinstance(indices, slice) else indices.tolist()
            file_paths = [self.file_paths[index] for index in selected]
        return Split(self.images[indices], self.labels[indices], file_paths)

    def select_evenly(self, max_images: int) -> "Split":
        """Return at most `max_images` images, evenly spaced from the first to the last."""
        return self.select(torch.linspace(0, len(self) - 1, min(max_images, len(self))).long())


@dataclass(frozen=True)
class DataSource:
    """An opened data set. Test images are read only by `load_split("test")`."""

    name: str
    classes: list[str]
    load_split: Callable[[SplitName], Split]  # one of split_names
    split_names: tuple[SplitName, ...] = ("train", "test")
    skipped_paths: list[str] = field(default_factory=list)  # images that could not be read
    has_class_names: bool = True  # False: the names are class indices
