"""The old classifier is kept for the classes it was made for, and for no others."""

import pytest
import torch

from tests.weights.test_pretrained import build_small_timm, compute_max_difference
from vitascope import UserError, adapt
from vitascope.weights.model_info import WeightsMetadata
from vitascope.weights.pretrained import PretrainedModel, build_pretrained_from_state_dict

OWN = ["ape", "bee", "cat", "dog", "eel", "fox", "gnu"]
OTHERS = ["ash", "box", "elm", "fig", "fir", "oak", "yew"]


def pretrained(classes: list[str] | None = OWN) -> PretrainedModel:
    return build_pretrained_from_state_dict(build_small_timm().state_dict(), "theirs", WeightsMetadata(classes=classes))


def test_other_class_names_get_a_new_classifier() -> None:
    pretrained_model = pretrained()
    made = adapt(pretrained_model, classes=OTHERS)
    assert made.report.new == ["head.weight", "head.bias"] and made.info.classes == OTHERS
    assert made.report.dropped == ["head.weight", "head.bias"]
    assert made.report.notes == ["head replaced: the weights' classes are ape, bee, …; the data's are ash, box, …"]
    assert not torch.equal(made.weights["head.weight"], pretrained_model.weights["head.weight"])
    assert adapt(pretrained_model, classes=[*OWN[:6], "hen"]).report.new  # one is enough


def test_equal_class_names_keep_the_classifier() -> None:
    pretrained_model = pretrained()
    made = adapt(pretrained_model, classes=list(OWN))
    assert made.weights["head.weight"] is pretrained_model.weights["head.weight"]
    assert not made.report.new and not made.report.notes and not made.report.resampled


@torch.no_grad()
def test_the_classifier_s_rows_follow_the_order_of_the_classes() -> None:
    pretrained_model, images = pretrained(), torch.randn(2, 3, 32, 32)
    turned = ["dog", "ape", "gnu", "bee", "fox", "cat", "eel"]
    made = adapt(pretrained_model, classes=turned)
    wanted = pretrained_model.build_model()(images)[:, [OWN.index(name) for name in turned]]
    assert compute_max_difference(made.build_model()(images), wanted) < 1e-6 and made.info.classes == turned
    assert [change.name for change in made.report.resampled] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("names", [None, [f"LABEL_{number}" for number in range(7)]])
def test_classes_without_names_keep_the_classifier_with_a_note(names) -> None:
    pretrained_model = pretrained(names)
    made = adapt(pretrained_model, classes=OTHERS)
    assert made.weights["head.weight"] is pretrained_model.weights["head.weight"] and made.info.classes == OTHERS
    assert "classes have no names" in made.report.notes[-1]


def test_numbers_in_vitascope_s_weights_are_class_names() -> None:
    pretrained_model = pretrained([str(number) for number in range(7)])
    ours = PretrainedModel("run", "vitascope", pretrained_model.info, pretrained_model.weights)
    assert adapt(ours, classes=OTHERS).report.new
    assert not adapt(ours, classes=list("0123456")).report.notes


def test_names_and_number_must_agree() -> None:
    assert adapt(pretrained(), classes=["a", "b"]).info.model.num_classes == 2
    with pytest.raises(UserError, match="num_classes=5, but 2 classes are named"):
        adapt(pretrained(), num_classes=5, classes=["a", "b"])
