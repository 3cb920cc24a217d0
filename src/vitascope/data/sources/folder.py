"""Read a folder of class folders: any image that Pillow reads, rotated by EXIF, cropped to shape and resized.

A folder that fits into memory (`data.memory`) is decoded once, a larger one whenever images are fetched.
"""

import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from vitascope.data.config import DataConfig
from vitascope.data.dataset import (
    Dataset,
    DataSource,
    ImageFiles,
    ImageSize,
    Labels,
    ListedImages,
    MemoryDataset,
    SplitName,
)
from vitascope.data.decoding import (
    MAX_INLINE_BYTES,
    ImageFormat,
    UnreadableByIndex,
    UnreadableImage,
    convert_to_8bit_opaque,
    crop_and_resize_pil_image_to_array,
    decode_image_or_error_reason,
    open_image_header,
    open_image_within_limit,
)
from vitascope.data.sources.folder_dataset import (
    FolderDataset,
    decode_files_or_raise,
    fits_into_memory,
    load_cached_or_compute_folder_scan,
)
from vitascope.errors import UserError, format_count

SPLIT_FOLDER_NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
MAX_GRAY_DIFFERENCE = 16  # of 255: channels of a gray image may differ by this much because of compression
GRAYSCALE_MODES = ("1", "L", "LA", "I", "I;16", "F")  # Pillow's modes of images without colours
EXIF_QUARTER_TURNS = (5, 6, 7, 8)  # orientations that exchange rows and columns
NON_IMAGE_SUFFIXES = (".csv", ".db", ".ini", ".json", ".md", ".txt", ".xml", ".yaml", ".yml")


class ListedFile(NamedTuple):
    """A file below a class folder."""

    path: str
    num_bytes: int


def open_image_folder(
    path: Path, image_size: ImageSize, num_channels: int, config: DataConfig, min_classes: int = 2
) -> DataSource:
    """Open PATH/class/image, or PATH/train/class/image with optional val/ and test/ folders."""
    candidates = {split: _find_split_folder(path, names) for split, names in SPLIT_FOLDER_NAMES.items()}
    folders = {split: folder for split, folder in candidates.items() if folder}
    folders = folders if "train" in folders else {"train": path}
    classes = sorted(entry.name for entry in _list_class_folders(folders["train"]))
    if len(classes) < min_classes:
        required = "at least two class folders" if min_classes == 2 else "at least one class folder"
        contents = ", ".join(classes) if classes else _describe_folder_without_classes(folders["train"])
        hint = (
            _suggest_inner_folder(folders["train"])
            if classes
            else " If a table lists the class of each file, set data.labels=TABLE."
        )
        raise UserError(f"{folders['train']} needs {required}; it has {contents}.{hint}")
    if unprintable := next((name for name in classes if not name.isprintable()), None):
        raise UserError(f"The class folder {unprintable!r} has a control character in its name. Rename the folder.")
    for split, folder in folders.items():
        _check_class_folders(folder, split, classes)
    image_format = make_image_format(num_channels, image_size)

    def list_split(split: SplitName) -> LabelledFiles:
        return _list_files_of_class_folders(folders[split], classes)

    reader = ImageFolderReader(list_split, classes, image_format, config)
    name = path.resolve().name
    return DataSource(name, classes, reader.load_split, tuple(folders), reader.skipped_paths, reader.list_files)


def make_image_format(num_channels: int, image_size: ImageSize) -> ImageFormat:
    """Return the format in which image files are decoded. Reject numbers of channels that they cannot have."""
    if num_channels not in (1, 3):
        raise UserError(
            f"model.in_chans={num_channels} is not possible for image files. Choose 1 (grayscale) or 3 (RGB)."
        )
    return ImageFormat(num_channels, *image_size)


class LabelledFiles(NamedTuple):
    """The files of a split below a folder, and their class indices."""

    folder: Path
    files: list[ListedFile]
    labels: Labels


def _list_files_of_class_folders(folder: Path, class_names: list[str]) -> LabelledFiles:
    listed = [list_image_files(folder / name) for name in class_names]
    labels = torch.repeat_interleave(torch.tensor([len(files_of_class) for files_of_class in listed]))
    return LabelledFiles(folder, [file for files_of_class in listed for file in files_of_class], labels)


