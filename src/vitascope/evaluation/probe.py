"""Evaluate a run's frozen features with k-nearest neighbours and a linear probe.

Neighbours as in Wu et al. 2018 and DINO: 20 by cosine, votes weighted by exp(similarity / 0.07). The linear probe is a
logistic regression on the training images' features.
"""

from dataclasses import asdict, dataclass
from typing import Any

from vitascope.data.source import Split
from vitascope.data.split import stratified_part
from vitascope.errors import UserError
from vitascope.evaluation.choosing import choose, own_images
from vitascope.evaluation.intervals import wilson
from vitascope.evaluation.openings import note_opening, note_result
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.training.evidence import NEIGHBOURS, fit_probe, nearest_answers, spread


@dataclass(frozen=True)
class Probed:
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


def probe(
    model: TrainedTransformer,
    split: str | None = None,
    *,
    neighbours: int = NEIGHBOURS,
    max_images: int = 0,
    labels: float = 1.0,
) -> Probed:
    """Evaluate on `split`: val (default) or test.

    `max_images`: training images to use (0: all); `labels`: a fraction of them."""
    _check(split, neighbours, max_images, labels)
    train = own_images(model.run, model.facts, "train")
    if train is None:
        raise UserError("The run has no training images.")
    if 0 < max_images < len(model.classes):
        raise UserError(
            f"--max-images {max_images} is too small. Use at least {len(model.classes)}: one image per class."
        )
    share = labels * min(1.0, max_images / len(train)) if max_images else labels
    train = train.part(stratified_part(train.labels, share, seed=model.run.recipe.train.seed))
    if split in (None, "val") and model.run.recipe.data.validation == 0:
        raise UserError("The run has no validation images (data.validation=0). Use --split test.")
    chosen = choose(model.run, model.facts, split or "val", None)
    tie = None
    if chosen.split == "test":
        tie = note_opening(model.run, data=chosen.data, split="test", views=1, weights=f"probe, {model.weights}")
    found = _probed(model, train, chosen.images, chosen.split, neighbours)
    if tie is not None:
        note_result(model.run, tie, {"accuracy": found.linear, "knn_accuracy": found.knn})
    return found


def _probed(model: TrainedTransformer, train: Split, asked: Split, split: str, neighbours: int) -> Probed:
    device, classes = next(model.parameters()).device, len(model.classes)
    known, features = (model.stored_features(part.images).to(device) for part in (train, asked))
    labels, wanted = train.labels.to(device), asked.labels.to(device)
    nearest = nearest_answers(known, labels, features, classes, neighbours)
    linear = fit_probe(known, labels, classes)(features).argmax(1)
    right = [int((answers == wanted).sum()) for answers in (nearest, linear)]
    shares = [count / len(asked) for count in right]
    intervals = [wilson(count, len(asked)) for count in right]
    return Probed(
        split=split,
        images=len(asked),
        known=len(train),
        neighbours=min(neighbours, len(train)),
        knn=shares[0],
        knn_interval=intervals[0],
        linear=shares[1],
        linear_interval=intervals[1],
        spread=spread(features),
    )


def _check(split: str | None, neighbours: int, max_images: int, labels: float) -> None:
    if split == "train":
        raise UserError("The probe is fitted on the training images. Choose --split val or test.")
    if neighbours < 1:
        raise UserError(f"--neighbours {neighbours} must be at least 1.")
    if max_images < 0:
        raise UserError(f"--max-images {max_images} must be 0 (all) or more.")
    if not 0 < labels <= 1:
        raise UserError(f"--labels must be above 0 and at most 1 (a fraction of the training labels), not {labels:g}.")
