"""The result of an evaluation: confusion matrix, metrics per class, and the images with the worst errors."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from vitascope.data.dataset import Labels
from vitascope.errors import format_count
from vitascope.evaluation.calibration import Calibration, TemperatureScaling
from vitascope.evaluation.coverage import Coverage
from vitascope.evaluation.eval_data import EvalData
from vitascope.evaluation.robustness import RobustnessCurve
from vitascope.inference.scoring import Interval, wilson_interval
from vitascope.run.directory import Run
from vitascope.run.temperature import RunTemperature


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class; None where the denominator is 0."""

    images: int
    precision: float | None  # fraction of the images predicted as this class that belong to it
    recall: float | None  # fraction of its images that are predicted correctly
    f1: float | None  # harmonic mean of precision and recall
    recall_interval: Interval
    taken_for: str | None  # the most frequent wrong prediction for its images; of several, the first


def compute_confusion_matrix(
    labels: Labels, predicted_labels: Labels, num_classes: int
) -> Int[Tensor, "true_class predicted_class"]:
    """Return class × class counts: rows are true classes, columns predicted classes."""
    return torch.bincount(labels * num_classes + predicted_labels, minlength=num_classes**2).reshape(
        num_classes, num_classes
    )


def compute_class_scores(confusion_matrix: Tensor, class_names: list[str]) -> dict[str, ClassScore]:
    """Return the scores of each class from the counts that `compute_confusion_matrix` returns."""
    num_predicted, num_images, num_correct = (
        confusion_matrix.sum(0).tolist(),
        confusion_matrix.sum(1).tolist(),
        confusion_matrix.diagonal().tolist(),
    )
    wrong = confusion_matrix - confusion_matrix.diagonal().diag()
    scores = {}
    for index, name in enumerate(class_names):
        confused_index = int(wrong[index].argmax())
        scores[name] = ClassScore(
            num_images[index],
            _divide_or_none(num_correct[index], num_predicted[index]),
            _divide_or_none(num_correct[index], num_images[index]),
            _divide_or_none(2 * num_correct[index], num_predicted[index] + num_images[index]),
            wilson_interval(num_correct[index], num_images[index]),
            class_names[confused_index] if wrong[index, confused_index] else None,
        )
    return scores


MAX_LISTED_CONFUSIONS = 3


def list_most_frequent_wrong_predictions(confusion_matrix: Tensor, class_names: list[str]) -> list[str]:
    """Return for each true class its most frequent wrong predictions, ties included, with their numbers of images."""
    texts = []
    for counts in (confusion_matrix - confusion_matrix.diagonal().diag()).tolist():
        highest = max(counts)
        names = [f"{name} ({count})" for name, count in zip(class_names, counts, strict=True) if count == highest > 0]
        listed = names[:MAX_LISTED_CONFUSIONS] + ["…"] * (len(names) > MAX_LISTED_CONFUSIONS)
        texts.append(", ".join(listed) or "–")
    return texts


