"""Open the training and validation images of a run, with class names and normalisation."""

from dataclasses import dataclass

import torch

from vitascope.data.config import DataConfig
from vitascope.data.opening import open_source
from vitascope.data.preparation import Preparation
from vitascope.data.source import Source, Split
from vitascope.data.split import stratified_part, validation_split
from vitascope.data.statistics import data_hash, mean_and_std


@dataclass(frozen=True)
class TrainingData:
    """Without test images: only `evaluate` opens them."""

    source: Source
    train: Split
    validation: Split | None
    preparation: Preparation
    whole_hash: str  # of all training images, before anything was held back

    @property
    def classes(self) -> list[str]:
        return self.source.classes


def open_training_data(config: DataConfig, size: tuple[int, int], channels: int, seed: int) -> TrainingData:
    """Split first, then take the fraction, so that every fraction has the same validation images."""
    source = open_source(config, size, channels)
    whole = source.load("train")
    if "val" in source.splits and config.validation > 0:
        train, validation = whole, source.load("val")
    else:
        kept, held = validation_split(whole.labels, config.validation, seed)
        train, validation = whole.part(kept), (whole.part(held) if len(held) else None)
    train = train.part(stratified_part(train.labels, config.fraction, seed))
    whole_hash = data_hash(whole.images, whole.labels)
    return TrainingData(source, train, validation, preparation_for(train, size, channels), whole_hash)


def preparation_for(train: Split, size: tuple[int, int], channels: int) -> Preparation:
    """Mean and deviation of the training images, in the model's channels."""
    mean, std = mean_and_std(train.images)
    if len(mean) != channels:
        mean, std = (mean.mean().expand(channels), std.mean().expand(channels))
    return Preparation(size, tuple(mean.tolist()), tuple(std.tolist()))


def class_weights(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """One weight per class, inverse to its frequency, 1 on average over the images."""
    counts = torch.bincount(labels, minlength=classes).clamp(min=1).float()
    return len(labels) / (classes * counts)
