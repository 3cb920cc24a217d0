"""A data set's name or path -> its classes, and its images split by split, opened only when asked for."""

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
    names: list[str] | None = None  # the files, where images came from files

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, index: Tensor | slice) -> "Split":
        names = None
        if self.names is not None:
            chosen = range(len(self))[index] if isinstance(index, slice) else index.tolist()
            names = [self.names[number] for number in chosen]
        return Split(self.images[index], self.labels[index], names)

    def evenly(self, most: int) -> "Split":
        """At most so many, at equal distances from the first to the last."""
        return self.part(torch.linspace(0, len(self) - 1, min(most, len(self))).long())


@dataclass(frozen=True)
class Source:
    """Where a data set comes from. `load("test")` is the only way to the test images."""

    name: str
    classes: list[str]
    load: Callable[[str], Split]  # "train", "test", and "val" where the data set brings one
    splits: tuple[str, ...] = ("train", "test")
    skipped: list[str] = field(default_factory=list)  # images that could not be read
    named: bool = True  # False: the classes have only numbers