@dataclass(frozen=True)
class ImageFolderReader:
    """Read the splits of an image folder. Images that cannot be read are added to `skipped_paths`."""

    list_split: Callable[[SplitName], LabelledFiles]
    class_names: list[str]
    image_format: ImageFormat
    config: DataConfig
    skipped_paths: list[str] = field(default_factory=list)

    def list_files(self, split_name: SplitName) -> ListedImages:
        """List the files of a split and their labels, without decoding."""
        _, files, labels = self.list_split(split_name)
        return ListedImages([file.path for file in files], labels)

    def load_split(self, split_name: SplitName) -> Dataset:
        """Read all images of a split, or only find out which can be read if they do not fit into memory."""
        folder, files, labels = self.list_split(split_name)
        paths, sizes = [file.path for file in files], [file.num_bytes for file in files]
        image_files = ImageFiles(paths, sizes, str(folder), self.config.fingerprint == "contents")
        if fits_into_memory(len(files), self.image_format, self.config.memory):
            decoded = decode_files_or_raise(paths, self.image_format, use_workers=sum(sizes) > MAX_INLINE_BYTES)
            readable = self._record_unreadable_and_get_readable_indices(paths, decoded.unreadable)
            dataset: Dataset = MemoryDataset(torch.from_numpy(decoded.pixels), labels, self.class_names, image_files)
            dataset = dataset if len(readable) == len(files) else dataset.select(readable)
        else:
            scan = load_cached_or_compute_folder_scan(image_files, labels, self.image_format)
            readable = self._record_unreadable_and_get_readable_indices(paths, scan.unreadable)
            selected_files = image_files.select(readable.tolist())
            dataset = FolderDataset(selected_files, labels[readable], self.class_names, self.image_format)
            dataset.histogram = scan.histogram
        if not (self.config.labels and split_name != "train"):  # a table may have no test images of a class
            _check_no_empty_class(folder, self.class_names, dataset.labels)
        return dataset

    def _record_unreadable_and_get_readable_indices(self, paths: list[str], unreadable: UnreadableByIndex) -> Tensor:
        """Record the files that cannot be read, or raise an error if `strict`. Return the indices of the others."""
        if unreadable and self.config.strict:
            index, error = next(iter(unreadable.items()))
            raise UserError(
                f"{paths[index]} cannot be read ({error.reason}). In all, {format_count(len(unreadable), 'image')} "
                "cannot be read. To skip them, set data.strict=false."
            )
        self.skipped_paths.extend(paths[index] for index in unreadable if paths[index] not in self.skipped_paths)
        return torch.tensor([index for index in range(len(paths)) if index not in unreadable], dtype=torch.long)


def read_image_or_error_reason(path: Path, image_size: ImageSize, num_channels: int) -> Tensor | UnreadableImage:
    """Return the image, or the reason why it cannot be read."""
    image = decode_image_or_error_reason(path, ImageFormat(num_channels, *image_size))
    return image if isinstance(image, UnreadableImage) else torch.from_numpy(image)


def crop_and_resize_pil_image(pil_image: Image.Image, image_size: ImageSize, num_channels: int) -> Tensor:
    """Rotate by EXIF, centre-crop to the aspect ratio, and resize (bicubic)."""
    return torch.from_numpy(crop_and_resize_pil_image_to_array(pil_image, ImageFormat(num_channels, *image_size)))


def read_image_size(path: Path) -> ImageSize:
    """Return rows and columns of an image file, after rotation by EXIF."""
    with warnings.catch_warnings(action="ignore"), open_image_header(path) as file:
        width, height = file.size
        is_rotated = file.getexif().get(ExifTags.Base.Orientation) in EXIF_QUARTER_TURNS
    return (width, height) if is_rotated else (height, width)


def image_file_is_grayscale(path: Path) -> bool:
    """Return whether the file's format stores no colours."""
    with open_image_header(path) as file:
        return file.mode in GRAYSCALE_MODES


def image_file_has_colour(path: Path) -> bool:
    """Return whether the image has colours. A gray image may be stored in a colour file."""
    with open_image_within_limit(path) as file:
        pixels = np.asarray(convert_to_8bit_opaque(file).convert("RGB").resize((32, 32)), dtype=np.int16)
    return bool(np.ptp(pixels, axis=2).max() > MAX_GRAY_DIFFERENCE)


