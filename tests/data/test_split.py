"""Splits: stratified, by seed, never overlapping."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitascope import UserError
from vitascope.data.config import DataConfig
from vitascope.data.open_data import (
    compute_class_weights,
    describe_classes_with_few_images,
    draw_stratified_subset_indices,
    load_train_and_validation_data,
    split_train_validation_indices,
)
from vitascope.data.statistics import count_also_in_reference, hash_each_image

labels = st.lists(st.integers(0, 3), min_size=20, max_size=80).map(torch.tensor)


@given(labels=labels, fraction=st.floats(0.05, 0.5), seed=st.integers(0, 99))
def test_training_and_validation_do_not_overlap_and_have_every_class(labels, fraction, seed) -> None:
    if torch.bincount(labels)[torch.bincount(labels) > 0].min() < 3:
        return
    train, validation = split_train_validation_indices(labels, fraction, seed)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(len(labels)))
    for class_index in labels.unique():
        count = (labels == class_index).sum().item()
        assert (labels[validation] == class_index).sum().item() == max(1, round(fraction * count))


def test_another_seed_holds_out_other_images_and_the_same_seed_the_same() -> None:
    labels_of_four = torch.arange(200) % 4
    first, again, other = (split_train_validation_indices(labels_of_four, 0.2, seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@given(labels=labels, fraction=st.floats(0.05, 1))
def test_a_fraction_keeps_every_class(labels, fraction) -> None:
    part = draw_stratified_subset_indices(labels, fraction, seed=0)
    assert set(labels[part].tolist()) == set(labels.tolist()) and len(part.unique()) == len(part)


def test_no_validation_image_occurs_in_training_and_none_of_the_test_images_anywhere() -> None:
    data = load_train_and_validation_data(DataConfig(), (8, 8), 1, seed=5)
    train, validation = hash_each_image(data.train.images), hash_each_image(data.validation.images)
    assert count_also_in_reference(train, validation) == 0 and len(validation) == 90
    assert count_also_in_reference(train + validation, hash_each_image(data.source.load_split("test").images)) == 0


def test_every_fraction_has_the_same_validation_images() -> None:
    small, full = (
        load_train_and_validation_data(DataConfig(fraction=fraction), (8, 8), 1, seed=0) for fraction in (0.1, 1.0)
    )
    assert torch.equal(small.validation.images, full.validation.images)
    assert len(small.train) == pytest.approx(81, abs=5)


def test_without_validation_all_images_are_for_training() -> None:
    data = load_train_and_validation_data(DataConfig(validation=0), (8, 8), 1, seed=0)
    assert data.validation is None and len(data.train) == 898


def test_class_weights_make_every_class_count_the_same() -> None:
    weights = compute_class_weights(torch.tensor([0, 0, 0, 1]), 2)
    assert (weights * torch.tensor([3.0, 1.0])).tolist() == pytest.approx([2, 2])


def test_a_class_with_one_image_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"The class wasp has only 1 image: none would be left for training\. Add images"
    ):
        split_train_validation_indices(torch.tensor([0, 0, 0, 1]), 0.3, 0, ["bee", "wasp"])
    with pytest.raises(UserError, match="The class 1 has only 1 image"):
        split_train_validation_indices(torch.tensor([0, 0, 0, 1]), 0.3, 0)


def test_classes_with_few_images_are_named() -> None:
    assert describe_classes_with_few_images(["bee", "ant"], [5, 70]) is None
    text = describe_classes_with_few_images(["bee", "ant", "fly"], [4, 70, 0])
    assert text == "classes with fewer than 5 images: bee (4), fly (0)"
    many = describe_classes_with_few_images([f"c{index}" for index in range(8)], [1] * 8)
    assert many.endswith("images: c0 (1), c1 (1), c2 (1), c3 (1), c4 (1) and 3 more")
