"""Paths, Pillow images, arrays or tensors -> images as the run's training images were stored."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitascope.data.folder import image_files, read_picture, try_image
from vitascope.data.source import UInt8Images
from vitascope.errors import UserError

Stored = tuple[int, int, int]  # channels, rows, columns


def files_in(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """(files named themselves, files found in named folders), each once, in order."""
    named: dict[Path, None] = {}
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            inside = image_files(path)
            if not inside:
                raise UserError(f"The folder {path} has no images in it.")
            found.update(dict.fromkeys(inside))
        elif path.is_file():
            named[path] = None
        else:
            raise UserError(f"There is no file or folder {path}.")
    return list(named), [path for path in found if path not in named]


def read_files(paths: Iterable[Path], stored: Stored) -> tuple[UInt8Images, list[str], list[str]]:
    """(images, their files, files that could not be read). A file named itself must be readable; in a folder some
    may not be, but one must."""
    named, found = files_in(paths)
    check_readable(stored)
    kept: list[Tensor] = []
    names: list[str] = []
    broken: list[str] = []
    for path in [*named, *found]:
        image = try_image(path, (stored[1], stored[2]), stored[0])
        if isinstance(image, Tensor):
            kept.append(image)
            names.append(str(path))
        elif path in named:
            raise UserError(f"{path} cannot be read as an image ({image}).")
        else:
            broken.append(str(path))
    if not kept:
        raise UserError(f"None of the {len(broken)} file(s) can be read as an image, such as {broken[0]}.")
    return torch.stack(kept), names, broken


def as_stored(images: Any, stored: Stored) -> tuple[UInt8Images, list[str] | None]:
    """What a caller hands to `predict`, and file names where there are some."""
    if isinstance(images, str | os.PathLike):
        images = [images]
    if isinstance(images, Image.Image):
        images = [images]
    if isinstance(images, np.ndarray):
        images = _tensor_of(images)
    if isinstance(images, Tensor):
        return _checked(images), None
    items = list(images)
    if not items:
        raise UserError("There are no images to look at.")
    if all(isinstance(item, str | os.PathLike) for item in items):
        return read_files([Path(item) for item in items], stored)[:2]
    if all(isinstance(item, Image.Image) for item in items):
        check_readable(stored)
        return torch.stack([read_picture(item, (stored[1], stored[2]), stored[0]) for item in items]), None
    if all(isinstance(item, np.ndarray | Tensor) for item in items):
        parts = [_checked(_tensor_of(item) if isinstance(item, np.ndarray) else item) for item in items]
        if len({part.shape[1:] for part in parts}) > 1:
            raise UserError("The images have different shapes. Give them one by one, or as files.")
        return torch.cat(parts), None
    raise UserError(f"Images are paths, Pillow images, arrays or tensors; these are {type(items[0]).__name__}.")


def check_readable(stored: Stored) -> None:
    if stored[0] not in (1, 3):
        raise UserError(f"The run's images have {stored[0]} channels; a picture file has 1 or 3. Give it a tensor.")


def _tensor_of(array: np.ndarray) -> Tensor:
    """Arrays are rows × columns (× channels), alone or many; tensors have channels first."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.ndim == 2:
        return tensor[None]
    if tensor.ndim == 3:
        return tensor.permute(2, 0, 1) if tensor.shape[-1] in (1, 3) else tensor[:, None]
    return tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor


def _checked(images: Tensor) -> UInt8Images:
    """0 to 255 as bytes, or 0 to 1 as floats: what is normalised already belongs into the model itself."""
    if images.ndim == 3:
        images = images[None]
    if images.ndim != 4 or not len(images):
        raise UserError(f"Images are (batch ×) channel × rows × columns; these have shape {list(images.shape)}.")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point() or not 0 <= float(images.min()) <= float(images.max()) <= 1:
        raise UserError(
            "predict wants images as they are stored: bytes from 0 to 255, or floats from 0 to 1. "
            "Normalised ones go into the model itself: model(images)."
        )
    return (images * 255).round().byte()