def describe_unreadable_files(paths: list[str]) -> str:
    """Say how many files could not be read, with up to three of them."""
    start, examples = f"{format_count(len(paths), 'file')} could not be read as an image", ", ".join(paths[:3])
    if len(paths) > 1:
        start = start.replace("an image", "images")
    return f"{start}{', for example' if len(paths) > 3 else ''}: {examples}"


def _find_split_folder(path: Path, folder_names: tuple[str, ...]) -> Path | None:
    """Return the first folder of these names that contains folders: a class may be called train."""
    folders = (path / name for name in folder_names if (path / name).is_dir())
    return next((folder for folder in folders if any(_list_class_folders(folder))), None)


def _describe_folder_without_classes(path: Path) -> str:
    """Return 'nothing', or the number of files that are in no class folder."""
    count = sum(entry.is_file() and _may_be_image(entry.name) for entry in path.iterdir())
    return f"{format_count(count, 'file')}, but no class folder" if count else "no images and no class folder"


def _suggest_inner_folder(path: Path) -> str:
    """Suggest the folder with the class folders if it is wrapped in others, as in photos/photos/CLASS; else nothing."""
    inner, train_folder = path, None
    while len(subfolders := sorted(_list_class_folders(train_folder or inner))) == 1 and train_folder is None:
        if any(map(Path.is_file, subfolders[0].iterdir())):
            return ""
        inner = subfolders[0]
        train_folder = _find_split_folder(inner, SPLIT_FOLDER_NAMES["train"])
    if inner == path or len(subfolders) < 2:
        return ""
    names = ", ".join(folder.name for folder in subfolders[:3]) + (", …" if len(subfolders) > 3 else "")
    level, name = format_count(len(inner.parts) - len(path.parts), "level"), shlex.quote(str(inner))
    return (
        f" The class folders ({names}) are {level} down: give {name} instead (vitascope train {name}, or with a "
        f"recipe data.name={name}), and see what is there with: vitascope data describe {name}"
    )


def _list_class_folders(path: Path) -> Iterator[Path]:
    return (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith((".", "__")))


def list_image_files(folder: Path) -> list[ListedFile]:
    """List all files below `folder` except known other types, with their sizes, sorted by path."""

    def walk(path: str) -> Iterator[ListedFile]:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from walk(entry.path)
                elif _may_be_image(entry.name) and entry.is_file():
                    yield ListedFile(entry.path, entry.stat().st_size)

    return sorted(walk(str(folder)), key=lambda file: Path(file.path).parts)


def _may_be_image(file_name: str) -> bool:
    return not file_name.startswith(".") and not file_name.lower().endswith(NON_IMAGE_SUFFIXES)


def list_possible_image_files(path: Path) -> list[Path]:
    """List all files below `path` except known other types. Files that cannot be read are reported later."""
    return [Path(file.path) for file in list_image_files(path)]


def describe_ignored_files(paths: Iterable[Path]) -> str:
    """Return a sentence that counts the files in these folders that are ignored because of their ending, or ""."""
    endings = [
        file.suffix.lower()
        for folder in paths
        if folder.is_dir()
        for file in folder.rglob("*")
        if not file.name.startswith(".") and file.suffix.lower() in NON_IMAGE_SUFFIXES and file.is_file()
    ]
    verb, kind = ("is", "another type") if len(endings) == 1 else ("are", "other types")
    return f"{format_count(len(endings), 'file')} of {kind} {verb} ignored ({', '.join(sorted(set(endings)))})." * bool(
        endings
    )


def _check_class_folders(split_folder: Path, split_name: SplitName, class_names: list[str]) -> None:
    folder_names = sorted(entry.name for entry in _list_class_folders(split_folder))
    if folder_names != class_names:
        other = sorted(set(folder_names) ^ set(class_names))
        raise UserError(
            f"The {split_name} split {split_folder} must have the same classes as train. "
            f"Found in only one of them: {', '.join(other[:5])}."
        )


def _check_no_empty_class(split_folder: Path, class_names: list[str], labels: Labels) -> None:
    counts = torch.bincount(labels, minlength=len(class_names)).tolist()
    empty = [name for name, count in zip(class_names, counts, strict=True) if not count]
    if empty:
        raise UserError(
            f"{split_folder} has no readable image for {', '.join(empty[:5])}. Add images or remove the class."
        )
