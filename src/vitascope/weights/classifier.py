"""Fit a pretrained classifier to the classes of the data: keep it, reorder it, or remove it."""

from torch import Tensor

from vitascope.weights.known import anonymous
from vitascope.weights.pretrained import Pretrained
from vitascope.weights.report import Change

PARTS = ("head.weight", "head.bias")


def fit_classifier(
    weights: dict[str, Tensor],
    found: Pretrained,
    count: int,
    classes: list[str] | None,
    changes: list[Change],
    *,
    keep: bool = True,
) -> tuple[list[str], list[str]]:
    """Return the names removed from `weights`, and notes. `classes`: the data's class names, if it has any."""
    own, old = found.facts.classes, found.facts.model.num_classes
    if not keep:
        return _drop(weights, "from a linear probe" if found.facts.probe else "not kept"), []
    if old != count:
        return _drop(weights, f"for {old} classes"), []
    if not old or classes is None:
        return [], []
    if found.library != "vitascope" and anonymous(own):
        note = "the classifier was kept; its classes have no names, so the order of the data's classes is assumed"
        return [], [note]
    if set(own) != set(classes):
        other = next((name for name in own if name not in classes), own[0])
        return _drop(weights, f"its classes are not the data's, for example {other}"), []
    if own != classes:
        order = [own.index(name) for name in classes]
        for name in PARTS:
            shape = list(weights[name].shape)
            changes.append(Change(name, shape, shape, "rows reordered to match the data's classes", 0.0))
            weights[name] = weights[name][order]
    return [], []


def _drop(weights: dict[str, Tensor], why: str) -> list[str]:
    return [f"{name} ({why})" for name in PARTS if weights.pop(name, None) is not None]
