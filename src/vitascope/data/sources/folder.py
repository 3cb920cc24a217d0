"""Read a folder of class folders: any image that Pillow reads, rotated by EXIF, cropped to shape and resized."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vitascope.data.dataset import DataSource, Split
from vitascope.errors import UserError

SPLIT_FOLDER_NAMES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
MAX_GRAY_DIFFERENCE = 16  # of 255: how far the channels of a grey image may lie apart, by its compression
NON_IMAGE_SUFFIXES = (".csv", ".db", ".ini", ".json", ".md", ".txt", ".xml", ".yaml", ".yml")


def open_image_folder(
    path: Path, image_size: tuple[int, int], num_channels: int, *, strict: bool, min_classes: int = 2
) -> DataSource:
    """PATH/class/image, or PATH/train/class/image beside val/ and test/. Sizes are (rows, columns)."""
    parts = {split: _find_split_folder(path, names) for split, names in SPLIT_FOLDER_NAMES.items()}
    parts = {split: found for split, found in parts.items() if found} if parts["train"] else {"train": path}
    classes = sorted(entry.name for entry in _list_class_folders(parts["train"]))
    if len(classes) < min_classes:
        least = "at least two class folders" if min_classes == 2 else "at least one class folder"
        raise UserError(f"{parts['train']} needs {least}; it has {', '.join(classes) or 'none'}.")
    for split, place in parts.items():
        _check_class_folders(place, split, classes)
    skipped: list[str] = []
    load = partial(_load_split, parts, classes, image_size, num_channels, skipped, strict)
    return DataSource(path.resolve().name, classes, load, tuple(parts), skipped)


def _load_split(
    split_folders: dict[str, Path],
    class_names: list[str],
    image_size: tuple[int, int],
    num_channels: int,
    skipped_paths: list[str],
    strict: bool,
    split_name: str,
) -> Split:
    files = [
        (file, label)
        for label, name in enumerate(class_names)
        for file in list_image_files(split_folders[split_name] / name)
    ]
    with ThreadPoolExecutor() as pool:
        read = list(pool.map(lambda item: try_read_image(item[0], image_size, num_channels), files))
    broken = [(file, reason) for (file, _), reason in zip(files, read, strict=True) if isinstance(reason, str)]
    if broken and strict:
        raise UserError(
            f"{broken[0][0]} cannot be read ({broken[0][1]}). In all, {len(broken)} image(s) cannot be read. "
            "To skip them, set data.strict=false."
        )
    skipped_paths.extend(str(file) for file, _ in broken if str(file) not in skipped_paths)
    kept = [(image, *item) for image, item in zip(read, files, strict=True) if isinstance(image, Tensor)]
    _check_no_empty_class(split_folders[split_name], class_names, [label for _, _, label in kept])
    images, paths, labels = zip(*kept, strict=True)
    return Split(torch.stack(images), torch.tensor(labels), [str(path) for path in paths])


def try_read_image(path: Path, image_size: tuple[int, int], num_channels: int) -> Tensor | str:
    """Return the image, or the reason why it cannot be read."""
    try:
        return read_image(path, image_size, num_channels)
    except Image.UnidentifiedImageError:
        return "unknown image format"
    except Image.DecompressionBombError:
        return "it is too large"
    except (OSError, ValueError, SyntaxError, RuntimeError):
        return "it is damaged or truncated"


def read_image(path: Path, image_size: tuple[int, int], num_channels: int) -> Tensor:
    """One file -> uint8, channel × rows × columns."""
    with Image.open(path) as file:
        return convert_pil_image(file, image_size, num_channels)


def convert_pil_image(pil_image: Image.Image, image_size: tuple[int, int], num_channels: int) -> Tensor:
    """EXIF turned upright, centre-cropped to shape, resized (bicubic)."""
    image = _convert_to_8bit(ImageOps.exif_transpose(pil_image))
    image = image.convert("L" if num_channels == 1 else "RGB")
    image = ImageOps.fit(image, (image_size[1], image_size[0]), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, dtype=np.uint8).reshape(*image_size, num_channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def read_size(path: Path) -> tuple[int, int]:
    """Rows and columns of an image file, turned upright."""
    with Image.open(path) as file:
        width, height = ImageOps.exif_transpose(file).size
    return height, width


def has_colour(path: Path) -> bool:
    """Whether the image is more than shades of grey; a file saved in colours may be grey all the same."""
    with Image.open(path) as file:
        pixels = np.asarray(_convert_to_8bit(file).convert("RGB").resize((32, 32)), dtype=np.int16)
    return bool(np.ptp(pixels, axis=2).max() > MAX_GRAY_DIFFERENCE)


def _convert_to_8bit(image: Image.Image) -> Image.Image:
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
    """A split is a folder of folders: a class may be called train."""
    found = (path / name for name in folder_names if (path / name).is_dir())
    return next((place for place in found if any(_list_class_folders(place))), None)


def _list_class_folders(path: Path) -> Iterator[Path]:
    return (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith((".", "__")))


def list_image_files(path: Path) -> list[Path]:
    """All files below `path` except known other types. Files that cannot be read are reported later."""
    found = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in found if file.suffix.lower() not in NON_IMAGE_SUFFIXES)


def _check_class_folders(split_folder: Path, split_name: str, class_names: list[str]) -> None:
    found = sorted(entry.name for entry in _list_class_folders(split_folder))
    if found != class_names:
        other = sorted(set(found) ^ set(class_names))
        raise UserError(
            f"The {split_name} split {split_folder} must have the same classes as train. "
            f"Found in only one of them: {', '.join(other[:5])}."
        )


def _check_no_empty_class(split_folder: Path, class_names: list[str], labels: list[int]) -> None:
    empty = [name for number, name in enumerate(class_names) if number not in set(labels)]
    if empty:
        raise UserError(
            f"{split_folder} has no readable image for {', '.join(empty[:5])}. Add images or remove the class folder."
        )
