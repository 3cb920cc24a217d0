"""What a sheet says of a setting, from one run each -> whether several seeds bear it out."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from vitascope.sheets.lab import first_epoch
from vitascope.study.answer import Answer, Cell, Difference

MARK = 0.9  # of the held-back images: who converges slowly reaches it late
Result = dict[str, Any]  # of one run


def _epochs_to_mark(run: Result) -> float:
    """Between two ends of epochs where a straight line from one to the other passes it: whole epochs would often differ
    by the same number in all seeds. One more than there were where it is not reached."""
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
    "points at the end": lambda run: 100 * run["accuracy"],
    "points after the first epoch": lambda run: 100 * run["curves"]["val_accuracy"][0],
    f"epochs until {MARK:.0%}": _epochs_to_mark,
    "points of the largest fall from one epoch to the next": _largest_fall,
    "seconds a run": lambda run: run["seconds"],
}
END, START, SLOW, FALL, TIME = MEASURES


@dataclass(frozen=True)
class Claim:
    """That a value is the best, alone or shared with others; or that it has more (or less) of a measure than another
    value, or than all others on average."""

    text: str
    value: str
    measure: str | None = None  # none: it is the best
    more: bool = True
    shared: bool = False  # others may not be told from it
    than: str | None = None

    def judged(self, found: Answer, together: int = 1) -> tuple[str, str]:
        """holds, does not hold, the opposite, cannot be told; and what was measured. `together`: claims that are judged
        side by side."""
        cells = {next(iter(cell.settings.values())): cell for cell in found.cells}
        if self.measure is None:
            return _best(found, cells[self.value], self.shared)
        others = [cell for value, cell in cells.items() if value != self.value and self.than in (None, value)]
        measure, own = MEASURES[self.measure], cells[self.value].results
        seeds = [seed for seed in own if all(seed in other.results for other in others)]
        pairs = [measure(own[seed]) - mean(measure(other.results[seed]) for other in others) for seed in seeds]
        other = Difference.of(pairs, together)
        claimed, opposite = ("better", "worse") if self.more else ("worse", "better")
        verdict = {claimed: "holds", opposite: "the opposite"}.get(other.verdict, other.verdict)
        mine = mean(measure(own[seed]) for seed in seeds)
        return verdict, f"{self.measure}: {mine:.2f}, {other.told()} against {self.than or 'the others on average'}"


def _best(found: Answer, cell: Cell, shared: bool) -> tuple[str, str]:
    best = found.best
    if len(best.results) < 2:
        return "one seed", f"{cell.percent}; the best has {best.percent}"
    if cell is best:
        rest = "; ".join(other.name for other in found.as_good)
        told = f"{cell.percent}, the best; " + (f"not to be told from it: {rest}" if rest else "all others are worse")
        return "cannot be told" if rest and not shared else "holds", told
    told = f"{cell.percent}; {best.name} has {best.percent}"
    if cell not in found.as_good:
        return "does not hold", told
    return "cannot be told", f"{told}, which cannot be told from it"


def gain(plain: Cell, changed: Cell, together: int) -> tuple[str, str]:
    """In points, seed by seed, and whether that can be told; `together`: comparisons made side by side."""
    other = changed.minus(plain, together)
    if other is None:
        return "–", "not compared"
    return other.told(100), {"better": "helps", "worse": "hurts"}.get(other.verdict, other.verdict)
