"""Open the data set that a DataConfig names, and the training and validation images of a run.

A data set is a published one, a folder (with class folders or a table of labels) or an .npz file. The split is
stratified and drawn from the seed; training and validation images never overlap.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitascope.data.config import DataConfig
from vitascope.data.data_root import choose_data_root, find_first_existing
from vitascope.data.dataset import Dataset, DataSource, ImageSize, Labels
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sources.arrays import open_builtin_digits, open_npz_data_source
from vitascope.data.sources.folder import open_image_folder
from vitascope.data.sources.label_table import TABLE_SUFFIXES, find_label_table, open_labelled_folder
from vitascope.data.sources.named import PUBLISHED_DATASETS, open_or_download_published_dataset
from vitascope.errors import UserError, format_count, suggest_choice


def make_data_paths_absolute(config: DataConfig) -> DataConfig:
    """Resolve relative paths and the data root, so that the setting is valid in every working directory."""
    if config.name == "digits":
        return config
    if config.name in PUBLISHED_DATASETS:
        return replace(config, root=str(choose_data_root(config.root).resolve()))
    path = _choose_path_as_given_or_under_root(config)
    labels = str(find_label_table(config.labels, path).resolve()) if config.labels else None
    return replace(config, name=str(path.resolve()), labels=labels)


def check_data_name_exists(config: DataConfig) -> None:
    """Raise an error if no data set has this name. The data itself is not read."""
    if (
        config.name != "digits"
        and config.name not in PUBLISHED_DATASETS
        and not _choose_path_as_given_or_under_root(config).exists()
    ):
        kind = "file" if Path(config.name).suffix else "folder"
        suggestion = suggest_choice(config.name, ["digits", *PUBLISHED_DATASETS])
        places = dict.fromkeys((str(Path.cwd()), str(choose_data_root(config.root))))
        raise UserError(
            f"There is no data set and no {kind} named '{config.name}' in {' or '.join(places)}. {suggestion} "
            f"To use your own data, give the path of its {kind} (in training: data.name={kind.upper()})."
        )


def open_data_by_name_or_path(
    config: DataConfig, image_size: ImageSize, num_channels: int, *, must_be_trainable: bool = True
) -> DataSource:
    """Open the data set. Images of a folder are converted to `image_size` and `num_channels`.

    With `must_be_trainable=False`, a single class or a test split alone is accepted."""
    path, min_classes = _choose_path_as_given_or_under_root(config), 2 if must_be_trainable else 1
    is_published = config.name in ("digits", *PUBLISHED_DATASETS)
    if config.labels and (is_published or path.is_file()):
        raise UserError(
            f"data.labels={config.labels} needs a folder of images, but data.name={config.name} has its own labels. "
            "Set data.name to the folder of the images."
        )
    if config.name == "digits":
        return open_builtin_digits()
    if is_published:
        return open_or_download_published_dataset(config.name, choose_data_root(config.root), download=config.download)
    check_data_name_exists(config)
    if config.labels or (path.is_file() and path.suffix in TABLE_SUFFIXES):
        folder = path.parent if path.is_file() else path
        table = find_label_table(config.labels, folder) if config.labels else path
        return open_labelled_folder(folder, table, image_size, num_channels, config, min_classes)
    if path.is_dir():
        return open_image_folder(path, image_size, num_channels, config, min_classes)
    if path.is_file() and path.suffix == ".npz":
        return open_npz_data_source(path, must_be_trainable=must_be_trainable)
    raise UserError(
        f"data.name={config.name} is neither a folder of class folders nor an .npz file nor a table of labels (.csv)."
    )


def _choose_path_as_given_or_under_root(config: DataConfig) -> Path:
    """Return `name` as a path, or the folder or file of that name under the data root."""
    path = Path(config.name).expanduser()
    return path if path.exists() else find_first_existing([choose_data_root(config.root) / config.name]) or path


class SplitIndices(NamedTuple):
    """Indices of training and validation images, ascending."""

    train: Tensor
    validation: Tensor


MAX_NAMED_CLASSES = 5
MIN_IMAGES_PER_CLASS = 5  # classes with fewer are named: a single image of them is held out for validation


def split_train_validation_indices(
    labels: Labels, validation_fraction: float, seed: int, class_names: list[str] | None = None
) -> SplitIndices:
    """Hold out `validation_fraction` of each class, at least one image per class if it is greater than 0.

    `class_names`: for the error if nothing of a class would be left."""
    train, validation = [], []
    for members in shuffle_indices_by_class(labels, seed):
        count = max(1, round(validation_fraction * len(members))) if validation_fraction > 0 else 0
        if count >= len(members) and validation_fraction > 0:
            class_index = int(labels[members[0]])
            name = class_names[class_index] if class_names else str(class_index)
            raise UserError(
                f"The class {name} has only {format_count(len(members), 'image')}: none would be left for training. "
                "Add images, remove the class, or set data.validation=0."
            )
        validation.append(members[:count])
        train.append(members[count:])
    return SplitIndices(torch.cat(train).sort().values, torch.cat(validation).sort().values)


def describe_classes_with_few_images(class_names: list[str], num_images_per_class: list[int]) -> str | None:
    """Name the classes with too few images to learn and validate them; None if there are none."""
    pairs = zip(class_names, num_images_per_class, strict=True)
    few = [f"{name} ({count})" for name, count in pairs if count < MIN_IMAGES_PER_CLASS]
    if not few:
        return None
    more = f" and {len(few) - MAX_NAMED_CLASSES} more" if len(few) > MAX_NAMED_CLASSES else ""
    return f"classes with fewer than {MIN_IMAGES_PER_CLASS} images: {', '.join(few[:MAX_NAMED_CLASSES])}{more}"


def draw_stratified_subset_indices(labels: Labels, fraction: float, seed: int) -> Int[Tensor, "selected"]:
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
    few_images_note: str | None = None  # classes with few images, before the split

    @property
    def classes(self) -> list[str]:
        return self.source.classes


def load_train_and_validation_data(
    config: DataConfig, image_size: ImageSize, num_channels: int, seed: int
) -> TrainingData:
    """Open the data, hold out validation images, then select `fraction`: validation images do not depend on it."""
    source = open_data_by_name_or_path(config, image_size, num_channels)
    all_train = source.load_split("train")
    if "val" in source.split_names and config.validation > 0:
        train, validation = all_train, source.load_split("val")
    else:
        indices = split_train_validation_indices(all_train.labels, config.validation, seed, source.classes)
        train = all_train.select(indices.train)
        validation = all_train.select(indices.validation) if len(indices.validation) else None
    train = train.select(draw_stratified_subset_indices(train.labels, config.fraction, seed))
    preprocessing = make_preprocessing_with_train_statistics(train, image_size, num_channels)
    counts = torch.bincount(all_train.labels, minlength=len(source.classes)).tolist()
    note = describe_classes_with_few_images(source.classes, counts)
    return TrainingData(source, train, validation, preprocessing, all_train.fingerprint(), note)


def make_preprocessing_with_train_statistics(
    train_split: Dataset, image_size: ImageSize, num_channels: int
) -> Preprocessing:
    """Return the preprocessing with mean and standard deviation of the training images, in the model's channels."""
    mean, std = train_split.statistics()
    if len(mean) != num_channels:
        mean, std = (mean.mean().expand(num_channels), std.mean().expand(num_channels))
    return Preprocessing(image_size, tuple(mean.tolist()), tuple(std.tolist()))


def compute_class_weights(labels: torch.Tensor, num_classes: int) -> Float[Tensor, "class"]:
    """Return one weight per class, inverse to its frequency, with mean 1 over the images."""
    counts = torch.bincount(labels, minlength=num_classes).clamp(min=1).float()
    return len(labels) / (num_classes * counts)
