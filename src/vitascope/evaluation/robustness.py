"""Corrupt images (noise, blur, shift, lower contrast) and measure the accuracy on them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitascope.data.dataset import Dataset
from vitascope.data.open_data import draw_stratified_subset_indices
from vitascope.inference.classifier import Classifier
from vitascope.inference.scoring import Interval, wilson_interval
from vitascope.shapes import Images

CorruptionFunction = Callable[[Images, float, int], Images]  # images, level, a seed
ProgressReporter = Callable[[str, float], None]  # description, and the fraction that is done


def add_gaussian_noise(images: Images, level: float, seed: int) -> Images:
    """Add Gaussian noise; `level` is its standard deviation (pixels go from 0 to 1)."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed)).to(images.device)
    return (images + level * noise).clamp(0, 1)


def apply_gaussian_blur(images: Images, level: float, seed: int) -> Images:  # noqa: ARG001 - nothing is drawn
    """Apply a Gaussian blur; `level` is its standard deviation in pixels."""
    from torchvision.transforms.v2 import functional as tv  # seconds to import

    half = min(math.ceil(3 * level), min(images.shape[2:]) - 1)
    return tv.gaussian_blur(images, [2 * half + 1, 2 * half + 1], [level, level])


def shift_in_alternating_directions(images: Images, level: float, seed: int) -> Images:  # noqa: ARG001
    """Shift by `level` pixels, cycling through the four directions; edge pixels are repeated."""
    step = int(level)
    padded = F.pad(images, (step, step, step, step), mode="replicate")
    height, width = images.shape[2:]
    shifted = images.clone()
    for side, (down, right) in enumerate(((step, 2 * step), (step, 0), (2 * step, step), (0, step))):
        shifted[side::4] = padded[side::4, :, down : down + height, right : right + width]
    return shifted


def reduce_contrast(images: Images, level: float, seed: int) -> Images:  # noqa: ARG001
    """Reduce the contrast by this fraction: pixels move towards the image's mean."""
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return mean + (1 - level) * (images - mean)


@dataclass(frozen=True)
class Corruption:
    """A corruption and its levels of strength."""

    apply: CorruptionFunction
    levels: tuple[float, ...]
    unit: str
    short_unit: str  # for tables
    levels_in_pixels: bool = False  # of a 32-pixel image; larger images get larger levels

    def scale_levels_to_image_size(self, image_size: tuple[int, int]) -> list[float]:
        factor = max(1, round(min(image_size) / 32)) if self.levels_in_pixels else 1
        return [level * factor for level in self.levels]


CORRUPTIONS = {
    "noise": Corruption(
        add_gaussian_noise,
        (0.05, 0.1, 0.15, 0.2),
        "noise standard deviation (pixel values 0 to 1)",
        "standard deviation; pixel values 0 to 1",
    ),
    "blur": Corruption(
        apply_gaussian_blur,
        (0.5, 1.0, 1.5, 2.0),
        "blur standard deviation in pixels",
        "standard deviation in pixels",
        levels_in_pixels=True,
    ),
    "shift": Corruption(
        shift_in_alternating_directions, (1, 2, 3, 4), "shift in pixels", "pixels", levels_in_pixels=True
    ),
    "contrast": Corruption(reduce_contrast, (0.2, 0.4, 0.6, 0.8), "fraction of contrast removed", "fraction removed"),
}


MAX_IMAGES = 1000  # images; seventeen passes over more would take minutes on a laptop
BATCH_SIZE = 100  # fixed, because the noise depends on the batch


@dataclass(frozen=True)
class RobustnessCurve:
    """Accuracy by level of one corruption; level 0 is the original image."""

    unit: str
    images: int
    levels: list[float]
    accuracy: list[float]
    intervals: list[Interval]


def measure_accuracy_under_corruptions(
    classifier: Classifier, samples: Dataset, views: int = 1, report_progress: ProgressReporter | None = None
) -> dict[str, RobustnessCurve]:
    """Measure on at most 1000 images: a fixed, stratified subset."""
    subset = samples.select(draw_stratified_subset_indices(samples.labels, min(1.0, MAX_IMAGES / len(samples)), seed=0))
    count_correct = _make_counter_with_progress(classifier, subset, views, report_progress)
    num_clean_correct = count_correct("no corruption", None, 0)
    curves = {}
    for name, corruption in CORRUPTIONS.items():
        levels = corruption.scale_levels_to_image_size(classifier.preprocessing.size)
        num_correct = [num_clean_correct, *(count_correct(f"{name} {level:g}", corruption, level) for level in levels)]
        accuracies = [count / len(subset) for count in num_correct]
        intervals = [wilson_interval(count, len(subset)) for count in num_correct]
        curves[name] = RobustnessCurve(corruption.unit, len(subset), [0.0, *levels], accuracies, intervals)
    return curves


def _make_counter_with_progress(
    classifier: Classifier, samples: Dataset, views: int, report_progress: ProgressReporter | None
) -> Callable[[str, Corruption | None, float], int]:
    """Return a function that counts correct predictions under one corruption and reports every batch."""
    num_passes = 1 + sum(len(corruption.levels) for corruption in CORRUPTIONS.values())
    num_batches, num_done = num_passes * -(-len(samples) // BATCH_SIZE), 0

    def count_correct(description: str, corruption: Corruption | None, level: float) -> int:
        nonlocal num_done
        total = 0
        for num_correct in _count_correct_by_batch(classifier, samples, views, corruption, level):
            total, num_done = total + num_correct, num_done + 1
            if report_progress:
                report_progress(description, num_done / num_batches)
        return total

    return count_correct


def _count_correct_by_batch(
    classifier: Classifier,
    samples: Dataset,
    views: int,
    corruption: Corruption | None,
    level: float,
) -> Iterator[int]:
    preprocessing = classifier.preprocessing
    for batch_index, (images, labels) in enumerate(
        zip(samples.images.split(BATCH_SIZE), samples.labels.split(BATCH_SIZE), strict=True)
    ):

        def corrupt_and_preprocess(stored: Tensor, seed: int = batch_index) -> Tensor:
            pixels = preprocessing.scale_and_resize(stored)
            return preprocessing.normalize(corruption.apply(pixels, level, seed) if corruption else pixels)

        predicted = classifier.compute_logits_of_stored_images(
            images, views=views, preprocess=corrupt_and_preprocess
        ).argmax(1)
        yield int((predicted == labels).sum())
