"""Keep, reorder or drop a pretrained classifier, depending on the class names."""

from typing import NamedTuple

from vitascope.weights.adaptation_report import TensorChange
from vitascope.weights.model_info import StateDict, has_placeholder_names
from vitascope.weights.pretrained import PretrainedModel

CLASSIFIER_WEIGHT_NAMES = ("head.weight", "head.bias")
NUM_LISTED_CLASSES = 2


class ClassifierFit(NamedTuple):
    dropped_names: list[str]  # removed from the weights
    notes: list[str]  # for the user


def keep_drop_or_reorder_classifier(
    weights: StateDict,
    pretrained: PretrainedModel,
    num_classes: int,
    class_names: list[str] | None,
    changes: list[TensorChange],
    *,
    keep_classifier: bool = True,
) -> ClassifierFit:
    """Drop the classifier from `weights` if it does not fit the classes, or reorder its rows (listed in `changes`).

    `class_names`: the data's class names, None if they are unknown."""
    old_names, old_num_classes = pretrained.info.classes, pretrained.info.model.num_classes
    if not keep_classifier:
        reason = "it is a linear probe" if pretrained.info.probe else "keep_classifier=False"
        return _drop_classifier(weights, reason)
    if old_num_classes != num_classes:
        verb = "replaced" if num_classes else "removed"
        return _drop_classifier(weights, f"the weights have {old_num_classes} classes, not {num_classes}", verb)
    if not old_num_classes or class_names is None:
        return ClassifierFit([], [])
    if pretrained.library != "vitascope" and has_placeholder_names(old_names):
        note = "the classifier was kept; its classes have no names, so the order of the data's classes is assumed"
        return ClassifierFit([], [note])
    if set(old_names) != set(class_names):
        return _drop_classifier(
            weights, f"the weights' classes are {_list_some(old_names)}; the data's are {_list_some(class_names)}"
        )
    if old_names != class_names:
        row_order = [old_names.index(name) for name in class_names]
        for name in CLASSIFIER_WEIGHT_NAMES:
            shape = list(weights[name].shape)
            changes.append(TensorChange(name, shape, shape, "rows reordered to match the data's classes", 0.0))
            weights[name] = weights[name][row_order]
    return ClassifierFit([], [])


def _drop_classifier(weights: StateDict, reason: str, verb: str = "replaced") -> ClassifierFit:
    names = [name for name in CLASSIFIER_WEIGHT_NAMES if weights.pop(name, None) is not None]
    return ClassifierFit(names, [f"head {verb}: {reason}"] if names else [])


def _list_some(class_names: list[str]) -> str:
    return ", ".join(class_names[:NUM_LISTED_CLASSES]) + (", …" if len(class_names) > NUM_LISTED_CLASSES else "")
