"""Evaluate a run's frozen features with k-nearest neighbours and a linear probe.

Neighbours as in Wu et al. 2018 and DINO: 20 by cosine, votes weighted by exp(similarity / 0.07). The linear probe is a
logistic regression on the training images' features.
"""

from dataclasses import asdict, dataclass
from typing import Any

from vitascope.data.dataset import Dataset
from vitascope.data.open_data import draw_stratified_subset_indices
from vitascope.errors import UserError
from vitascope.evaluation.eval_data import load_eval_data
from vitascope.inference.classifier import Classifier
from vitascope.inference.scoring import Interval, wilson_interval
from vitascope.run.images import load_run_split_if_any
from vitascope.run.test_set_log import add_test_use_entry, log_test_set_result
from vitascope.training.objectives.feature_metrics import (
    NUM_NEIGHBOURS,
    compute_rms_spread_of_unit_features,
    fit_linear_probe,
    predict_classes_by_knn,
)


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies on the evaluated images, with 95 % confidence intervals."""

    split: str
    images: int
    known: int  # number of training images whose features and labels are used
    neighbours: int
    knn: float
    knn_interval: Interval
    linear: float
    linear_interval: Interval
    spread: float  # of the features: 0 all identical (collapse), 1 maximal

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_knn_and_linear_probe(
    model: Classifier,
    split: str | None = None,
    *,
    num_neighbours: int = NUM_NEIGHBOURS,
    max_train_images: int | None = None,
    label_fraction: float = 1.0,
) -> ProbeResult:
    """Evaluate on `split`: val (default) or test.

    `max_train_images`: training images to use (None: all); `label_fraction`: the fraction of them to use."""
    _reject_train_split_and_wrong_ranges(split, num_neighbours, max_train_images, label_fraction)
    train = load_run_split_if_any(model.run, model.info, "train")
    if train is None:
        raise UserError("The run has no training images.")
    if max_train_images is not None and max_train_images < len(model.classes):
        raise UserError(
            f"--max-images {max_train_images} is too small. Use at least {len(model.classes)}: one image per class."
        )
    fraction = label_fraction * min(1.0, max_train_images / len(train)) if max_train_images else label_fraction
    train = train.select(draw_stratified_subset_indices(train.labels, fraction, seed=model.run.recipe.train.seed))
    if split in (None, "val") and model.run.recipe.data.validation == 0:
        raise UserError("The run has no validation images (data.validation=0). Use --split test.")
    eval_data = load_eval_data(model.run, model.info, split or "val", None)
    entry_id = None
    if eval_data.split == "test":
        entry_id = add_test_use_entry(
            model.run, data=eval_data.data_name, split="test", views=1, weights=f"probe, {model.weights_label}"
        )
    result = _score_knn_and_linear_probe(model, train, eval_data.samples, eval_data.split, num_neighbours)
    if entry_id is not None:
        log_test_set_result(model.run, entry_id, {"accuracy": result.linear, "knn_accuracy": result.knn})
    return result


def _score_knn_and_linear_probe(
    model: Classifier, train_samples: Dataset, eval_samples: Dataset, split: str, num_neighbours: int
) -> ProbeResult:
    device, classes = model.device, len(model.classes)
    train_features, eval_features = (
        model.compute_features_of_stored_images(part.images).to(device) for part in (train_samples, eval_samples)
    )
    train_labels, eval_labels = train_samples.labels.to(device), eval_samples.labels.to(device)
    knn_predictions = predict_classes_by_knn(train_features, train_labels, eval_features, classes, num_neighbours)
    linear_predictions = fit_linear_probe(train_features, train_labels, classes)(eval_features).argmax(1)
    num_correct = [int((predictions == eval_labels).sum()) for predictions in (knn_predictions, linear_predictions)]
    accuracies = [count / len(eval_samples) for count in num_correct]
    intervals = [wilson_interval(count, len(eval_samples)) for count in num_correct]
    return ProbeResult(
        split=split,
        images=len(eval_samples),
        known=len(train_samples),
        neighbours=min(num_neighbours, len(train_samples)),
        knn=accuracies[0],
        knn_interval=intervals[0],
        linear=accuracies[1],
        linear_interval=intervals[1],
        spread=compute_rms_spread_of_unit_features(eval_features),
    )


def _reject_train_split_and_wrong_ranges(
    split: str | None, num_neighbours: int, max_train_images: int | None, label_fraction: float
) -> None:
    if split == "train":
        raise UserError("The probe is fitted on the training images. Choose --split val or test.")
    if num_neighbours < 1:
        raise UserError(f"--neighbours {num_neighbours} must be at least 1.")
    if max_train_images is not None and max_train_images < 0:
        raise UserError(f"--max-images {max_train_images} must be 0 (all) or more.")
    if not 0 < label_fraction <= 1:
        raise UserError(
            f"--labels must be above 0 and at most 1 (a fraction of the training labels), not {label_fraction:g}."
        )
