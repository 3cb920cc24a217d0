"""Coverage against accuracy: answer only confident predictions, and suggest the threshold for an error rate."""

from dataclasses import asdict, dataclass
from typing import Any

from vitascope.data.dataset import Labels
from vitascope.errors import UserError
from vitascope.inference.scoring import Interval, wilson_interval
from vitascope.shapes import Logits

DEFAULT_TARGET_ERROR = 0.02
MIN_ANSWERED = 20  # images at the suggested threshold
THRESHOLDS = (*(step / 100 for step in range(100)), 0.995, 0.999, 0.9995, 0.9999)
TABLE_THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class CoverageRow:
    """The answered images: those whose predicted class has at least the probability `threshold`."""

    threshold: float
    answered: int  # images
    coverage: float  # fraction of all images
    accuracy: float | None  # among the answered images; None if there are none
    interval: Interval  # of this accuracy (Wilson)


@dataclass(frozen=True)
class SuggestedThreshold:
    """The lowest threshold with at most the target error rate among the answered images of `split`."""

    target_error: float
    split: str
    images: int
    row: CoverageRow | None  # None: no threshold reaches the target
    min_error_below: float | None = None  # smallest error rate of all lower thresholds; None if there are none

    @property
    def is_from_too_few_images(self) -> bool:
        """Whether the answered images could not support the target error rate even if all of them were correct."""
        if self.row is None:
            return False
        answered = self.row.answered
        return answered < MIN_ANSWERED or 1 - wilson_interval(answered, answered).low > self.target_error


@dataclass(frozen=True)
class Coverage:
    """Coverage and accuracy of the evaluated images by threshold. `temperature` divides the logits, as in predict."""

    temperature: float
    rows: list[CoverageRow]  # one per threshold
    suggestion: SuggestedThreshold

    @property
    def table_rows(self) -> list[CoverageRow]:
        """The rows of some round thresholds and of the suggested one."""
        chosen = self.suggestion.row
        thresholds = {*TABLE_THRESHOLDS, *([chosen.threshold] if chosen else [])}
        return [row for row in self.rows if row.threshold in thresholds]

    @property
    def row_at_suggested_threshold(self) -> CoverageRow | None:
        """The evaluated images at the suggested threshold."""
        chosen = self.suggestion.row
        return next((row for row in self.rows if chosen and row.threshold == chosen.threshold), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "rows": [asdict(row) for row in self.table_rows],
            "suggestion": asdict(self.suggestion),
        }


def compute_coverage_rows(logits: Logits, labels: Labels, temperature: float) -> list[CoverageRow]:
    """Return one row per threshold; probabilities are computed as in `predict`."""
    predicted = logits.argmax(1)
    probabilities = (logits.double() / temperature).softmax(1).gather(1, predicted[:, None])[:, 0]
    correct = predicted == labels
    rows = []
    for threshold in THRESHOLDS:
        is_answered = probabilities >= threshold
        answered, num_correct = int(is_answered.sum()), int((is_answered & correct).sum())
        accuracy = num_correct / answered if answered else None
        interval = wilson_interval(num_correct, answered)
        rows.append(CoverageRow(threshold, answered, answered / len(labels), accuracy, interval))
    return rows


def find_lowest_threshold(rows: list[CoverageRow], target_error: float) -> CoverageRow | None:
    """Return the first row whose error rate is at most the target; None if there is none."""
    return next((row for row in rows if row.accuracy is not None and 1 - row.accuracy <= target_error), None)


def find_min_error_below(rows: list[CoverageRow], threshold: float) -> float | None:
    """Return the smallest error rate of the thresholds below this one; None if there are none."""
    errors = (1 - row.accuracy for row in rows if row.accuracy is not None and row.threshold < threshold)
    return min(errors, default=None)


def check_target_error(target_error: float) -> None:
    if not 0 <= target_error < 1:
        raise UserError(
            f"The target error rate {target_error:g} is not a fraction. Choose one from 0 to below 1, such as 0.02."
        )
