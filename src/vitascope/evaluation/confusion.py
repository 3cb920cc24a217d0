"""Labels and answers -> who is taken for whom, and each class's precision and recall."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitascope.data.source import Labels
from vitascope.evaluation.intervals import wilson


@dataclass(frozen=True)
class ClassScore:
    """One class. A number that has nothing to be a share of is None."""

    images: int
    precision: float | None  # of the images it was said of, the share that are it
    recall: float | None  # of its images, the share that were recognised
    f1: float | None  # harmonic mean of the two
    recall_interval: tuple[float, float]
    taken_for: str | None  # the class it is most often mistaken for


def confusion(labels: Labels, said: Labels, classes: int) -> Tensor:
    """class × class counts: the row is what the image is, the column what the model said."""
    return torch.bincount(labels * classes + said, minlength=classes**2).reshape(classes, classes)


def per_class(counts: Tensor, names: list[str]) -> dict[str, ClassScore]:
    """`counts` as `confusion` gives them."""
    said, there, right = counts.sum(0).tolist(), counts.sum(1).tolist(), counts.diagonal().tolist()
    wrong = counts - counts.diagonal().diag()
    scores = {}
    for number, name in enumerate(names):
        most = int(wrong[number].argmax())
        scores[name] = ClassScore(
            there[number],
            _share(right[number], said[number]),
            _share(right[number], there[number]),
            _share(2 * right[number], said[number] + there[number]),
            wilson(right[number], there[number]),
            names[most] if wrong[number, most] else None,
        )
    return scores


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
