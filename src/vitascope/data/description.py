"""Describe a data set: counts, sizes, class balance, pixel statistics, exact duplicates within and across splits."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from vitascope.data.config import DataConfig
from vitascope.data.opening import open_source
from vitascope.data.source import Split
from vitascope.data.statistics import fingerprints, mean_and_std, repeated, shared
from vitascope.errors import format_count

PREVIEW_SIZE = ((64, 64), 3)  # images of a folder are resized to this for the description


@dataclass(frozen=True)
class SplitFacts:
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
class DataFacts:
    name: str
    classes: list[str]
    splits: dict[str, SplitFacts]
    skipped: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
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
                f"  pixel values (0 to 1): mean {_numbers(facts.mean)}, std {_numbers(facts.std)}",
                f"  exact duplicates: {facts.copies:,}{also}",
            ]
        if self.skipped:
            lines.append(f"{format_count(len(self.skipped), 'image')} could not be read: {', '.join(self.skipped[:3])}")
        return "\n".join(lines)


def describe_data(name: str, root: str | None) -> DataFacts:
    """Describe every split, including the test images. Do not use the result to choose a model."""
    source = open_source(DataConfig(name=name, root=root), *PREVIEW_SIZE)
    splits = {split: source.load(split) for split in source.splits}
    prints = {split: fingerprints(part.images) for split, part in splits.items()}
    facts = {split: _facts(part, source.classes, prints[split], prints["train"]) for split, part in splits.items()}
    facts["train"] = replace(facts["train"], also_in_train=0)
    return DataFacts(source.name, source.classes, facts, source.skipped)


def _facts(split: Split, classes: list[str], prints: list[bytes], train: list[bytes]) -> SplitFacts:
    mean, std = mean_and_std(split.images)
    counts = torch.bincount(split.labels, minlength=len(classes)).tolist()
    _, channels, height, width = split.images.shape
    per_class = dict(zip(classes, counts, strict=True))
    return SplitFacts(
        len(split),
        channels,
        height,
        width,
        per_class,
        mean.tolist(),
        std.tolist(),
        repeated(prints),
        shared(train, prints),
    )


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)
