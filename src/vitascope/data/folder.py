"""Read a folder of class folders: any image that Pillow reads, rotated by EXIF, cropped to shape and resized."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vitascope.data.source import Source, Split
from vitascope.errors import UserError

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
GREYISH = 16  # of 255: how far the channels of a grey image may lie apart, by its compression
NOT_IMAGES = (".csv", ".db", ".ini", ".json", ".md", ".txt", ".xml", ".yaml", ".yml")


def folder(path: Path, size: tuple[int, int], channels: int, *, strict: bool, fewest: int = 2) -> Source:
    """PATH/class/image, or PATH/train/class/image beside val/ and test/. Sizes are (rows, columns)."""
    parts = {split: _first_folder(path, names) for split, names in SPLITS.items()}
    parts = {split: found for split, found in parts.items() if found} if parts["train"] else {"train": path}
    classes = sorted(entry.name for entry in _class_folders(parts["train"]))
    if len(classes) < fewest:
        least = "at least two class folders" if fewest == 2 else "at least one class folder"
        raise UserError(f"{parts['train']} needs {least}; it has {', '.join(classes) or 'none'}.")
    for split, place in parts.items():
        _check_classes(place, split, classes)
    skipped: list[str] = []
    load = partial(_load, parts, classes, size, channels, skipped, strict)
    return Source(path.resolve().name, classes, load, tuple(parts), skipped)


def _load(
    parts: dict[str, Path],
    classes: list[str],
    size: tuple[int, int],
    channels: int,
    skipped: list[str],
    strict: bool,
    split: str,
) -> Split:
    files = [(file, label) for label, name in enumerate(classes) for file in image_files(parts[split] / name)]
    with ThreadPoolExecutor() as pool:
        read = list(pool.map(lambda item: try_image(item[0], size, channels), files))
    broken = [(file, reason) for (file, _), reason in zip(files, read, strict=True) if isinstance(reason, str)]
    if broken and strict:
        raise UserError(
            f"{broken[0][0]} cannot be read ({broken[0][1]}). In all, {len(broken)} image(s) cannot be read. "
            "To skip them, set data.strict=false."
        )
    skipped.extend(str(file) for file, _ in broken if str(file) not in skipped)
    kept = [(image, *item) for image, item in zip(read, files, strict=True) if isinstance(image, Tensor)]
    _check_full(parts[split], classes, [label for _, _, label in kept])
    images, paths, labels = zip(*kept, strict=True)
    return Split(torch.stack(images), torch.tensor(labels), [str(path) for path in paths])


def try_image(path: Path, size: tuple[int, int], channels: int) -> Tensor | str:
    """Return the image, or the reason why it cannot be read."""
    try:
        return read_image(path, size, channels)
    except Image.UnidentifiedImageError:
        return "unknown image format"
    except Image.DecompressionBombError:
        return "it is too large"
    except (OSError, ValueError, SyntaxError, RuntimeError):
        return "it is damaged or truncated"


def read_image(path: Path, size: tuple[int, int], channels: int) -> Tensor:
    """One file -> uint8, channel × rows × columns."""
    with Image.open(path) as file:
        return read_picture(file, size, channels)


def read_picture(picture: Image.Image, size: tuple[int, int], channels: int) -> Tensor:
    """EXIF turned upright, centre-cropped to shape, resized (bicubic)."""
    image = _eight_bit(ImageOps.exif_transpose(picture))
    image = image.convert("L" if channels == 1 else "RGB")
    image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, dtype=np.uint8).reshape(*size, channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def read_size(path: Path) -> tuple[int, int]:
    """Rows and columns of an image file, turned upright."""
    with Image.open(path) as file:
        width, height = ImageOps.exif_transpose(file).size
    return height, width


def has_colour(path: Path) -> bool:
    """Whether the image is more than shades of grey; a file saved in colours may be grey all the same."""
    with Image.open(path) as file:
        pixels = np.asarray(_eight_bit(file).convert("RGB").resize((32, 32)), dtype=np.int16)
    return bool(np.ptp(pixels, axis=2).max() > GREYISH)


def _eight_bit(image: Image.Image) -> Image.Image:
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


def _first_folder(path: Path, names: tuple[str, ...]) -> Path | None:
    """A split is a folder of folders: a class may be called train."""
    found = (path / name for name in names if (path / name).is_dir())
    return next((place for place in found if any(_class_folders(place))), None)


def _class_folders(path: Path) -> Iterator[Path]:
    return (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith((".", "__")))


def image_files(path: Path) -> list[Path]:
    """All files below `path` except known other types. Files that cannot be read are reported later."""
    found = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in found if file.suffix.lower() not in NOT_IMAGES)


def _check_classes(place: Path, split: str, classes: list[str]) -> None:
    found = sorted(entry.name for entry in _class_folders(place))
    if found != classes:
        other = sorted(set(found) ^ set(classes))
        raise UserError(
            f"The {split} split {place} must have the same classes as train. "
            f"Found in only one of them: {', '.join(other[:5])}."
        )


def _check_full(place: Path, classes: list[str], labels: list[int]) -> None:
    empty = [name for number, name in enumerate(classes) if number not in set(labels)]
    if empty:
        raise UserError(
            f"{place} has no readable image for {', '.join(empty[:5])}. Add images or remove the class folder."
        )
