"""Evaluate a run's frozen features with k-nearest neighbours and a linear probe.

Neighbours as in Wu et al. 2018 and DINO: 20 by cosine, votes weighted by exp(similarity / 0.07). The linear probe is a
logistic regression on the training images' features.
"""

from dataclasses import asdict, dataclass
from typing import Any

from vitascope.data.dataset import Split
from vitascope.data.splits import draw_stratified_subset
from vitascope.errors import UserError
from vitascope.evaluation.eval_data import load_run_split, open_eval_data
from vitascope.evaluation.intervals import wilson_interval
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.run.test_set_log import log_test_set_result, log_test_set_use
from vitascope.training.objectives.feature_metrics import (
    NUM_NEIGHBOURS,
    compute_feature_spread,
    fit_linear_probe,
    predict_knn,
)


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies on the evaluated images, with 95 % confidence intervals."""

    split: str
    images: int
    known: int  # number of training images whose features and labels are used
    neighbours: int
    knn: float
    knn_interval: tuple[float, float]
    linear: float
    linear_interval: tuple[float, float]
    spread: float  # of the features: 0 all identical (collapse), 1 maximal

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_frozen_features(
    model: TrainedTransformer,
    split: str | None = None,
    *,
    num_neighbours: int = NUM_NEIGHBOURS,
    max_images: int = 0,
    label_fraction: float = 1.0,
) -> ProbeResult:
    """Evaluate on `split`: val (default) or test.

    `max_images`: training images to use (0: all); `labels`: a fraction of them."""
    _check_probe_options(split, num_neighbours, max_images, label_fraction)
    train = load_run_split(model.run, model.info, "train")
    if train is None:
        raise UserError("The run has no training images.")
    if 0 < max_images < len(model.classes):
        raise UserError(
            f"--max-images {max_images} is too small. Use at least {len(model.classes)}: one image per class."
        )
    share = label_fraction * min(1.0, max_images / len(train)) if max_images else label_fraction
    train = train.select(draw_stratified_subset(train.labels, share, seed=model.run.recipe.train.seed))
    if split in (None, "val") and model.run.recipe.data.validation == 0:
        raise UserError("The run has no validation images (data.validation=0). Use --split test.")
    chosen = open_eval_data(model.run, model.info, split or "val", None)
    tie = None
    if chosen.split == "test":
        tie = log_test_set_use(
            model.run, data=chosen.data_name, split="test", views=1, weights=f"probe, {model.weights_label}"
        )
    found = _fit_and_score_probes(model, train, chosen.samples, chosen.split, num_neighbours)
    if tie is not None:
        log_test_set_result(model.run, tie, {"accuracy": found.linear, "knn_accuracy": found.knn})
    return found


def _fit_and_score_probes(
    model: TrainedTransformer, train_samples: Split, eval_samples: Split, split: str, num_neighbours: int
) -> ProbeResult:
    device, classes = next(model.parameters()).device, len(model.classes)
    known, features = (model.compute_stored_features(part.images).to(device) for part in (train_samples, eval_samples))
    labels, wanted = train_samples.labels.to(device), eval_samples.labels.to(device)
    nearest = predict_knn(known, labels, features, classes, num_neighbours)
    linear = fit_linear_probe(known, labels, classes)(features).argmax(1)
    right = [int((answers == wanted).sum()) for answers in (nearest, linear)]
    shares = [count / len(eval_samples) for count in right]
    intervals = [wilson_interval(count, len(eval_samples)) for count in right]
    return ProbeResult(
        split=split,
        images=len(eval_samples),
        known=len(train_samples),
        neighbours=min(num_neighbours, len(train_samples)),
        knn=shares[0],
        knn_interval=intervals[0],
        linear=shares[1],
        linear_interval=intervals[1],
        spread=compute_feature_spread(features),
    )


def _check_probe_options(split: str | None, num_neighbours: int, max_images: int, label_fraction: float) -> None:
    if split == "train":
        raise UserError("The probe is fitted on the training images. Choose --split val or test.")
    if num_neighbours < 1:
        raise UserError(f"--neighbours {num_neighbours} must be at least 1.")
    if max_images < 0:
        raise UserError(f"--max-images {max_images} must be 0 (all) or more.")
    if not 0 < label_fraction <= 1:
        raise UserError(
            f"--labels must be above 0 and at most 1 (a fraction of the training labels), not {label_fraction:g}."
        )