def _divide_or_none(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def spell_out_split_name(split: str) -> str:
    """Return the full name of a split, for sentences and captions."""
    return {"val": "validation", "train": "training"}.get(split, split)


@dataclass(frozen=True)
class Misclassification:
    """A wrong prediction: the image, its true and predicted class, and their probabilities."""

    index: int  # in the split
    file: str | None
    label: str
    said: str
    probability: float  # of the predicted class
    probability_of_label: float


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The metrics of one evaluation; `eval_data` holds the evaluated images."""

    run: Run
    eval_data: EvalData
    classes: list[str]
    views: int
    weights_label: str  # last or best epoch, with token merging or dropping: "best, merge_tokens=8"
    test_use_count: int | None  # 1 for this run's first use of these test images; None for other splits
    seconds: float  # for the logits
    set_up_seconds: float  # for a first empty batch on a GPU
    wall_seconds: float | None  # from the start of the process to the last logit; None if it did other work before
    top5: float
    confusion_matrix: Tensor
    calibration: Calibration
    temperature: TemperatureScaling | None
    temperature_note: str  # the images it was fitted on, or a sentence: why there is none
    run_temperature: RunTemperature | None  # which `predict` applies; None: the run has no validation images
    coverage: Coverage  # accuracy of the predictions with at least a threshold's probability
    per_class: dict[str, ClassScore]
    worst_errors: list[Misclassification]
    reduction: str = ""  # token merging or dropping, such as "2 tokens dropped per block"; empty: none
    robustness: dict[str, RobustnessCurve] = field(default_factory=dict)  # empty with no corruption tests
    is_linear_probe: bool = False  # trained without labels; the classifier is a linear probe on frozen features

    @property
    def accuracy_name(self) -> str:
        return "linear-probe accuracy" if self.is_linear_probe else "accuracy"

    @property
    def num_correct(self) -> int:
        return int(self.confusion_matrix.diagonal().sum())

    @property
    def accuracy(self) -> float:
        return self.num_correct / len(self.eval_data.samples)

    @property
    def accuracy_interval(self) -> Interval:
        """95 % confidence interval of the accuracy (Wilson)."""
        return wilson_interval(self.num_correct, len(self.eval_data.samples))

    @property
    def loss(self) -> float:
        return self.calibration.loss

    @property
    def ece(self) -> float:
        return self.calibration.ece

    @property
    def temperature_warning(self) -> str:
        """A sentence if temperature scaling visibly increases the loss on the evaluated images; otherwise empty."""
        scaling = self.temperature
        if scaling is None or round(scaling.loss, 3) <= round(self.loss, 3):
            return ""
        split = "" if self.eval_data.split == "all" else f"{spell_out_split_name(self.eval_data.split)} "
        images = format_count(len(self.eval_data.samples), f"{split}image")
        return (
            f"On these {images}, temperature scaling increases the loss ({self.loss:z.3f} → {scaling.loss:z.3f}). The "
            f"temperature was fitted on other images: {format_count(scaling.fitted_on, 'validation image')}."
        )

    def __repr__(self) -> str:
        low, high = self.accuracy_interval
        description = f"{self.eval_data.split}, {len(self.eval_data.samples):,} images, views={self.views}"
        accuracy = f"accuracy {self.accuracy:.4f}, interval {low:.4f} to {high:.4f}"
        return f"Evaluation({description}: {accuracy}, ece {self.ece:.4f})"

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for --json and report.json; accuracies are fractions."""
        calibration = asdict(self.calibration)
        return {
            "run": str(self.run.path),
            "data": self.eval_data.data_name,
            "split": self.eval_data.split,
            "images": len(self.eval_data.samples),
            "skipped": self.eval_data.unreadable_files,
            "views": self.views,
            "weights": self.weights_label,
            "opening": self.test_use_count,
            "seconds": round(self.seconds, 3),
            "wall_seconds": self.wall_seconds and round(self.wall_seconds, 2),
            "accuracy": self.accuracy,
            "interval": list(self.accuracy_interval),
            "top5": self.top5,
            "loss": calibration.pop("loss"),
            "brier": calibration.pop("brier"),
            "ece": calibration.pop("ece"),
            "calibration": calibration,
            "temperature": asdict(self.temperature) if self.temperature else None,
            "temperature_words": self.temperature_note,
            "coverage": self.coverage.as_dict(),
            "per_class": {name: asdict(row) for name, row in self.per_class.items()},
            "confusion": self.confusion_matrix.tolist(),
            "worst": [asdict(error) for error in self.worst_errors],
            "robustness": {name: asdict(curve) for name, curve in self.robustness.items()},
        }

    def _repr_html_(self) -> str:
        from vitascope.draw.html import format_parts_for_notebook
        from vitascope.evaluation.figures import make_evaluation_document_parts  # imports matplotlib

        return format_parts_for_notebook(make_evaluation_document_parts(self))
