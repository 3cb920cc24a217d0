"""Describe a data set: counts, sizes, class balance, mean and standard deviation per channel, exact duplicates."""

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from vitascope.data.config import DataConfig
from vitascope.data.dataset import Dataset, ImageSize, SplitName, UInt8Images
from vitascope.data.open_data import describe_classes_with_few_images, open_data_by_name_or_path
from vitascope.data.sources.folder import describe_unreadable_files, image_file_is_grayscale, read_image_size
from vitascope.errors import format_count

Fingerprint: TypeAlias = bytes  # hash of one image's pixels


def hash_each_image(images: UInt8Images) -> list[Fingerprint]:
    """Return one hash per image; equal images have equal hashes."""
    return [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest() for image in images]


def count_duplicates(fingerprints: list[Fingerprint]) -> int:
    """Count the images that are copies of an earlier image."""
    return sum(count - 1 for count in Counter(fingerprints).values())


def count_label_conflicts(fingerprints: list[Fingerprint], labels: list[int]) -> int:
    """Count the copies of an earlier image whose label differs from the first image's."""
    first_labels: dict[Fingerprint, int] = {}
    pairs = zip(fingerprints, labels, strict=True)
    return sum(first_labels.setdefault(fingerprint, label) != label for fingerprint, label in pairs)


def count_also_in_reference(reference_fingerprints: list[Fingerprint], fingerprints: list[Fingerprint]) -> int:
    """Count the images in `fingerprints` that also occur in `reference_fingerprints`."""
    reference = set(reference_fingerprints)
    return sum(fingerprint in reference for fingerprint in fingerprints)


PREVIEW_SIZE = ((64, 64), 3)  # default size and channels of a folder's images in the description and the preview
PREVIEW_SIZE_NOTE = "(for another size, add model.img_size=…)"


class FileSizes(NamedTuple):
    """Rows and columns of the images with the fewest, the median and the most pixels, before resizing."""

    smallest: ImageSize
    median: ImageSize
    largest: ImageSize

    @property
    def text(self) -> str:
        """For example "64×64 to 416×500 pixels (height × width), median 300×400"."""
        ends = dict.fromkeys((self.smallest, self.largest))
        text = f"{' to '.join(map(_format_size, ends))} pixels"
        text += "" if all(height == width for height, width in self) else " (height × width)"
        return text if len(ends) == 1 else f"{text}, median {_format_size(self.median)}"


