"""Images of a folder that does not fit into memory: worker processes decode them when they are fetched.

Which files can be read, and the counts of their pixel values, are found in one pass, whose result is kept on disk.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from vitascope.data.data_root import get_cache_folder, try_write_cache_file
from vitascope.data.dataset import Dataset, ImageFiles, ImageShape, Indices, Labels, UInt8Images, count_pixel_values
from vitascope.data.decoding import DecodedFiles, ImageFormat, UnreadableByIndex, UnreadableImage, decode_files
from vitascope.errors import UserError

GIBIBYTE = 2**30
DEFAULT_FREE_MEMORY = 8 * GIBIBYTE  # where the system does not tell how much is free
MEMORY_FRACTION = 0.5  # of the free memory, for images
SCAN_BATCH_SIZE = 2048  # files that are decoded at once to scan a folder


class FolderDataset(Dataset):
    """Images that worker processes decode when they are fetched."""

    def __init__(self, files: ImageFiles, labels: Labels, classes: list[str], image_format: ImageFormat) -> None:
        self.image_files = self.files = files
        self.labels, self.classes, self.image_format = labels, classes, image_format
        self.histogram: Tensor | None = None  # the result of `count_pixel_values`, once it is known
        self.parent: FolderDataset | None = None  # the data set that this one was selected from
        self.positions: Sequence[int] = ()  # of the images in the parent

    @property
    def image_shape(self) -> ImageShape:
        return self.image_format

    def fetch(self, indices: Indices) -> UInt8Images:
        paths = [self.image_files.paths[index] for index in self._convert_indices_to_positions(indices)]
        decoded = decode_files_or_raise(paths, self.image_format, use_workers=True)
        if decoded.unreadable:
            index, error = next(iter(decoded.unreadable.items()))
            raise UserError(f"{paths[index]} could be read before, but now it cannot ({error.reason}).")
        return torch.from_numpy(decoded.pixels)

    def select(self, indices: Indices) -> "FolderDataset":
        positions = self._convert_indices_to_positions(indices)
        selected = FolderDataset(
            self.image_files.select(positions), self.labels[indices], self.classes, self.image_format
        )
        selected.parent, selected.positions = self, positions
        return selected

    def count_pixel_values(self) -> Int[Tensor, "channel value"]:
        """Count pixel values. Of a large part of a data set, only the images that are left out are decoded."""
        if self.histogram is None:
            self.histogram = self._count_pixel_values_by_difference_from_parent()
        return self.histogram

    def _count_pixel_values_by_difference_from_parent(self) -> Int[Tensor, "channel value"]:
        if self.parent is None or 2 * len(self) < len(self.parent):
            return super().count_pixel_values()
        left_out = sorted(set(range(len(self.parent))) - set(self.positions))
        if not left_out:
            return self.parent.count_pixel_values()
        rest = self.parent.select(torch.tensor(left_out))
        return self.parent.count_pixel_values() - Dataset.count_pixel_values(rest)


class FolderScan(NamedTuple):
    """The files that cannot be read, by index, and the counts of the pixel values of all others."""

    unreadable: UnreadableByIndex
    histogram: Tensor


def load_cached_or_compute_folder_scan(files: ImageFiles, labels: Labels, image_format: ImageFormat) -> FolderScan:
    """Decode all files once and keep the result on disk; load it if the same files were scanned before."""
    key = hashlib.blake2b(files.compute_fingerprint(labels, image_format).encode(), digest_size=8)
    cache_path = get_cache_folder() / "folders" / f"{key.hexdigest()}.json"
    try:
        stored = json.loads(cache_path.read_text(encoding="utf-8"))
        unreadable = {int(index): UnreadableImage(reason) for index, reason in stored["unreadable"].items()}
        return FolderScan(unreadable, torch.tensor(stored["histogram"]))
    except (OSError, ValueError, KeyError, AttributeError):
        scan = _scan_folder(files, image_format)
    reasons = {index: error.reason for index, error in scan.unreadable.items()}
    try_write_cache_file(cache_path, {"unreadable": reasons, "histogram": scan.histogram.tolist()})
    return scan


def _scan_folder(files: ImageFiles, image_format: ImageFormat) -> FolderScan:
    unreadable: UnreadableByIndex = {}
    histogram = torch.zeros(image_format.channels, 256, dtype=torch.long)
    for start in range(0, len(files.paths), SCAN_BATCH_SIZE):
        decoded = decode_files_or_raise(files.paths[start : start + SCAN_BATCH_SIZE], image_format, use_workers=True)
        unreadable |= {start + index: error for index, error in decoded.unreadable.items()}
        readable = [index for index in range(len(decoded.pixels)) if index not in decoded.unreadable]
        histogram += count_pixel_values(torch.from_numpy(decoded.pixels[readable]))
    return FolderScan(unreadable, histogram)


def decode_files_or_raise(paths: list[str], image_format: ImageFormat, *, use_workers: bool) -> DecodedFiles:
    try:
        return decode_files(paths, image_format, use_workers=use_workers)
    except (EOFError, BrokenPipeError) as error:
        raise UserError(
            "A process that reads image files ended too early. Usually the memory is too small: close other programs."
        ) from error


def fits_into_memory(num_images: int, image_format: ImageFormat, max_gibibytes: float | None) -> bool:
    """Return whether the decoded images need at most `max_gibibytes`; None: half of the free memory."""
    limit = MEMORY_FRACTION * _get_free_memory_bytes() if max_gibibytes is None else max_gibibytes * GIBIBYTE
    return num_images * image_format.channels * image_format.rows * image_format.columns <= limit


def _get_free_memory_bytes() -> int:
    """Return the bytes of memory that programs can still get."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return DEFAULT_FREE_MEMORY
