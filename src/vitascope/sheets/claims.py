"""Test a sheet's claims, each based on one run, with several seeds."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from vitascope.records.arms import NOT_SIGNIFICANT
from vitascope.sheets.lab import first_epoch
from vitascope.study.answer import Answer, Cell, Difference

MARK = 0.9  # validation accuracy; slow convergence reaches it late
Result = dict[str, Any]  # of one run


def _epochs_to_mark(run: Result) -> float:
    """Epochs until the curve reaches the mark, interpolated linearly between epochs, because whole epochs would often
    differ equally in all seeds. Number of epochs + 1 if it is not reached."""
    curve = [0.0, *run["curves"]["val_accuracy"]]
    epoch = first_epoch(curve[1:], MARK)
    if epoch is None:
        return float(len(curve))
    before, after = curve[epoch - 1 : epoch + 1]
    return epoch - 1 + (MARK - before) / (after - before)


def _largest_fall(run: Result) -> float:
    curve = run["curves"]["val_accuracy"]
    return 100 * max([0.0, *(before - after for before, after in pairwise(curve))])


MEASURES: dict[str, Callable[[Result], float]] = {
    "final accuracy in %": lambda run: 100 * run["accuracy"],
    "accuracy after the first epoch in %": lambda run: 100 * run["curves"]["val_accuracy"][0],
    f"epochs until {100 * MARK:.0f} % accuracy": _epochs_to_mark,
    "largest drop in accuracy from one epoch to the next, in points": _largest_fall,
    "seconds per run": lambda run: run["seconds"],
}
END, START, SLOW, FALL, TIME = MEASURES


@dataclass(frozen=True)
class Claim:
    """A claim that a value is the best, alone or together with others; or that a measure is higher (or lower) for this
    value than for another value, or than the mean of all others."""

    text: str
    value: str
    measure: str | None = None  # None: the claim is that the value is the best
    more: bool = True
    shared: bool = False  # others may be equally good
    than: str | None = None

    def judged(self, found: Answer, together: int = 1) -> tuple[str, str]:
        """The verdict (holds, does not hold, the opposite holds, no significant difference) and the measurement.
        `together`: number of comparisons."""
        cells = {next(iter(cell.settings.values())): cell for cell in found.cells}
        if self.measure is None:
            return _best(found, cells[self.value], self.shared)
        others = [cell for value, cell in cells.items() if value != self.value and self.than in (None, value)]
        measure, own = MEASURES[self.measure], cells[self.value].results
        seeds = [seed for seed in own if all(seed in other.results for other in others)]
        pairs = [measure(own[seed]) - mean(measure(other.results[seed]) for other in others) for seed in seeds]
        other = Difference.of(pairs, together)
        claimed, opposite = ("better", "worse") if self.more else ("worse", "better")
        verdict = {claimed: "holds", opposite: "the opposite holds"}.get(other.verdict, other.verdict)
        mine = mean(measure(own[seed]) for seed in seeds)
        against = self.than or "the mean of the others"
        return verdict, f"{self.measure}: {mine:.2f}; difference to {against}: {other.told()}"


def _best(found: Answer, cell: Cell, shared: bool) -> tuple[str, str]:
    best = found.best
    if len(best.results) < 2:
        return "one seed", f"{cell.percent}; the best has {best.percent}"
    if cell is best:
        rest = "; ".join(other.name for other in found.as_good)
        compared = f"not significantly different: {rest}" if rest else "all others are significantly worse"
        return NOT_SIGNIFICANT if rest and not shared else "holds", f"{cell.percent}, the best; {compared}"
    measured = f"{cell.percent}; {best.name} has {best.percent}"
    if cell not in found.as_good:
        return "does not hold", measured
    return NOT_SIGNIFICANT, f"{measured}, which is not significantly different"


def gain(plain: Cell, changed: Cell, together: int) -> tuple[str, str]:
    """The difference in points, seed by seed, and its verdict; `together`: number of comparisons."""
    other = changed.minus(plain, together)
    if other is None:
        return "–", "not compared"
    return other.told(100), {"better": "helps", "worse": "hurts"}.get(other.verdict, other.verdict)
