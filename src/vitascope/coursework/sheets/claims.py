"""Test a sheet's claims, each based on one run, with several seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

from vitascope.coursework.sheets.experiments import find_first_epoch_reaching_target
from vitascope.records.ablation import NOT_SIGNIFICANT, PairedDifference
from vitascope.study.results import CombinationResults, StudyResults
from vitascope.study.storage import RunResult

TARGET_ACCURACY = 0.9  # validation accuracy; slow convergence reaches it late


def _compute_fractional_epochs_to_target(result: RunResult) -> float:
    """Compute the epochs until the curve reaches the target, interpolated linearly between epochs, because whole
    epochs would often
    differ equally in all seeds. Number of epochs + 1 if it is not reached."""
    curve = [0.0, *result["curves"]["val_accuracy"]]
    epoch = find_first_epoch_reaching_target(curve[1:], TARGET_ACCURACY)
    if epoch is None:
        return float(len(curve))
    before, after = curve[epoch - 1 : epoch + 1]
    return epoch - 1 + (TARGET_ACCURACY - before) / (after - before)


def _compute_largest_accuracy_drop(result: RunResult) -> float:
    curve = result["curves"]["val_accuracy"]
    return 100 * max([0.0, *(before - after for before, after in pairwise(curve))])


MEASURES: dict[str, Callable[[RunResult], float]] = {
    "final accuracy in %": lambda run: 100 * run["accuracy"],
    "accuracy after the first epoch in %": lambda run: 100 * run["curves"]["val_accuracy"][0],
    f"epochs until {100 * TARGET_ACCURACY:.0f} % accuracy": _compute_fractional_epochs_to_target,
    "largest drop in accuracy from one epoch to the next, in points": _compute_largest_accuracy_drop,
    "seconds per run": lambda run: run["seconds"],
}
FINAL_ACCURACY, FIRST_EPOCH_ACCURACY, EPOCHS_TO_TARGET, LARGEST_DROP, SECONDS_PER_RUN = MEASURES


class ClaimVerdict(NamedTuple):
    verdict: str  # holds, does not hold, the opposite holds, no significant difference, one seed
    measurement: str


class AccuracyGain(NamedTuple):
    points: str  # difference in percentage points, with its interval
    verdict: str  # helps, hurts, no significant difference, one seed


@dataclass(frozen=True)
class Claim:
    """A claim that a value is the best, alone or together with others; or that a measure is higher (or lower) for this
    value than for another value, or than the mean of all others."""

    text: str
    value: str
    measure: str | None = None  # None: the claim is that the value is the best
    expects_higher: bool = True
    allows_ties: bool = False  # others may be equally good
    compared_value: str | None = None

    def evaluate(self, study_result: StudyResults, num_comparisons: int = 1) -> ClaimVerdict:
        """Test the claim over the seeds, corrected for the number of comparisons."""
        cells = {next(iter(cell.settings.values())): cell for cell in study_result.combinations}
        if self.measure is None:
            return _evaluate_best_claim(study_result, cells[self.value], self.allows_ties)
        others = [cell for value, cell in cells.items() if value != self.value and self.compared_value in (None, value)]
        measure, results = MEASURES[self.measure], cells[self.value].results
        seeds = [seed for seed in results if all(seed in other.results for other in others)]
        pairs = [measure(results[seed]) - mean(measure(other.results[seed]) for other in others) for seed in seeds]
        difference = PairedDifference.from_pairs(pairs, num_comparisons)
        claimed, opposite = ("better", "worse") if self.expects_higher else ("worse", "better")
        verdict = {claimed: "holds", opposite: "the opposite holds"}.get(difference.verdict, difference.verdict)
        value = mean(measure(results[seed]) for seed in seeds)
        compared = self.compared_value or "the mean of the others"
        return ClaimVerdict(
            verdict, f"{self.measure}: {value:.2f}; difference to {compared}: {difference.format_with_interval()}"
        )


def _evaluate_best_claim(study_result: StudyResults, cell: CombinationResults, allows_ties: bool) -> ClaimVerdict:
    best = study_result.best_combination
    if len(best.results) < 2:
        return ClaimVerdict("one seed", f"{cell.formatted_accuracy}; the best has {best.formatted_accuracy}")
    if cell is best:
        equal = "; ".join(other.name for other in study_result.combinations_tied_with_best)
        compared = f"not significantly different: {equal}" if equal else "all others are significantly worse"
        return ClaimVerdict(
            NOT_SIGNIFICANT if equal and not allows_ties else "holds",
            f"{cell.formatted_accuracy}, the best; {compared}",
        )
    measurement = f"{cell.formatted_accuracy}; {best.name} has {best.formatted_accuracy}"
    if cell not in study_result.combinations_tied_with_best:
        return ClaimVerdict("does not hold", measurement)
    return ClaimVerdict(NOT_SIGNIFICANT, f"{measurement}, which is not significantly different")


def format_accuracy_gain(
    baseline: CombinationResults, variant: CombinationResults, num_comparisons: int
) -> AccuracyGain:
    """Compare a variant with its baseline, seed by seed, corrected for the number of comparisons."""
    difference = variant.compute_accuracy_difference_from(baseline, num_comparisons)
    if difference is None:
        return AccuracyGain("–", "not compared")
    return AccuracyGain(difference.format_with_interval(100), difference.effect_verdict)
