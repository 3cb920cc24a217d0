"""Read a folder of class folders: any image that Pillow reads, rotated by EXIF, cropped to shape and resized."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vitascope.data.dataset import DataSource, ImageSize, Split, SplitName
from vitascope.errors import UserError

SPLIT_FOLDER_NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
MAX_GRAY_DIFFERENCE = 16  # of 255: channels of a gray image may differ by this much because of compression
NON_IMAGE_SUFFIXES = (".csv", ".db", ".ini", ".json", ".md", ".txt", ".xml", ".yaml", ".yml")


def open_image_folder(
    path: Path, image_size: ImageSize, num_channels: int, *, strict: bool, min_classes: int = 2
) -> DataSource:
    """Open PATH/class/image, or PATH/train/class/image with optional val/ and test/ folders."""
    candidates = {split: _find_split_folder(path, names) for split, names in SPLIT_FOLDER_NAMES.items()}
    folders = {split: folder for split, folder in candidates.items() if folder}
    folders = folders if "train" in folders else {"train": path}
    classes = sorted(entry.name for entry in _list_class_folders(folders["train"]))
    if len(classes) < min_classes:
        required = "at least two class folders" if min_classes == 2 else "at least one class folder"
        raise UserError(f"{folders['train']} needs {required}; it has {', '.join(classes) or 'none'}.")
    for split, folder in folders.items():
        _check_class_folders(folder, split, classes)
    reader = ImageFolderReader(folders, classes, image_size, num_channels, strict)
    return DataSource(path.resolve().name, classes, reader.load_split, tuple(folders), reader.skipped_paths)


@dataclass(frozen=True)
class ImageFolderReader:
    """Read the splits of an image folder. Images that cannot be read are added to `skipped_paths`."""

    split_folders: dict[SplitName, Path]
    class_names: list[str]
    image_size: ImageSize
    num_channels: int
    strict: bool  # an image that cannot be read is an error
    skipped_paths: list[str] = field(default_factory=list)

    def load_split(self, split_name: SplitName) -> Split:
        """Read all images of a split."""
        folder = self.split_folders[split_name]
        files = [
            (file, label)
            for label, name in enumerate(self.class_names)
            for file in list_possible_image_files(folder / name)
        ]
        with ThreadPoolExecutor() as pool:
            results = list(
                pool.map(lambda item: read_image_or_error_reason(item[0], self.image_size, self.num_channels), files)
            )
        self._report_unreadable([file for file, _ in files], results)
        readable = [(image, *item) for image, item in zip(results, files, strict=True) if isinstance(image, Tensor)]
        _check_no_empty_class(folder, self.class_names, [label for _, _, label in readable])
        images, paths, labels = zip(*readable, strict=True)
        return Split(torch.stack(images), torch.tensor(labels), [str(path) for path in paths])

    def _report_unreadable(self, files: list[Path], results: list["Tensor | UnreadableImage"]) -> None:
        """Record the files that cannot be read, or raise an error if `strict`."""
        unreadable = [
            (file, result) for file, result in zip(files, results, strict=True) if isinstance(result, UnreadableImage)
        ]
        if unreadable and self.strict:
            file, result = unreadable[0]
            raise UserError(
                f"{file} cannot be read ({result.reason}). In all, {len(unreadable)} image(s) cannot be read. "
                "To skip them, set data.strict=false."
            )
        self.skipped_paths.extend(str(file) for file, _ in unreadable if str(file) not in self.skipped_paths)


class UnreadableImage(NamedTuple):
    """Why an image file cannot be read."""

    reason: str


def read_image_or_error_reason(path: Path, image_size: ImageSize, num_channels: int) -> Tensor | UnreadableImage:
    """Return the image, or the reason why it cannot be read."""
    try:
        return read_image(path, image_size, num_channels)
    except Image.UnidentifiedImageError:
        return UnreadableImage("unknown image format")
    except Image.DecompressionBombError:
        return UnreadableImage("it is too large")
    except (OSError, ValueError, SyntaxError, RuntimeError):
        return UnreadableImage("it is damaged or truncated")


def read_image(path: Path, image_size: ImageSize, num_channels: int) -> Tensor:
    """Read one file as uint8, channel × rows × columns."""
    with Image.open(path) as file:
        return crop_and_resize_pil_image(file, image_size, num_channels)


def crop_and_resize_pil_image(pil_image: Image.Image, image_size: ImageSize, num_channels: int) -> Tensor:
    """Rotate by EXIF, centre-crop to the aspect ratio, and resize (bicubic)."""
    image = _convert_to_8bit_opaque(ImageOps.exif_transpose(pil_image))
    image = image.convert("L" if num_channels == 1 else "RGB")
    image = ImageOps.fit(image, (image_size[1], image_size[0]), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, dtype=np.uint8).reshape(*image_size, num_channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def read_image_size(path: Path) -> ImageSize:
    """Return rows and columns of an image file, after rotation by EXIF."""
    with Image.open(path) as file:
        width, height = ImageOps.exif_transpose(file).size
    return height, width


def image_file_has_colour(path: Path) -> bool:
    """Return whether the image has colours. A gray image may be stored in a colour file."""
    with Image.open(path) as file:
        pixels = np.asarray(_convert_to_8bit_opaque(file).convert("RGB").resize((32, 32)), dtype=np.int16)
    return bool(np.ptp(pixels, axis=2).max() > MAX_GRAY_DIFFERENCE)


def _convert_to_8bit_opaque(image: Image.Image) -> Image.Image:
    """Convert to 8 bits: 16-bit and float images keep their range, transparent images get a white background."""
    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, dtype=np.float64)
        top = 65535.0 if image.mode.startswith("I;16") or values.max() > 255 else 255.0
        top = 1.0 if image.mode == "F" and values.max() <= 1 else top
        return Image.fromarray((values.clip(0, top) * (255.0 / top)).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def _find_split_folder(path: Path, folder_names: tuple[str, ...]) -> Path | None:
    """Return the first folder of these names that contains folders: a class may be called train."""
    folders = (path / name for name in folder_names if (path / name).is_dir())
    return next((folder for folder in folders if any(_list_class_folders(folder))), None)


def _list_class_folders(path: Path) -> Iterator[Path]:
    return (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith((".", "__")))


def list_possible_image_files(path: Path) -> list[Path]:
    """List all files below `path` except known other types. Files that cannot be read are reported later."""
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in files if file.suffix.lower() not in NON_IMAGE_SUFFIXES)


def _check_class_folders(split_folder: Path, split_name: SplitName, class_names: list[str]) -> None:
    folder_names = sorted(entry.name for entry in _list_class_folders(split_folder))
    if folder_names != class_names:
        other = sorted(set(folder_names) ^ set(class_names))
        raise UserError(
            f"The {split_name} split {split_folder} must have the same classes as train. "
            f"Found in only one of them: {', '.join(other[:5])}."
        )


def _check_no_empty_class(split_folder: Path, class_names: list[str], labels: list[int]) -> None:
    empty = [name for index, name in enumerate(class_names) if index not in set(labels)]
    if empty:
        raise UserError(
            f"{split_folder} has no readable image for {', '.join(empty[:5])}. Add images or remove the class folder."
        )
