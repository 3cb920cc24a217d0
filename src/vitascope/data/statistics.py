"""Describe a data set: counts, sizes, class balance, mean and standard deviation per channel, exact duplicates."""

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitascope.data.config import DataConfig
from vitascope.data.dataset import Split, UInt8Images
from vitascope.data.open_data import open_data_source
from vitascope.errors import format_count


def compute_mean_and_std(images: UInt8Images) -> tuple[Tensor, Tensor]:
    """Per channel, of pixels scaled to 0…1; from integer histograms, so no rounding however many images there are."""
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(images[:, c].flatten().int(), minlength=256) for c in range(images.shape[1])])
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = shares @ values
    std = ((shares * (values - mean[:, None]) ** 2).sum(1)).sqrt()
    return mean.float(), std.float().clamp(min=1e-3)  # a constant channel must not divide by zero


def compute_fingerprints(images: UInt8Images) -> list[bytes]:
    """One short hash per image: equal images, equal hashes."""
    return [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest() for image in images]


def count_duplicates(fingerprints: list[bytes]) -> int:
    """How many images are copies of an earlier one."""
    return sum(count - 1 for count in Counter(fingerprints).values())


def count_shared_images(reference_fingerprints: list[bytes], fingerprints: list[bytes]) -> int:
    """How many of `others` also occur in `prints`."""
    known = set(reference_fingerprints)
    return sum(print_ in known for print_ in fingerprints)


def compute_data_hash(images: UInt8Images, labels: Tensor) -> str:
    """One short name for exactly these images and labels in this order."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(images.numpy().tobytes())
    digest.update(labels.numpy().tobytes())
    return digest.hexdigest()


PREVIEW_SIZE = ((64, 64), 3)  # images of a folder are resized to this for the description


@dataclass(frozen=True)
class SplitSummary:
    images: int
    channels: int
    height: int
    width: int
    per_class: dict[str, int]
    mean: list[float]
    std: list[float]
    copies: int  # images equal to an earlier one of the same split
    also_in_train: int


@dataclass(frozen=True)
class DataSummary:
    name: str
    classes: list[str]
    splits: dict[str, SplitSummary]
    skipped: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def format_text(self) -> str:
        shown = ", ".join(self.classes[:12]) + (", …" if len(self.classes) > 12 else "")
        lines = [f"{self.name}: {len(self.classes)} classes ({shown})"]
        for split, facts in self.splits.items():
            counts = list(facts.per_class.values())
            unequal = "" if max(counts) < 1.5 * min(counts) else " (imbalanced: see data.balance)"
            also = "" if split == "train" else f"; also in the training split: {facts.also_in_train:,}"
            channels = format_count(facts.channels, "channel")
            lines += [
                f"{split}: {facts.images:,} images, {facts.height}×{facts.width}, {channels}",
                f"  images per class: {min(counts):,} to {max(counts):,}{unequal}",
                f"  pixel values (0 to 1): mean {_format_values(facts.mean)}, std {_format_values(facts.std)}",
                f"  exact duplicates: {facts.copies:,}{also}",
            ]
        if self.skipped:
            lines.append(f"{format_count(len(self.skipped), 'image')} could not be read: {', '.join(self.skipped[:3])}")
        return "\n".join(lines)


def summarize_data(data_name: str, data_folder: str | None) -> DataSummary:
    """Describe every split, including the test images. Do not use the result to choose a model."""
    source = open_data_source(DataConfig(name=data_name, root=data_folder), *PREVIEW_SIZE)
    splits = {split: source.load_split(split) for split in source.split_names}
    prints = {split: compute_fingerprints(part.images) for split, part in splits.items()}
    facts = {
        split: _summarize_split(part, source.classes, prints[split], prints["train"]) for split, part in splits.items()
    }
    facts["train"] = replace(facts["train"], also_in_train=0)
    return DataSummary(source.name, source.classes, facts, source.skipped_paths)


def _summarize_split(
    split: Split, class_names: list[str], fingerprints: list[bytes], train_fingerprints: list[bytes]
) -> SplitSummary:
    mean, std = compute_mean_and_std(split.images)
    counts = torch.bincount(split.labels, minlength=len(class_names)).tolist()
    _, channels, height, width = split.images.shape
    per_class = dict(zip(class_names, counts, strict=True))
    return SplitSummary(
        len(split),
        channels,
        height,
        width,
        per_class,
        mean.tolist(),
        std.tolist(),
        count_duplicates(fingerprints),
        count_shared_images(train_fingerprints, fingerprints),
    )


def _format_values(values: list[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)
