"""The result of an evaluation: its metrics and its images."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from vitascope.errors import format_count
from vitascope.evaluation.calibration import Calibration, Temperature
from vitascope.evaluation.choosing import Choice
from vitascope.evaluation.confusion import ClassScore
from vitascope.evaluation.intervals import wilson
from vitascope.evaluation.robustness import Decline
from vitascope.model.config import ModelConfig
from vitascope.run.directory import Run


def split_name(split: str) -> str:
    """Return the full name of a split, for sentences and captions."""
    return {"val": "validation", "train": "training"}.get(split, split)


def describe_reduction(config: ModelConfig) -> str:
    """Describe token merging or dropping at inference; empty if all tokens are used."""
    if not config.fewer:
        return ""
    removed = config.fewer_per_block
    limit = "" if min(removed) == max(removed) else "up to "
    return f"{limit}{format_count(max(removed), 'token')} {'merged' if config.merge_tokens else 'dropped'} per block"


@dataclass(frozen=True)
class Mistake:
    """A wrong prediction: the image, its true and predicted class, and their probabilities."""

    index: int  # in the split
    file: str | None
    label: str
    said: str
    probability: float  # of the predicted class
    probability_of_label: float


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The metrics; `choice` holds the evaluated images."""

    run: Run
    choice: Choice
    classes: list[str]
    views: int
    weights: str  # last or best
    opening: int | None  # 1 for this run's first use of these test images; None for other splits
    seconds: float  # for the logits
    set_up_seconds: float  # for a first empty batch on a GPU
    wall_seconds: float | None  # from the start of the process to the last logit; None if it did other work before
    top5: float
    confusion: Tensor
    calibration: Calibration
    temperature: Temperature | None
    temperature_words: str  # the images it was fitted on, or a sentence: why there is none
    per_class: dict[str, ClassScore]
    worst: list[Mistake]
    reduction: str = ""  # token merging or dropping, such as "2 tokens dropped per block"; empty: none
    robustness: dict[str, Decline] = field(default_factory=dict)  # empty with robust=False

    @property
    def right(self) -> int:
        return int(self.confusion.diagonal().sum())

    @property
    def accuracy(self) -> float:
        return self.right / len(self.choice.images)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the accuracy (Wilson)."""
        return wilson(self.right, len(self.choice.images))

    @property
    def loss(self) -> float:
        return self.calibration.loss

    @property
    def ece(self) -> float:
        return self.calibration.ece

    def __repr__(self) -> str:
        low, high = self.interval
        what = f"{self.choice.split}, {len(self.choice.images):,} images, views={self.views}"
        return f"Evaluation({what}: accuracy {self.accuracy:.4f}, interval {low:.4f} to {high:.4f}, ece {self.ece:.4f})"

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for --json and report.json; accuracies are fractions."""
        told = asdict(self.calibration)
        return {
            "run": str(self.run.path),
            "data": self.choice.data,
            "split": self.choice.split,
            "images": len(self.choice.images),
            "skipped": self.choice.skipped,
            "views": self.views,
            "weights": self.weights,
            "opening": self.opening,
            "seconds": round(self.seconds, 3),
            "wall_seconds": self.wall_seconds and round(self.wall_seconds, 2),
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "top5": self.top5,
            "loss": told.pop("loss"),
            "brier": told.pop("brier"),
            "ece": told.pop("ece"),
            "calibration": told,
            "temperature": asdict(self.temperature) if self.temperature else None,
            "temperature_words": self.temperature_words,
            "per_class": {name: asdict(row) for name, row in self.per_class.items()},
            "confusion": self.confusion.tolist(),
            "worst": [asdict(mistake) for mistake in self.worst],
            "robustness": {name: asdict(decline) for name, decline in self.robustness.items()},
        }

    def _repr_html_(self) -> str:
        from vitascope.evaluation.figures import as_html

        return as_html(self)
