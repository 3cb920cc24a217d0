"""Read paths, Pillow images, arrays or tensors as images of the shape of the run's training images."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitascope.data.folder import image_files, read_picture, try_image
from vitascope.data.source import UInt8Images
from vitascope.errors import UserError, format_count
from vitascope.run.files import read_json

EXPLAINED = "explanations.json"  # lists the files that `vitascope explain` wrote
Stored = tuple[int, int, int]  # channels, rows, columns


@dataclass(frozen=True)
class Pictures:
    """Images in order, their file names if they came from files, and the files that could not be read."""

    images: UInt8Images
    files: list[str] | None = None
    broken: list[str] = field(default_factory=list)


def read_files(paths: Iterable[Path], stored: Stored) -> Pictures:
    """Read files and folders. A named file must be readable; a folder must have at least one readable image."""
    check_readable(stored)
    kept: list[Tensor] = []
    files: list[str] = []
    broken: list[str] = []
    for path, named in _expanded(paths):
        image = try_image(path, (stored[1], stored[2]), stored[0])
        if isinstance(image, Tensor):
            kept.append(image)
            files.append(str(path))
        elif named:
            raise UserError(f"{path} cannot be read as an image ({image}).")
        else:
            broken.append(str(path))
    if not kept:
        raise UserError(f"No readable image among {format_count(len(broken), 'file')}, e.g. {broken[0]}.")
    return Pictures(torch.stack(kept), files, broken)


def as_stored(images: Any, stored: Stored) -> Pictures:
    """Convert the argument of `predict` to stored images."""
    if isinstance(images, str | os.PathLike | Image.Image):
        images = [images]
    if isinstance(images, np.ndarray):
        return Pictures(_fitted(_from_array(images, stored), stored))
    if isinstance(images, Tensor):
        return Pictures(_fitted(images, stored))
    items = list(images) if isinstance(images, Iterable) else [images]
    if not items:
        raise UserError("No images were given.")
    if all(isinstance(item, str | os.PathLike) for item in items):
        return read_files([Path(item) for item in items], stored)
    if all(isinstance(item, Image.Image) for item in items):
        check_readable(stored)
        return Pictures(torch.stack([read_picture(item, (stored[1], stored[2]), stored[0]) for item in items]))
    if all(isinstance(item, np.ndarray | Tensor) for item in items):
        tensors = [item if isinstance(item, Tensor) else _from_array(item, stored) for item in items]
        return Pictures(torch.cat([_fitted(tensor, stored) for tensor in tensors]))
    raise UserError(f"Images must be paths, Pillow images, arrays or tensors, not {type(items[0]).__name__}.")


def check_readable(stored: Stored) -> None:
    if stored[0] not in (1, 3):
        raise UserError(
            f"The model needs {stored[0]} channels; image files have 1 or 3. Pass tensors of shape {list(stored)}."
        )


def _expanded(paths: Iterable[Path]) -> list[tuple[Path, bool]]:
    """Return each file and whether it was named itself; folders are expanded to their files."""
    found = []
    for path in paths:
        if path.is_dir():
            ours = {told.parent / name for told in path.rglob(EXPLAINED) for name in _written(told)}
            inside = [file for file in image_files(path) if file not in ours]
            if not inside:
                raise UserError(f"The folder {path} contains no images.")
            found += [(file, False) for file in inside]
        elif path.is_file():
            found.append((path, True))
        else:
            raise UserError(f"There is no file or folder {path}.")
    return found


def _written(told: Path) -> list[str]:
    """Return the names of the figures that `vitascope explain` wrote, which are not input images."""
    files = read_json(told).get("files", [])
    return [Path(str(file)).name for file in files] if isinstance(files, list) else []


def _from_array(array: np.ndarray, stored: Stored) -> Tensor:
    """Convert an array with channels last (rows × columns × 1 to 4), or a batch, to a tensor with channels first."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.ndim == 2:
        return tensor[None]
    if tensor.ndim == 3 and tensor.shape[-1] <= 4:
        return tensor.permute(2, 0, 1)
    if tensor.ndim == 3 and stored[0] == 1:
        return tensor[:, None]
    if tensor.ndim == 4 and tensor.shape[-1] <= 4:
        return tensor.permute(0, 3, 1, 2)
    raise UserError(
        f"An array of shape {list(array.shape)} is not an image. Arrays need channels last: rows × columns × 1 to 4. "
        "Tensors need channels first."
    )


def _fitted(images: Tensor, stored: Stored) -> UInt8Images:
    """Return bytes of the stored shape. Other shapes are cropped, resized and put on white, like image files."""
    images = _bytes(images)
    if tuple(images.shape[1:]) == stored:
        return images
    check_readable(stored)
    if images.shape[1] not in (1, 2, 3, 4):
        raise UserError(f"The images have {images.shape[1]} channels; 1 to 4 are possible.")
    arrays = (image.permute(1, 2, 0).squeeze(-1).numpy() for image in images)
    pictures = (Image.fromarray(array) if images.shape[1] != 2 else Image.fromarray(array, "LA") for array in arrays)
    return torch.stack([read_picture(picture, (stored[1], stored[2]), stored[0]) for picture in pictures])


def _bytes(images: Tensor) -> UInt8Images:
    """Return bytes from 0 to 255, from bytes or from floats between 0 and 1."""
    images = images.detach().cpu()
    if images.ndim == 3:
        images = images[None]
    if images.ndim != 4 or not images.numel():
        raise UserError(f"Images must have shape (batch ×) channels × rows × columns, not {list(images.shape)}.")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point() or not 0 <= float(images.min()) <= float(images.max()) <= 1:
        raise UserError(
            "predict needs images that are not normalised: bytes from 0 to 255, or floats from 0 to 1. "
            "For normalised images call the model itself: model(images)."
        )
    return (images * 255).round().byte()
