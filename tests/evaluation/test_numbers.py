"""Intervals, confusion, calibration: against worked examples and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from vitascope.evaluation.calibration import (
    compute_calibration_and_scores,
    compute_temperature_scaled_calibration,
    fit_temperature_within_bounds,
)
from vitascope.evaluation.evaluate import top_k_accuracy
from vitascope.evaluation.report import (
    compute_class_scores,
    compute_confusion_matrix,
    list_most_frequent_wrong_predictions,
)
from vitascope.inference.scoring import wilson_interval


@pytest.mark.parametrize(
    ("right", "images", "low", "high"),
    [(9000, 10_000, 0.89397, 0.90573), (9, 10, 0.5958, 0.9821), (10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775)],
)
def test_wilsons_interval_is_the_one_worked_by_hand(right, images, low, high) -> None:
    assert wilson_interval(right, images) == pytest.approx((low, high), abs=5e-5)


@given(images=st.integers(1, 500), share=st.floats(0, 1))
def test_an_interval_holds_the_share_and_stays_between_0_and_1(images, share) -> None:
    right = round(share * images)
    low, high = wilson_interval(right, images)
    assert 0 <= low <= right / images <= high <= 1
    assert wilson_interval(10 * right, 10 * images)[1] - wilson_interval(10 * right, 10 * images)[0] < high - low


def test_per_class_numbers_are_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(1)
    labels, predicted = (torch.randint(0, 5, (300,), generator=generator) for _ in range(2))
    predicted[:200] = labels[:200]
    counts = compute_confusion_matrix(labels, predicted, 5)
    assert (counts.numpy() == metrics.confusion_matrix(labels, predicted)).all()
    theirs = metrics.precision_recall_fscore_support(labels, predicted)
    ours = compute_class_scores(counts, list("abcde"))
    for number, row in enumerate(ours.values()):
        assert (row.precision, row.recall, row.f1, row.images) == pytest.approx([column[number] for column in theirs])
    wrong = counts - counts.diagonal().diag()
    assert ours["a"].taken_for == "abcde"[int(wrong[0].argmax())]


def test_a_class_that_is_not_there_has_no_share() -> None:
    scores = compute_class_scores(
        compute_confusion_matrix(torch.tensor([0, 0]), torch.tensor([0, 1]), 3), ["a", "b", "c"]
    )
    assert (scores["b"].recall, scores["b"].precision) == (None, 0.0)
    assert (scores["c"].recall, scores["c"].precision, scores["c"].f1, scores["c"].taken_for) == (
        None,
        None,
        None,
        None,
    )


def test_equally_frequent_wrong_predictions_are_all_listed_with_their_counts() -> None:
    counts = torch.tensor([[5, 2, 1, 0, 0], [1, 9, 1, 0, 1], [0, 0, 7, 0, 0], [1, 1, 1, 0, 1], [0, 0, 0, 0, 0]])
    listed = list_most_frequent_wrong_predictions(counts, list("abcde"))
    assert listed == ["b (2)", "a (1), c (1), e (1)", "–", "a (1), b (1), c (1), …", "–"]


def with_confidence(shares: list[float], right: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two-class logits whose larger probability is the given one; class 0 is said."""
    logits = torch.tensor([[math.log(share), math.log(1 - share)] for share in shares], dtype=torch.float64)
    return logits, 1 - torch.tensor(right)


def test_the_calibration_error_of_a_worked_example() -> None:
    """|0.95 − 1|, |0.90 − 0| in bins of their own; 0.62 and 0.64 share one: |0.63 − 0.5|·2."""
    logits, labels = with_confidence([0.95, 0.90, 0.62, 0.64], [1, 0, 1, 0])
    calibration = compute_calibration_and_scores(logits, labels)
    assert calibration.ece == pytest.approx(0.3025)
    assert [part.images for part in calibration.bins if part.images] == [2, 1, 1]
    assert calibration.gap == pytest.approx((0.95 + 0.9 + 0.62 + 0.64) / 4 - 0.5)


