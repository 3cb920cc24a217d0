"""Open the training and validation images of a run: stratified, drawn from the seed, never overlapping."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitascope.data.config import DataConfig
from vitascope.data.dataset import Dataset, DataSource, ImageSize, Labels
from vitascope.data.open_data import open_data_source
from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError, format_count


class SplitIndices(NamedTuple):
    """Indices of training and validation images, ascending."""

    train: Tensor
    validation: Tensor


def split_train_validation_indices(labels: Labels, validation_fraction: float, seed: int) -> SplitIndices:
    """Hold out `validation_fraction` of each class, at least one image per class if it is greater than 0."""
    train, validation = [], []
    for members in shuffle_indices_by_class(labels, seed):
        count = max(1, round(validation_fraction * len(members))) if validation_fraction > 0 else 0
        if count >= len(members) and validation_fraction > 0:
            raise UserError(
                f"A class has only {format_count(len(members), 'image')}: none would be left for training. "
                "Set data.validation=0."
            )
        validation.append(members[:count])
        train.append(members[count:])
    return SplitIndices(torch.cat(train).sort().values, torch.cat(validation).sort().values)


def draw_stratified_subset_indices(labels: Labels, fraction: float, seed: int) -> Tensor:
    """Return the indices of a random `fraction` of each class, at least one image per class."""
    if fraction == 1:
        return torch.arange(len(labels))
    parts = [members[: max(1, round(fraction * len(members)))] for members in shuffle_indices_by_class(labels, seed)]
    return torch.cat(parts).sort().values


def shuffle_indices_by_class(labels: Labels, seed: int) -> list[Tensor]:
    """Return for each class the indices of its images, shuffled with the seed."""
    generator = torch.Generator().manual_seed(seed)
    members = [(labels == class_index).nonzero().flatten() for class_index in range(int(labels.max()) + 1)]
    return [indices[torch.randperm(len(indices), generator=generator)] for indices in members if len(indices)]


@dataclass(frozen=True)
class TrainingData:
    """Training and validation images. Test images are opened only by `evaluate`."""

    source: DataSource
    train: Dataset
    validation: Dataset | None
    preprocessing: Preprocessing
    full_train_fingerprint: str  # of all training images, before the split

    @property
    def classes(self) -> list[str]:
        return self.source.classes


def load_train_and_validation_data(
    config: DataConfig, image_size: ImageSize, num_channels: int, seed: int
) -> TrainingData:
    """Open the data, hold out validation images, then select `fraction`: validation images do not depend on it."""
    source = open_data_source(config, image_size, num_channels)
    all_train = source.load_split("train")
    if "val" in source.split_names and config.validation > 0:
        train, validation = all_train, source.load_split("val")
    else:
        indices = split_train_validation_indices(all_train.labels, config.validation, seed)
        train = all_train.select(indices.train)
        validation = all_train.select(indices.validation) if len(indices.validation) else None
    train = train.select(draw_stratified_subset_indices(train.labels, config.fraction, seed))
    preprocessing = make_preprocessing_with_train_statistics(train, image_size, num_channels)
    return TrainingData(source, train, validation, preprocessing, all_train.fingerprint())


def make_preprocessing_with_train_statistics(
    train_split: Dataset, image_size: ImageSize, num_channels: int
) -> Preprocessing:
    """Return the preprocessing with mean and standard deviation of the training images, in the model's channels."""
    mean, std = train_split.statistics()
    if len(mean) != num_channels:
        mean, std = (mean.mean().expand(num_channels), std.mean().expand(num_channels))
    return Preprocessing(image_size, tuple(mean.tolist()), tuple(std.tolist()))


def compute_class_weights(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return one weight per class, inverse to its frequency, with mean 1 over the images."""
    counts = torch.bincount(labels, minlength=num_classes).clamp(min=1).float()
    return len(labels) / (num_classes * counts)
