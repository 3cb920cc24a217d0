"""Look at a data set before training: number of images, true sizes, colours, classes and splits. Decodes few files."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import torch

from vitascope.data.config import POLICIES, DataConfig
from vitascope.data.dataset import DataSource, ImageShape, ImageSize, Labels, SplitName
from vitascope.data.open_data import check_data_name_exists, open_data_by_name_or_path
from vitascope.data.sources.folder import image_file_has_colour, read_image_size
from vitascope.errors import UserError

MAX_SIZED_FILES, MAX_COLOUR_FILES = 200, 32  # files of a folder whose size is read, and whose colours are looked at
LISTING_SIZE = (32, 32)  # a folder is opened at this size to list its files; nothing is decoded
FEW_IMAGES = 1000  # with fewer, a fifth is held out for validation, so that the accuracy is known more precisely
FEW_IMAGES_VALIDATION = 0.2


@dataclass(frozen=True)
class ImageFacts:
    """What the choice of settings depends on. Image sizes are those of the files, before resizing."""

    data_name: str  # data.name
    class_counts: tuple[int, ...]  # training images per class, before validation images are held out
    image_size: ImageSize  # median rows and columns of a sample
    num_channels: int  # 1 if no image of the sample has colours
    num_own_validation: int = 0  # images of the data set's own validation split
    has_test: bool = False
    validation: float = 0.1  # data.validation
    fraction: float = 1.0  # data.fraction
    has_default_augmentation: bool = False  # a published data set, whose augmentation is known
    counts_are_files: bool = False  # some of the counted files may turn out to be unreadable

    @property
    def num_classes(self) -> int:
        return len(self.class_counts)

    @property
    def short_side(self) -> int:
        return min(self.image_size)

    @property
    def num_validation(self) -> int:
        if self.num_own_validation or not self.validation:
            return self.num_own_validation if self.validation else 0
        return sum(max(1, round(self.validation * count)) for count in self.class_counts)

    @property
    def num_images_after_holdout(self) -> int:
        """Training images without those that are held out, after data.fraction."""
        held_out = 0 if self.num_own_validation else self.num_validation
        return max(self.num_classes, round(self.fraction * (sum(self.class_counts) - held_out)))


def collect_image_facts(config: DataConfig, *, is_validation_given: bool) -> ImageFacts:
    """Look at the data set. Without a given data.validation, few images have a larger part held out."""
    check_data_name_exists(config)
    source = open_data_by_name_or_path(config, LISTING_SIZE, 3)
    paths, labels, image_shape = _list_paths_labels_and_shape(source, "train")
    if paths is not None:  # the true sizes and colours are those of the files
        num_channels = 3 if _have_colours(_choose_evenly(paths, MAX_COLOUR_FILES)) else 1
        image_size = _compute_median_size(paths, config.name)
    else:
        num_channels, *image_size = image_shape
    facts = ImageFacts(
        data_name=config.name,
        class_counts=tuple(torch.bincount(labels, minlength=len(source.classes)).tolist()),
        image_size=(image_size[0], image_size[1]),
        num_channels=num_channels,
        num_own_validation=len(_list_paths_labels_and_shape(source, "val").labels)
        if "val" in source.split_names
        else 0,
        has_test="test" in source.split_names,
        validation=config.validation,
        fraction=config.fraction,
        has_default_augmentation=config.name in POLICIES,
        counts_are_files=paths is not None,
    )
    if not is_validation_given and not facts.num_own_validation and sum(facts.class_counts) < FEW_IMAGES:
        return replace(facts, validation=FEW_IMAGES_VALIDATION)
    return facts


class _ListedSplit(NamedTuple):
    """The files of a split (None: arrays), its labels, and the shape of images in arrays."""

    paths: list[str] | None
    labels: Labels
    image_shape: ImageShape


def _list_paths_labels_and_shape(source: DataSource, split_name: SplitName) -> _ListedSplit:
    """List the images of a split; of a folder without decoding them."""
    if source.list_files is not None:
        paths, labels = source.list_files(split_name)
        return _ListedSplit(paths, labels, (3, *LISTING_SIZE))
    split = source.load_split(split_name)
    return _ListedSplit(split.file_paths, split.labels, split.image_shape)


def _compute_median_size(paths: Sequence[str], data_name: str) -> ImageSize:
    """Return the median rows and columns of evenly chosen files."""
    sizes = _read_sizes(_choose_evenly(paths, MAX_SIZED_FILES))
    if not sizes:
        raise UserError(f"{data_name}: none of the files can be read as an image. Check the folder.")
    return median_low(rows for rows, _ in sizes), median_low(columns for _, columns in sizes)


def _choose_evenly(paths: Sequence[str], max_paths: int) -> list[str]:
    return (
        [paths[index * len(paths) // max_paths] for index in range(max_paths)] if len(paths) > max_paths else [*paths]
    )


def _read_sizes(paths: list[str]) -> list[ImageSize]:
    """Return the sizes of the files that can be read."""
    sizes = []
    for path in paths:
        with suppress(OSError, ValueError, SyntaxError):
            sizes.append(read_image_size(Path(path)))
    return sizes


def _have_colours(paths: list[str]) -> bool:
    """Return whether any of the files that can be read has colours."""
    for path in paths:
        with suppress(OSError, ValueError, SyntaxError, RuntimeError):
            if image_file_has_colour(Path(path)):
                return True
    return False
