"""Compute outputs, logits, loss and accuracy of stored images, also averaged over views; intervals of accuracies."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.data.dataset import Dataset, UInt8Images
from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError, format_count
from vitascope.inference.hardware import InferenceHardware, disable_tf32_for_float32, set_malloc_to_keep_memory
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.schema import Recipe
from vitascope.shapes import Images, Logits

Shift = tuple[int, int]  # rows, columns


class View(NamedTuple):
    """One copy of the image. Pixel (r, c) of the copy is pixel (r, c) + shift of the image; then it is mirrored."""

    shift: Shift  # rows, columns: each −1, 0 or 1
    mirrored: bool  # left to right
    weight: int  # relative to the other views


NO_SHIFT = (0, 0)
DIAGONAL_SHIFTS = ((-1, -1), (1, 1), (-1, 1), (1, -1))


def _make_plain_and_mirror_views(weight_by_shift: dict[Shift, int]) -> tuple[View, ...]:
    """Return each shift once unmirrored and once mirrored, with the same weight."""
    return tuple(
        View(shift, mirrored, weight) for shift, weight in weight_by_shift.items() for mirrored in (False, True)
    )


# Six and ten views are those of the CNN speedruns (Jordan 2024, airbench: mirror and translate by one pixel).
VIEWS: dict[int, tuple[View, ...]] = {
    1: (View(NO_SHIFT, mirrored=False, weight=1),),
    2: _make_plain_and_mirror_views({NO_SHIFT: 1}),
    6: _make_plain_and_mirror_views({NO_SHIFT: 2, (-1, -1): 1, (1, 1): 1}),
    10: _make_plain_and_mirror_views(dict.fromkeys((NO_SHIFT, *DIAGONAL_SHIFTS), 1)),
}
VIEW_DESCRIPTIONS = {
    1: "one view of each image",
    2: "the image and its mirror image, averaged",
    6: "the image, two copies shifted by one pixel at half weight and the mirror images of all three, averaged",
    10: "the image, four copies shifted diagonally by one pixel and the mirror images of all five, averaged",
}


def check_views_match_training(recipe: Recipe, num_views: int, views_format: str = "views={}") -> None:
    """Raise an error for an unknown number of views, and for views that the run was not trained with. `views_format`:
    how the user writes the number, such as "--views {}"."""
    views_text = views_format.format(num_views)
    if num_views not in VIEWS:
        raise UserError(
            f"{views_text} is not available. Choose 1 (the image), 2 (also its mirror image), 6 or 10 (also "
            "shifted by one pixel)."
        )
    augment = recipe.data.augment
    if not augment.flip and any(view.mirrored for view in VIEWS[num_views]):
        raise UserError(
            f"{views_text} adds the mirror image, but this run was trained with data.augment.flip=0. "
            f"Use {views_format.format(1)}."
        )
    if not augment.shift and any(view.shift != NO_SHIFT for view in VIEWS[num_views]):
        raise UserError(
            f"{views_text} adds shifted images, but this run was trained with data.augment.shift=0. "
            f"Use {views_format.format(2)}."
        )


def average_logits_over_views(model: Callable[[Images], Tensor], images: Images, num_views: int) -> Logits:
    """Return the weighted mean of the logits over all views of preprocessed images, in float32."""
    views = VIEWS[num_views]
    copies = zip(views, make_shifted_and_mirrored_views(images, views), strict=True)
    total = reduce(torch.add, (view.weight * model(copy).float() for view, copy in copies))
    return total / sum(view.weight for view in views)


def make_shifted_and_mirrored_views(images: Images, views: tuple[View, ...]) -> Iterator[Images]:
    """Yield the copy of the preprocessed images for each view. Shifted copies are padded by reflection."""
    height, width = images.shape[2:]
    is_shifted = any(view.shift != NO_SHIFT for view in views)
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect") if is_shifted else images
    for (row, column), mirrored, _ in views:
        copy = images
        if (row, column) != NO_SHIFT:
            copy = padded[:, :, 1 + row : 1 + row + height, 1 + column : 1 + column + width]
        yield copy.flip(-1) if mirrored else copy.contiguous()


MAX_BATCH_SIZE = 1000
ACTIVATION_BYTES = {"cpu": 2**25}  # for a batch's activations, by device: on a CPU the size of its caches
DEFAULT_ACTIVATION_BYTES = 2**30
Z_SCORE = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Score:
    """Mean cross-entropy (without label smoothing) and accuracy."""

    loss: float
    accuracy: float
    num_images: int


def compute_logits(
    model: nn.Module,
    images: UInt8Images | Dataset,
    preprocess: Callable[[UInt8Images], Images],
    hardware: InferenceHardware,
    *,
    batch_size: int | None = None,
    num_views: int = 1,
) -> Logits:
    """Return the logits in float32 on the CPU, averaged over the views (`VIEWS`)."""
    return compute_outputs_in_batches(
        model,
        lambda prepared: average_logits_over_views(model, prepared, num_views),
        images,
        preprocess,
        hardware,
        batch_size,
    )


@torch.no_grad()
def compute_outputs_in_batches(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    images: UInt8Images | Dataset,
    preprocess: Callable[[UInt8Images], Images],
    hardware: InferenceHardware,
    batch_size: int | None = None,
) -> Tensor:
    """Return the outputs of `forward`, a function of `model`, for all images, as float32 on the CPU.

    The model is not changed. It must be in eval mode."""
    if model.training:
        raise UserError("The model is in training mode, so dropout is active. Call model.eval() first.")
    if hardware.device == "cpu":
        set_malloc_to_keep_memory()
    batch_size = batch_size or choose_inference_batch_size(model, hardware.device)
    batches = images.split(batch_size) if isinstance(images, Tensor) else images.iterate_batches(batch_size)
    with hardware.autocast(), disable_tf32_for_float32(hardware):
        parts = [forward(preprocess(part.to(hardware.device, non_blocking=True))).float() for part in batches]
    return torch.cat(parts).cpu()


def check_outputs_are_finite(outputs: Tensor, model_name: str) -> Tensor:
    """Return the outputs of a trained model, one row per image. NaN or infinite values are an error."""
    is_finite = outputs.flatten(1).isfinite().all(1)
    if not is_finite.all():
        num_images = format_count(int((~is_finite).sum()), "image")
        raise UserError(
            f"{model_name} has an output of NaN or infinite values for {num_images}, so the weights or the "
            "normalisation in config.json are damaged. Restore the files, or train again."
        )
    return outputs


def choose_inference_batch_size(model: nn.Module, device: str) -> int:
    """Return 1000, or fewer if the MLP activations (4 × embed_dim per token) would not fit into ACTIVATION_BYTES."""
    if not isinstance(model, VisionTransformer):
        return MAX_BATCH_SIZE
    memory = ACTIVATION_BYTES.get(device, DEFAULT_ACTIVATION_BYTES)
    return max(1, min(MAX_BATCH_SIZE, memory // (32 * model.config.num_tokens * model.config.embed_dim)))


def score_logits(logits: Logits, labels: Tensor) -> Score:
    """Return the loss and accuracy of logits."""
    num_correct = (logits.argmax(1) == labels).sum().item()
    return Score(F.cross_entropy(logits, labels).item(), num_correct / len(labels), len(labels))


@contextmanager
def set_eval_mode_temporarily(model: nn.Module) -> Iterator[None]:
    """Switch the model to eval mode inside this context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def score_model(model: nn.Module, dataset: Dataset, preprocessing: Preprocessing, hardware: InferenceHardware) -> Score:
    """Return the loss and accuracy of a model on a data set."""
    with set_eval_mode_temporarily(model):
        return score_logits(compute_logits(model, dataset, preprocessing, hardware), dataset.labels.cpu())


def compute_outputs_in_eval_mode(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    images: UInt8Images | Dataset,
    preprocess: Callable[[UInt8Images], Images],
    hardware: InferenceHardware,
) -> Tensor:
    """Return the outputs of `forward` for all images, in eval mode, as float32 on the CPU."""
    with set_eval_mode_temporarily(model):
        return compute_outputs_in_batches(model, forward, images, preprocess, hardware)


class Interval(NamedTuple):
    low: float
    high: float


def wilson_interval(num_correct: int, num_images: int) -> Interval:
    """Return the Wilson interval. Unlike p ± 1.96·√(p(1−p)/n), it is valid for few images and for p near 1."""
    if not num_images:
        return Interval(0.0, 1.0)
    fraction, square = num_correct / num_images, Z_SCORE * Z_SCORE
    centre = (fraction + square / (2 * num_images)) / (1 + square / num_images)
    half_width = (
        Z_SCORE
        / (1 + square / num_images)
        * math.sqrt(fraction * (1 - fraction) / num_images + square / (4 * num_images**2))
    )
    low, high = centre - half_width, centre + half_width
    return Interval(0.0 if num_correct == 0 else low, 1.0 if num_correct == num_images else high)
