"""Measure the accuracy on corrupted images."""

from dataclasses import dataclass

from torch import Tensor, nn

from vitascope.data.preparation import Preparation
from vitascope.data.source import Split
from vitascope.data.split import stratified_part
from vitascope.evaluation.corruption import CORRUPTIONS, Corruption
from vitascope.evaluation.intervals import wilson
from vitascope.training.hardware import Hardware
from vitascope.training.scoring import logits_of

MOST = 1000  # images; seventeen passes over more would take minutes on a laptop
BATCH = 100  # fixed, because the noise depends on the batch


@dataclass(frozen=True)
class Decline:
    """Accuracy by level of one corruption; level 0 is the original image."""

    unit: str
    images: int
    levels: list[float]
    accuracy: list[float]
    intervals: list[tuple[float, float]]


def robustness(
    model: nn.Module, split: Split, preparation: Preparation, hardware: Hardware, views: int = 1
) -> dict[str, Decline]:
    """Measure on at most 1000 images: a fixed, stratified subset."""
    part = split.part(stratified_part(split.labels, min(1.0, MOST / len(split)), seed=0))
    clean = _right(model, part, preparation, hardware, views, None, 0)
    declines = {}
    for name, corruption in CORRUPTIONS.items():
        levels = corruption.levels_for(preparation.size)
        right = [clean, *(_right(model, part, preparation, hardware, views, corruption, level) for level in levels)]
        shares = [count / len(part) for count in right]
        spans = [wilson(count, len(part)) for count in right]
        declines[name] = Decline(corruption.unit, len(part), [0.0, *levels], shares, spans)
    return declines


def _right(
    model: nn.Module,
    part: Split,
    preparation: Preparation,
    hardware: Hardware,
    views: int,
    corruption: Corruption | None,
    level: float,
) -> int:
    right = 0
    for number, (images, labels) in enumerate(zip(part.images.split(BATCH), part.labels.split(BATCH), strict=True)):

        def prepare(stored: Tensor, seed: int = number) -> Tensor:
            pixels = preparation.fit(stored)
            return preparation.normalise(corruption.spoil(pixels, level, seed) if corruption else pixels)

        said = logits_of(model, images, prepare, hardware, views=views).argmax(1)
        right += int((said == labels).sum())
    return right