def measure_file_sizes(paths: list[str]) -> FileSizes:
    """Read the sizes of image files, rotated by EXIF, from the beginning of each file."""
    sizes = sorted((read_image_size(Path(path)) for path in paths), key=lambda size: (size[0] * size[1], size))
    return FileSizes(sizes[0], sizes[len(sizes) // 2], sizes[-1])


def format_size_with_note(size: ImageSize) -> str:
    """Return for example "224×224"; for the default size also the setting that changes it."""
    return f"{_format_size(size)} {PREVIEW_SIZE_NOTE if size == PREVIEW_SIZE[0] else ''}".rstrip()


@dataclass(frozen=True)
class SplitSummary:
    """Facts about one split; written as JSON."""

    images: int
    channels: int
    height: int
    width: int
    per_class: dict[str, int]
    mean: list[float]
    std: list[float]
    copies: int  # images equal to an earlier one of the same split
    also_in_train: int
    copies_with_other_label: int = 0  # of the copies: those whose label differs from the first image's
    also_in_val: int = 0
    sizes: list[ImageSize] = field(default_factory=list)  # smallest and largest image, before resizing
    median_size: ImageSize | None = None  # of the image with the median number of pixels, before resizing
    grayscale_files: int = 0  # image files without colours, which are converted to `channels`

    @property
    def formatted_image_size(self) -> str:
        """For example "28×28 pixels, 1 channel", or the sizes of the files and the size after resizing."""
        resized = (self.height, self.width)
        smallest, largest = self.sizes or [resized, resized]
        text = f"{FileSizes(smallest, self.median_size or smallest, largest).text}, "
        text += format_count(self.channels, "channel")
        if {smallest, largest} != {resized}:
            text += f"; statistics and duplicates after resizing to {format_size_with_note(resized)}"
        if self.grayscale_files:
            is_all, verb = self.grayscale_files == self.images, "is" if self.grayscale_files == 1 else "are"
            files = "all files are" if is_all else f"{self.grayscale_files:,} of {self.images:,} files {verb}"
            text += f"; {files} grayscale and {'are' if is_all else verb} read as {self.channels} equal channels"
        return text


@dataclass(frozen=True)
class DataSummary:
    """Facts about a data set; written as JSON."""

    name: str
    classes: list[str]
    splits: dict[str, SplitSummary]
    skipped: list[str]
    notes: list[str] = field(default_factory=list)  # about images and rows of a table that are not used

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def format_text(self) -> str:
        """Return a text of a few lines per split."""
        class_names = ", ".join(self.classes[:12]) + (", …" if len(self.classes) > 12 else "")
        lines = [f"{self.name}: {len(self.classes)} classes ({class_names})"]
        for split_name, split in self.splits.items():
            counts = list(split.per_class.values())
            count_range = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
            imbalance = "" if max(counts) < 1.5 * min(counts) else " (imbalanced: try data.balance=loss or sampling)"
            few = describe_classes_with_few_images(self.classes, counts)
            lines += [
                f"{split_name}: {split.images:,} images, {split.formatted_image_size}",
                f"  images per class: {count_range}{imbalance}",
                *([f"  {few}"] if few and split_name == "train" else []),
                f"  pixel values (0 to 1): mean {_format_values(split.mean)}, std {_format_values(split.std)}",
                f"  exact duplicates: {self._format_duplicates(split_name)}",
            ]
        lines += self.notes
        if self.skipped:
            lines.append(describe_unreadable_files(self.skipped))
        return "\n".join(lines)

    def _format_duplicates(self, split_name: str) -> str:
        split = self.splits[split_name]
        text = f"{split.copies:,}"
        if split.copies_with_other_label:
            text += f" (with different labels: {split.copies_with_other_label:,})"
        if split_name != "train":
            text += f"; also in the training split: {split.also_in_train:,}"
        if split_name == "test" and "val" in self.splits:
            text += f"; also in the validation split: {split.also_in_val:,}"
        return text


def open_and_summarize_all_splits(
    data_name: str,
    data_folder: str | None,
    image_size: ImageSize = PREVIEW_SIZE[0],
    num_channels: int = PREVIEW_SIZE[1],
    config: DataConfig | None = None,
) -> DataSummary:
    """Describe every split, including the test images. Do not use the result to choose a model.

    Images of a folder are resized to `image_size`. `config`: other settings of the data, such as data.labels."""
    config = replace(config or DataConfig(), name=data_name, root=data_folder, memory=inf)
    source = open_data_by_name_or_path(config, image_size, num_channels)
    splits = {name: source.load_split(name) for name in source.split_names}
    fingerprints = {name: hash_each_image(split.images) for name, split in splits.items()}
    summaries = {name: _summarize_split(name, split, source.classes, fingerprints) for name, split in splits.items()}
    return DataSummary(source.name, source.classes, summaries, source.skipped_paths, source.notes)


def _summarize_split(
    split_name: SplitName,
    split: Dataset,
    class_names: list[str],
    fingerprints_by_split: dict[SplitName, list[Fingerprint]],
) -> SplitSummary:
    """Describe one split; `fingerprints_by_split` has those of every split."""
    mean, std = split.statistics()
    counts = torch.bincount(split.labels, minlength=len(class_names)).tolist()
    channels, height, width = split.image_shape
    per_class = dict(zip(class_names, counts, strict=True))
    sizes = measure_file_sizes(split.file_paths) if split.file_paths else FileSizes(*[(height, width)] * 3)
    return SplitSummary(
        images=len(split),
        channels=channels,
        height=height,
        width=width,
        per_class=per_class,
        mean=mean.tolist(),
        std=std.tolist(),
        copies=count_duplicates(fingerprints_by_split[split_name]),
        also_in_train=0
        if split_name == "train"
        else _count_images_also_in_split("train", split_name, fingerprints_by_split),
        copies_with_other_label=count_label_conflicts(fingerprints_by_split[split_name], split.labels.tolist()),
        also_in_val=_count_images_also_in_split("val", split_name, fingerprints_by_split)
        if split_name == "test"
        else 0,
        sizes=[sizes.smallest, sizes.largest],
        median_size=sizes.median,
        grayscale_files=_count_grayscale_files(split) if channels == 3 else 0,
    )


def _count_grayscale_files(split: Dataset) -> int:
    """Count the image files without colours by their format; a gray image in a colour file is not counted."""
    return sum(image_file_is_grayscale(Path(path)) for path in split.file_paths or [])


def _format_size(size: ImageSize) -> str:
    return "×".join(map(str, size))


def _count_images_also_in_split(
    reference_split: SplitName, split_name: SplitName, fingerprints: dict[SplitName, list[Fingerprint]]
) -> int:
    return count_also_in_reference(fingerprints.get(reference_split, []), fingerprints[split_name])


def _format_values(values: list[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)
