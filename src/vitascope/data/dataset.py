"""The interface of a data set: classes, labels in memory, images that are fetched by index, and their statistics.

`MemoryDataset` holds all images, `data.sources.folder.FolderDataset` decodes image files when they are fetched. Results
do not depend on which of them is used. Mean and standard deviation of the pixels are computed from exact counts, and
kept on disk.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from vitascope.data.data_root import get_cache_folder, try_write_cache_file

UInt8Images = UInt8[Tensor, "image stored_channel stored_height stored_width"]
Labels = Int[Tensor, "image"]
ImageSize: TypeAlias = tuple[int, int]  # rows, columns
ImageShape: TypeAlias = tuple[int, int, int]  # channels, rows, columns
SplitName: TypeAlias = str  # "train", "val" or "test"
Indices: TypeAlias = "Tensor | slice"

MIN_STD = 1e-3  # a constant channel must not divide by zero
FETCHED_BYTES = 2**26  # of the images that are fetched at once when a whole data set is read


class ChannelStatistics(NamedTuple):
    """Mean and standard deviation per channel, of pixel values from 0 to 1."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class ImageFiles:
    """The image files of a split, in the order of its images."""

    paths: list[str]
    num_bytes: list[int]
    folder: str  # of the split; fingerprints have paths relative to it
    hash_contents: bool = False  # data.fingerprint=contents

    def select(self, positions: Sequence[int]) -> "ImageFiles":
        paths, sizes = ([values[index] for index in positions] for values in (self.paths, self.num_bytes))
        return replace(self, paths=paths, num_bytes=sizes)

    def compute_fingerprint(self, labels: Labels, image_shape: ImageShape) -> str:
        """Hash labels, image shape and file names, with the files' sizes or, with `hash_contents`, their bytes."""
        digest = hashlib.blake2b(repr(tuple(image_shape)).encode(), digest_size=8)
        for path, size in zip(self.paths, self.num_bytes, strict=True):
            name = path[len(self.folder) :].replace(os.sep, "/")
            content = hashlib.blake2b(Path(path).read_bytes()).digest() if self.hash_contents else str(size).encode()
            digest.update(os.fsencode(name) + b"\0" + content + b"\0")
        digest.update(labels.numpy().tobytes())
        return f"{'contents' if self.hash_contents else 'files'}-{digest.hexdigest()}"


