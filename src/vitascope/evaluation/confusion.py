"""Compute the confusion matrix and the precision, recall and F1 of each class."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitascope.data.source import Labels
from vitascope.evaluation.intervals import wilson


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class; None where the denominator is 0."""

    images: int
    precision: float | None  # fraction of the images predicted as this class that belong to it
    recall: float | None  # fraction of its images that are predicted correctly
    f1: float | None  # harmonic mean of precision and recall
    recall_interval: tuple[float, float]
    taken_for: str | None  # the most frequent wrong prediction for its images


def confusion(labels: Labels, said: Labels, classes: int) -> Tensor:
    """Return class × class counts: rows are true classes, columns predicted classes."""
    return torch.bincount(labels * classes + said, minlength=classes**2).reshape(classes, classes)


def per_class(counts: Tensor, names: list[str]) -> dict[str, ClassScore]:
    """Return the scores of each class from the counts that `confusion` returns."""
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