@pytest.mark.parametrize(
    ("shares", "right", "description"),
    [
        (
            [0.95, 0.90, 0.70],
            [0, 0, 0],
            "expected calibration error 85.0 %, over-confident in all 3 non-empty bins (of 15 confidence bins)",
        ),
        (
            [0.95, 0.90, 0.70],
            [1, 1, 1],
            "expected calibration error 15.0 %, under-confident in all 3 non-empty bins (of 15 confidence bins)",
        ),
        (
            [0.95, 0.90, 0.62, 0.64],
            [1, 0, 1, 0],
            "expected calibration error 30.2 %; over-confident by 27.7 percentage points",
        ),
        ([0.90, 0.9999], [0, 1], "expected calibration error 45.0 %, mostly over-confident"),
        (
            [0.95, 0.65, 0.60],
            [1, 1, 0],
            "expected calibration error 33.3 %; over-confident by 6.7 percentage points",
        ),
        (
            [0.75, 0.75, 0.75, 0.75, 0.95, 0.95],
            [1, 1, 1, 0, 1, 1],
            "expected calibration error 1.7 %, under-confident in both non-empty bins (of 15 confidence bins)",
        ),
        ([0.9, 0.55, 0.55], [1, 1, 0], "expected calibration error 6.7 %, over-confident in some bins and under"),
        (
            [0.9],
            [1],
            "expected calibration error 10.0 %, under-confident in the only non-empty bin (of 15 confidence bins)",
        ),
        ([0.99999], [1], "expected calibration error 0.0 %"),
    ],
)
def test_the_same_calibration_number_is_never_given_twice(shares, right, description) -> None:
    result = compute_calibration_and_scores(*with_confidence(shares, right)).description
    assert result.startswith(description), result


def test_the_calibration_error_is_that_of_an_independent_implementation() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(2000, 7, generator=generator)
    labels = torch.randint(0, 7, (2000,), generator=generator)
    labels[:900] = logits[:900].argmax(1)
    shares = logits.double().softmax(1).numpy()
    sure, right = shares.max(1), shares.argmax(1) == labels.numpy()
    place = np.digitize(sure, np.linspace(0, 1, 16), right=True)  # (low, high]
    gaps = [abs(sure[place == b].mean() - right[place == b].mean()) * (place == b).mean() for b in np.unique(place)]
    calibration = compute_calibration_and_scores(logits, labels)
    assert calibration.ece == pytest.approx(sum(gaps))
    assert calibration.loss == pytest.approx(metrics.log_loss(labels, shares, labels=range(7)))
    assert sum(part.images for part in calibration.bins) == 2000


def test_a_confidence_on_an_edge_belongs_to_the_bin_below() -> None:
    calibration = compute_calibration_and_scores(
        torch.zeros(3, 2), torch.tensor([0, 0, 1]), num_bins=4
    )  # all exactly 0.5
    assert [part.images for part in calibration.bins] == [0, 3, 0, 0]


def test_brier_and_loss_of_worked_examples() -> None:
    calibration = compute_calibration_and_scores(torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.tensor([0]))
    assert calibration.brier == pytest.approx(0.14, abs=1e-6) and calibration.loss == pytest.approx(
        -math.log(0.7), abs=1e-6
    )
    even = compute_calibration_and_scores(torch.zeros(3, 10), torch.tensor([0, 1, 2]))
    assert even.brier == pytest.approx(0.9) and even.loss == pytest.approx(math.log(10))


def test_being_always_sure_and_always_right_is_no_error() -> None:
    calibration = compute_calibration_and_scores(torch.eye(4) * 1000, torch.arange(4))
    assert calibration.ece == 0 and calibration.bins[-1].images == 4


@given(factor=st.sampled_from([0.3, 0.7, 1.0, 2.0, 5.0]))
def test_the_temperature_is_found_that_was_put_in(factor) -> None:
    """Labels drawn from the softmax of some logits: those logits times a factor need that factor as temperature."""
    generator = torch.Generator().manual_seed(3)
    true = 2 * torch.randn(8000, 5, generator=generator)
    labels = torch.multinomial(true.softmax(1), 1, generator=generator)[:, 0]
    assert fit_temperature_within_bounds(true * factor, labels) == pytest.approx(factor, rel=0.08)


@given(seed=st.integers(0, 10**6), spread=st.floats(0.01, 50))
def test_a_temperature_never_changes_an_answer_and_never_raises_the_loss_it_was_fitted_to(seed, spread) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(60, 6, generator=generator)
    labels = torch.randint(0, 6, (60,), generator=generator)
    labels[:30] = logits[:30].argmax(1)
    value = fit_temperature_within_bounds(logits, labels)
    if value is None:  # nothing to be learnt from these logits: flatter is always better
        return
    assert ((logits.double() / value).argmax(1) == logits.argmax(1)).all()
    after = compute_temperature_scaled_calibration(logits, labels, value, 60)
    assert after.loss <= compute_calibration_and_scores(logits, labels).loss + 1e-6 and after.value == value


def test_where_every_answer_is_right_or_none_there_is_no_best_temperature() -> None:
    assert fit_temperature_within_bounds(torch.eye(4) * 3, torch.arange(4)) is None
    assert fit_temperature_within_bounds(torch.eye(4) * 3, (torch.arange(4) + 1) % 4) is None


def test_the_share_among_the_likeliest_is_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(4)
    logits, labels = torch.randn(200, 9, generator=generator), torch.randint(0, 9, (200,), generator=generator)
    assert top_k_accuracy(logits, labels, 5) == pytest.approx(
        metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(9))
    )
    assert top_k_accuracy(logits[:, :3], labels % 3, 5) == 1
