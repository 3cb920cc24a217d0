"""Open the training and validation images of a run: stratified, drawn from the seed, never overlapping."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitascope.data.config import DataConfig
from vitascope.data.dataset import DataSource, Labels, Split
from vitascope.data.open_data import open_data_source
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.statistics import compute_data_hash, compute_mean_and_std
from vitascope.errors import UserError


def split_train_validation(labels: Labels, validation_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """(training indices, validation indices): the fraction `share` of each class is held out, at least one if > 0."""
    train, held = [], []
    for members in shuffle_indices_by_class(labels, seed):
        count = max(1, round(validation_fraction * len(members))) if validation_fraction > 0 else 0
        if count >= len(members) and validation_fraction > 0:
            raise UserError(
                f"A class has only {len(members)} image(s): none would be left for training. Set data.validation=0."
            )
        held.append(members[:count])
        train.append(members[count:])
    return torch.cat(train).sort().values, torch.cat(held).sort().values


def draw_stratified_subset(labels: Labels, fraction: float, seed: int) -> Tensor:
    """Indices of the fraction `share` of each class, at least one."""
    if fraction == 1:
        return torch.arange(len(labels))
    parts = [members[: max(1, round(fraction * len(members)))] for members in shuffle_indices_by_class(labels, seed)]
    return torch.cat(parts).sort().values


def shuffle_indices_by_class(labels: Labels, seed: int) -> list[Tensor]:
    """For each class the indices of its images, shuffled with the seed."""
    generator = torch.Generator().manual_seed(seed)
    members = [(labels == number).nonzero().flatten() for number in range(int(labels.max()) + 1)]
    return [index[torch.randperm(len(index), generator=generator)] for index in members if len(index)]


@dataclass(frozen=True)
class TrainingData:
    """Without test images: only `evaluate` opens them."""

    source: DataSource
    train: Split
    validation: Split | None
    preprocessing: Preprocessing
    full_train_hash: str  # of all training images, before anything was held back

    @property
    def classes(self) -> list[str]:
        return self.source.classes


def open_training_data(config: DataConfig, image_size: tuple[int, int], num_channels: int, seed: int) -> TrainingData:
    """Split first, then take the fraction, so that every fraction has the same validation images."""
    source = open_data_source(config, image_size, num_channels)
    whole = source.load_split("train")
    if "val" in source.split_names and config.validation > 0:
        train, validation = whole, source.load_split("val")
    else:
        kept, held = split_train_validation(whole.labels, config.validation, seed)
        train, validation = whole.select(kept), (whole.select(held) if len(held) else None)
    train = train.select(draw_stratified_subset(train.labels, config.fraction, seed))
    whole_hash = compute_data_hash(whole.images, whole.labels)
    return TrainingData(source, train, validation, make_preprocessing(train, image_size, num_channels), whole_hash)


def make_preprocessing(train_split: Split, image_size: tuple[int, int], num_channels: int) -> Preprocessing:
    """Mean and deviation of the training images, in the model's channels."""
    mean, std = compute_mean_and_std(train_split.images)
    if len(mean) != num_channels:
        mean, std = (mean.mean().expand(num_channels), std.mean().expand(num_channels))
    return Preprocessing(image_size, tuple(mean.tolist()), tuple(std.tolist()))


def compute_class_weights(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """One weight per class, inverse to its frequency, 1 on average over the images."""
    counts = torch.bincount(labels, minlength=num_classes).clamp(min=1).float()
    return len(labels) / (num_classes * counts)
