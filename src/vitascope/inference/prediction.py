"""Read paths, Pillow images, arrays or tensors as stored images, and convert logits to predictions."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitascope.data.dataset import UInt8Images
from vitascope.data.sources.folder import (
    crop_and_resize_pil_image,
    list_possible_image_files,
    read_image_or_error_reason,
)
from vitascope.draw import COLOURS
from vitascope.draw.html import render_template
from vitascope.errors import UserError, format_count
from vitascope.run.files import read_json_object_or_empty
from vitascope.shapes import Logits

EXPLANATIONS_FILE = "explanations.json"  # lists the files that `vitascope explain` wrote
StoredShape = tuple[int, int, int]  # channels, rows, columns
if TYPE_CHECKING:
    ImageInput = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor  # one image; an array may be a batch
    ImagesInput = ImageInput | Iterable[ImageInput]
else:
    ImagesInput = Any  # other values raise a UserError


@dataclass(frozen=True)
class LoadedImages:
    """Images in order, their file names if they came from files, and the files that could not be read."""

    images: UInt8Images
    files: list[str] | None = None  # "" for an image that is not from a file
    unreadable_files: list[str] = field(default_factory=list)


def read_image_files_and_folders(paths: Iterable[Path], stored_shape: StoredShape) -> LoadedImages:
    """Read files and folders. A named file must be readable; a folder must have at least one readable image."""
    check_one_or_three_channels(stored_shape)
    images: list[Tensor] = []
    files: list[str] = []
    unreadable: list[str] = []
    for path, is_explicit in _list_files_and_whether_named(paths):
        image = read_image_or_error_reason(path, (stored_shape[1], stored_shape[2]), stored_shape[0])
        if isinstance(image, Tensor):
            images.append(image)
            files.append(str(path))
        elif is_explicit:
            raise UserError(f"{path} cannot be read as an image: {image.reason}.")
        else:
            unreadable.append(str(path))
    if not images:
        raise UserError(f"No readable image among {format_count(len(unreadable), 'file')}, e.g. {unreadable[0]}.")
    return LoadedImages(torch.stack(images), files, unreadable)


def load_or_convert_input_images(images: ImagesInput, stored_shape: StoredShape) -> LoadedImages:
    """Convert the argument of `predict` to stored images. A list may mix paths, Pillow images, arrays and tensors."""
    if isinstance(images, str | Image.Image | np.ndarray | Tensor) or not isinstance(images, Iterable):
        images = [images]
    items: list[Any] = list(images)
    if not items:
        raise UserError("No images were given.")
    if all(isinstance(item, str | os.PathLike) for item in items):
        return read_image_files_and_folders([Path(item) for item in items], stored_shape)
    parts = [_load_or_convert_one_input(item, stored_shape) for item in items]
    files = [name for part in parts for name in part.files or [""] * len(part.images)]
    unreadable = [name for part in parts for name in part.unreadable_files]
    return LoadedImages(torch.cat([part.images for part in parts]), files if any(files) else None, unreadable)


def _load_or_convert_one_input(item: Any, stored_shape: StoredShape) -> LoadedImages:
    """Convert a path, a Pillow image, or an array or tensor, which may be a batch."""
    if isinstance(item, str | os.PathLike):
        return read_image_files_and_folders([Path(item)], stored_shape)
    if isinstance(item, Image.Image):
        check_one_or_three_channels(stored_shape)
        return LoadedImages(crop_and_resize_pil_image(item, (stored_shape[1], stored_shape[2]), stored_shape[0])[None])
    if isinstance(item, np.ndarray):
        item = _move_array_or_batch_to_channels_first(item, stored_shape)
    if isinstance(item, Tensor):
        return LoadedImages(_crop_and_resize_if_needed(item, stored_shape))
    raise UserError(f"Images must be paths, Pillow images, arrays or tensors, not {type(item).__name__}.")


def check_one_or_three_channels(stored_shape: StoredShape) -> None:
    if stored_shape[0] not in (1, 3):
        raise UserError(
            f"The model needs {stored_shape[0]} channels; image files have 1 or 3. "
            f"Pass tensors of shape {list(stored_shape)}."
        )


class ListedFile(NamedTuple):
    path: Path
    is_explicit: bool  # named by the user, not found in a folder


def _list_files_and_whether_named(paths: Iterable[Path]) -> list[ListedFile]:
    """Return the files; folders are expanded to their images, without figures that `vitascope explain` wrote."""
    listed = []
    for path in paths:
        if path.is_dir():
            figures = {
                explanations.parent / name
                for explanations in path.rglob(EXPLANATIONS_FILE)
                for name in _read_explanation_figure_names(explanations)
            }
            images = [file for file in list_possible_image_files(path) if file not in figures]
            if not images:
                raise UserError(f"The folder {path} contains no images.")
            listed += [ListedFile(file, is_explicit=False) for file in images]
        elif path.is_file():
            listed.append(ListedFile(path, is_explicit=True))
        else:
            raise UserError(f"There is no file or folder {path}.")
    return listed


def _read_explanation_figure_names(explanations_path: Path) -> list[str]:
    """Return the names of the figures that `vitascope explain` wrote, which are not input images."""
    files = read_json_object_or_empty(explanations_path).get("files", [])
    return [Path(str(file)).name for file in files] if isinstance(files, list) else []


def _move_array_or_batch_to_channels_first(image_or_batch: np.ndarray, stored_shape: StoredShape) -> Tensor:
    """Convert an array with channels last (rows × columns × 1 to 4), or a batch, to a tensor with channels first."""
    tensor = torch.from_numpy(
        np.require(image_or_batch, requirements=("C_CONTIGUOUS", "WRITEABLE"))
    )  # copied only if needed
    if tensor.ndim == 2:
        return tensor[None]
    if tensor.ndim == 3 and tensor.shape[-1] <= 4:
        return tensor.permute(2, 0, 1)
    if tensor.ndim == 3 and stored_shape[0] == 1:
        return tensor[:, None]
    if tensor.ndim == 4 and tensor.shape[-1] <= 4:
        return tensor.permute(0, 3, 1, 2)
    raise UserError(
        f"An array of shape {list(image_or_batch.shape)} is not an image. "
        "Arrays need channels last: rows × columns × 1 to 4. Tensors need channels first."
    )


def _crop_and_resize_if_needed(images: Tensor, stored_shape: StoredShape) -> UInt8Images:
    """Return bytes of the stored shape. Other shapes are cropped, resized and put on white, like image files."""
    images = _convert_to_uint8_batch(images)
    if tuple(images.shape[1:]) == stored_shape:
        return images
    check_one_or_three_channels(stored_shape)
    if images.shape[1] not in (1, 2, 3, 4):
        raise UserError(f"The images have {images.shape[1]} channels; 1 to 4 are possible.")
    arrays = (image.permute(1, 2, 0).squeeze(-1).numpy() for image in images)
    pil_images = (Image.fromarray(array) if images.shape[1] != 2 else Image.fromarray(array, "LA") for array in arrays)
    return torch.stack(
        [
            crop_and_resize_pil_image(pil_image, (stored_shape[1], stored_shape[2]), stored_shape[0])
            for pil_image in pil_images
        ]
    )


def _convert_to_uint8_batch(images: Tensor) -> UInt8Images:
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


MAX_TABLE_ROWS = 24  # in a notebook


class ClassProbability(NamedTuple):
    label: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    file: str | None
    label: str  # the most probable class, also if the prediction is unsure
    probability: float
    probabilities: dict[str, float]  # of every class, in the order of the run's classes
    is_unsure: bool = False  # the probability is below the threshold
    temperature: float = 1.0  # by which the logits were divided

    @property
    def classes_by_probability(self) -> list[ClassProbability]:
        """All classes, the most probable first."""
        return [ClassProbability(*item) for item in sorted(self.probabilities.items(), key=lambda item: -item[1])]

    def as_dict(self, top_k: int | None = None) -> dict[str, Any]:
        """Return a dictionary for JSON; the predicted class has the key `class`.

        `top_k`: the key `top_k` with the most probable classes replaces `probabilities`."""
        common = {
            "file": self.file,
            "class": self.label,
            "probability": self.probability,
            "unsure": self.is_unsure,
            "temperature": self.temperature,
        }
        if top_k is None:
            return common | {"probabilities": self.probabilities}
        best = [{"class": name, "probability": value} for name, value in self.classes_by_probability[:top_k]]
        return common | {"top_k": best}


@dataclass(frozen=True)
class Predictions(Sequence[Prediction]):
    """One prediction per image, in order; shown as a table with thumbnails in a notebook."""

    items: list[Prediction]
    images: UInt8Images
    unreadable_files: list[str] = field(default_factory=list)  # files of a folder that could not be read

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> "Predictions": ...
    def __getitem__(self, index: int | slice) -> "Prediction | Predictions":
        if isinstance(index, slice):
            return Predictions(self.items[index], self.images[index], self.unreadable_files)
        return self.items[index]

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.items)

    @property
    def labels(self) -> list[str]:
        return [item.label for item in self.items]

    def _repr_html_(self) -> str:
        shown = zip(self.items[:MAX_TABLE_ROWS], self.images[:MAX_TABLE_ROWS], strict=True)
        rows = [
            {
                "image": image.permute(1, 2, 0).numpy(),
                "file": item.file or "",
                "unsure": item.is_unsure,
                "classes": item.classes_by_probability[:3],
            }
            for item, image in shown
        ]
        num_more = max(0, len(self) - MAX_TABLE_ROWS)
        return render_template("predictions.html.j2", rows=rows, num_more=num_more, colour=COLOURS[0])


def build_predictions(
    logits: Logits,
    loaded_images: LoadedImages,
    classes: list[str],
    *,
    temperature: float = 1.0,
    threshold: float = 0.0,
) -> Predictions:
    """Convert logits to predictions; the softmax is in float64, so that probabilities sum to 1.

    The logits are divided by `temperature`. Predictions with a probability below `threshold` are unsure."""
    if not classes:
        raise UserError(
            "The model has no classifier. Compute features with `vitascope embed`, or add a classifier with `train`."
        )
    items = []
    class_indices = logits.argmax(1).tolist()  # not of the probabilities: two of them may round to the same number
    for index, probabilities in enumerate((logits.double() / temperature).softmax(1).tolist()):
        probability = probabilities[class_indices[index]]
        file = loaded_images.files[index] or None if loaded_images.files else None
        probability_by_class = dict(zip(classes, probabilities, strict=True))
        label, is_unsure = classes[class_indices[index]], probability < threshold
        items.append(Prediction(file, label, probability, probability_by_class, is_unsure, temperature))
    return Predictions(items, loaded_images.images, loaded_images.unreadable_files)


def check_threshold_and_temperature(threshold: float, temperature: float | None) -> None:
    if not 0 <= threshold <= 1:
        raise UserError(f"The threshold {threshold:g} is not a probability. Choose one between 0 and 1, such as 0.9.")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise UserError(f"The temperature {temperature:g} must be positive. 1 leaves the probabilities unchanged.")