class Dataset:
    """A split of a data set: `classes`, `labels` and `image_shape` are in memory, images are fetched by index."""

    classes: list[str]
    labels: Labels
    files: ImageFiles | None  # if the images were read from files

    @property
    def image_shape(self) -> ImageShape:
        """Channels, rows and columns of the images that `fetch` returns."""
        raise NotImplementedError

    def fetch(self, indices: Indices) -> UInt8Images:
        """Return the images at these indices, 0 to 255."""
        raise NotImplementedError

    def select(self, indices: Indices) -> "Dataset":
        """Return the images at these indices as a data set."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return a short text that is equal for equal data: see `data.fingerprint`."""
        return self._fingerprint

    def statistics(self) -> ChannelStatistics:
        """Return mean and standard deviation per channel. They are stored on disk by fingerprint."""
        return load_or_compute_statistics(self)

    def count_pixel_values(self) -> Int[Tensor, "channel value"]:
        """Count how often each of the 256 pixel values occurs, channel × value."""
        return torch.stack([count_pixel_values(images) for images in self.iterate_batches()]).sum(0)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> UInt8Images:
        """All images in memory."""
        return self.fetch(slice(None))

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self, MemoryDataset)

    @property
    def file_paths(self) -> list[str] | None:
        return self.files.paths if self.files else None

    def select_evenly(self, max_images: int) -> "Dataset":
        """Return at most `max_images` images, evenly spaced from the first to the last."""
        return self.select(torch.linspace(0, len(self) - 1, min(max_images, len(self))).long())

    def iterate_batches(self, batch_size: int | None = None) -> Iterator[UInt8Images]:
        """Yield all images in order, in batches that fit into memory."""
        channels, rows, columns = self.image_shape
        size = batch_size or max(1, FETCHED_BYTES // (channels * rows * columns))
        for start in range(0, len(self), size):
            yield self.fetch(slice(start, start + size))

    @cached_property
    def _fingerprint(self) -> str:
        if self.files is not None:
            return self.files.compute_fingerprint(self.labels, self.image_shape)
        return hash_images_and_labels(self.images, self.labels)

    def _convert_indices_to_positions(self, indices: Indices) -> Sequence[int]:
        return range(len(self))[indices] if isinstance(indices, slice) else indices.tolist()


@dataclass(frozen=True)
class MemoryDataset(Dataset):
    """Images and labels in memory."""

    pixels: UInt8Images
    labels: Labels
    classes: list[str] = field(default_factory=list)
    files: ImageFiles | None = None

    @property
    def image_shape(self) -> ImageShape:
        channels, rows, columns = self.pixels.shape[1:]
        return channels, rows, columns

    @property
    def images(self) -> UInt8Images:
        return self.pixels

    def fetch(self, indices: Indices) -> UInt8Images:
        return self.pixels[indices]

    def select(self, indices: Indices) -> "MemoryDataset":
        files = self.files.select(self._convert_indices_to_positions(indices)) if self.files else None
        return MemoryDataset(self.pixels[indices], self.labels[indices], self.classes, files)


def hash_images_and_labels(images: UInt8Images, labels: Tensor) -> str:
    """Return one hash of these images and labels in this order."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(images.contiguous().numpy().data)
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()


def has_fingerprint(dataset: Dataset, fingerprint: str) -> bool:
    """Return whether a data set is the one with this fingerprint. Older versions hashed the pixels of files, too."""
    if fingerprint == dataset.fingerprint():
        return True
    is_pixel_hash = "-" not in fingerprint
    return (
        is_pixel_hash
        and dataset.files is not None
        and (fingerprint == hash_images_and_labels(dataset.images, dataset.labels))
    )


class ListedImages(NamedTuple):
    """The image files of a split, and their labels; some of the files may be unreadable."""

    paths: list[str]
    labels: Labels


@dataclass(frozen=True)
class DataSource:
    """An opened data set. Test images are read only by `load_split("test")`."""

    name: str
    classes: list[str]
    load_split: Callable[[SplitName], Dataset]  # one of split_names
    split_names: tuple[SplitName, ...] = ("train", "test")
    skipped_paths: list[str] = field(default_factory=list)  # images that could not be read
    list_files: Callable[[SplitName], ListedImages] | None = None  # of a folder, without decoding; None: arrays
    has_class_names: bool = True  # False: the names are class indices
    notes: list[str] = field(default_factory=list)  # sentences about images that are not used


def count_pixel_values(images: UInt8Images) -> Int[Tensor, "channel value"]:
    """Count how often each of the 256 pixel values occurs, channel × value."""
    return torch.stack([torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])])


def compute_mean_and_std(counts: Tensor) -> ChannelStatistics:
    """Compute the statistics from the counts of pixel values. Integers are summed without rounding errors."""
    values = torch.arange(256, dtype=torch.float64) / 255
    frequencies = counts.double() / counts.sum(1, keepdim=True)
    mean = frequencies @ values
    std = ((frequencies * (values - mean[:, None]) ** 2).sum(1)).sqrt()
    return ChannelStatistics(mean.float(), std.float().clamp(min=MIN_STD))


def compute_pixel_mean_and_std(images: UInt8Images) -> ChannelStatistics:
    """Compute mean and standard deviation per channel of images in memory."""
    return compute_mean_and_std(count_pixel_values(images))


def load_or_compute_statistics(dataset: Dataset) -> ChannelStatistics:
    """Return the statistics that are stored for the data set's fingerprint, or compute and store them."""
    path = get_cache_folder() / "statistics" / f"{dataset.fingerprint()}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return ChannelStatistics(torch.tensor(stored["mean"]), torch.tensor(stored["std"]))
    except (OSError, ValueError, KeyError, TypeError):
        statistics = compute_mean_and_std(dataset.count_pixel_values())
    try_write_cache_file(path, {"mean": statistics.mean.tolist(), "std": statistics.std.tolist()})
    return statistics
