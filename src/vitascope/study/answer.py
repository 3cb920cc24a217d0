"""Evaluate finished trials: mean and confidence interval over seeds, and which differences are significant."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

from vitascope.records.arms import NOT_SIGNIFICANT, format_difference, format_mean, interval
from vitascope.study.design import Design, named

NO_SPREAD = 1e-9  # below this, the differences of all seeds are equal up to rounding


@dataclass(frozen=True)
class Cell:
    """One combination of settings and the results of its seeds."""

    settings: dict[str, str]
    results: dict[int, dict[str, Any]]  # by seed

    @property
    def name(self) -> str:
        return named({key.split(".")[-1]: value for key, value in self.settings.items()})

    @property
    def accuracies(self) -> list[float]:
        return [found["accuracy"] for found in self.results.values()]

    @property
    def accuracy(self) -> float:
        return mean(self.accuracies)

    @property
    def half(self) -> float | None:
        """Half-width of the 95 % confidence interval of the mean over seeds (Student's t); None for one seed."""
        return interval(self.accuracies)

    @property
    def percent(self) -> str:
        """The mean with its interval; the values themselves with one or two seeds."""
        return format_mean(self.accuracies)

    def number(self, name: str) -> float:
        """The mean over seeds of parameters, flops, seconds or images_seen."""
        return mean(found[name] for found in self.results.values())

    @property
    def seconds(self) -> str:
        """The mean over seeds; a dash if the runs are from different machines."""
        machines = {found["machine"] for found in self.results.values()}
        return f"{self.number('seconds'):.1f}" if len(machines) == 1 else "–"

    def minus(self, other: "Cell", together: int) -> "Difference | None":
        """The difference in accuracy, seed by seed; None without common seeds. `together`: number of comparisons."""
        common = [seed for seed in self.results if seed in other.results]
        pairs = [self.results[seed]["accuracy"] - other.results[seed]["accuracy"] for seed in common]
        return Difference.of(pairs, together) if pairs else None

    def last(self, name: str) -> float | None:
        """The mean over seeds of a curve's last epoch."""
        found = [curve[-1] for curve in self.curves(name)]
        return mean(found) if found else None

    def mean_curve(self, name: str) -> list[float]:
        """The mean over seeds, per epoch."""
        return [mean(values) for values in zip(*self.curves(name), strict=True)]

    def curves(self, name: str) -> list[list[float]]:
        """One curve per seed that has it."""
        return [found["curves"][name] for found in self.results.values() if name in found["curves"]]


@dataclass(frozen=True)
class Difference:
    """A paired difference, seed by seed: the mean and the half-width of its 95 % confidence interval."""

    points: float
    half: float | None
    pairs: tuple[float, ...] = ()  # one per seed

    @classmethod
    def of(cls, pairs: list[float], together: int) -> "Difference":
        """`together`: number of comparisons, for the Bonferroni correction."""
        return cls(mean(pairs), interval(pairs, together), tuple(pairs))

    def told(self, scale: float = 1.0) -> str:
        """The mean with its interval; the differences themselves with one or two seeds."""
        return format_difference(self.pairs, self.half, scale)

    @property
    def no_spread(self) -> bool:
        return self.half is not None and self.half < NO_SPREAD

    @property
    def verdict(self) -> str:
        if self.half is None:
            return "one seed"
        if self.no_spread:  # with few seeds, identical differences are a coincidence
            return "not testable"
        return "worse" if self.points < -self.half else "better" if self.points > self.half else NOT_SIGNIFICANT


@dataclass(frozen=True)
class Answer:
    design: Design
    cells: list[Cell]  # in the order of the grid; for a search, best first
    failed: list[tuple[str, str]]  # combination and reason
    left_off: int  # trials of a search that were stopped early
    waiting: int

    @cached_property
    def best(self) -> Cell:
        """The combination with the highest mean, among those with the most seeds."""
        most = max(len(cell.results) for cell in self.cells)
        return max((cell for cell in self.cells if len(cell.results) == most), key=lambda cell: cell.accuracy)

    def against_best(self, cell: Cell) -> Difference | None:
        """The difference to the best; None for the best itself and without common seeds. The best is chosen afterwards,
        so intervals are corrected for all pairs of cells (Bonferroni)."""
        if cell is self.best:
            return None
        return cell.minus(self.best, math.comb(len(self.cells), 2))

    @property
    def as_good(self) -> list[Cell]:
        """The combinations that are not significantly worse than the best."""
        others = [cell for cell in self.cells if cell is not self.best]
        found = [(cell, self.against_best(cell)) for cell in others]
        return [cell for cell, other in found if other is None or other.verdict != "worse"]

    @property
    def sentence(self) -> str:
        """The conclusion of the study."""
        if not self.cells:
            return "No run has finished."
        if self.waiting:
            return f"Not finished. Best so far: {self.best.name} with {self.best.percent}."
        seeds = len(self.best.results)
        said = f"Best: {self.best.name} with {self.best.percent} ({'one seed' if seeds == 1 else f'{seeds} seeds'})."
        if len(self.cells) == 1:
            return f"{said} No other combination has finished."
        if seeds < 2:
            more = " Use --seeds 5." if len(self.design.seeds) == 1 else ""
            return f"{said} One seed is not enough to test significance.{more}"
        one = len(self.cells) == 2
        if len(self.as_good) == len(self.cells) - 1:
            others = "The other combination does not differ" if one else "No other combination differs"
            return f"{said} {others} significantly."
        if not self.as_good:
            return f"{said} {'The' if one else 'Every'} other combination is significantly worse."
        return f"{said} Not significantly different: {'; '.join(cell.name for cell in self.as_good)}."

    @property
    def measure(self) -> str:
        """The name of the accuracy column."""
        return "linear probe" if self.design.objectives.isdisjoint({"classify"}) else "accuracy"

    @property
    def epochs(self) -> int:
        """The number of epochs of the longest run."""
        return max(len(curve) for cell in self.cells for curve in cell.curves("train_loss"))

    @property
    def machines(self) -> list[str]:
        """The machines that trained the runs."""
        return list(dict.fromkeys(run["machine"] for cell in self.cells for run in cell.results.values()))

    @property
    def clock(self) -> str:
        """How the seconds were measured; empty without runs."""
        runs = [run for cell in self.cells for run in cell.results.values()]
        if not runs:
            return ""
        most = max(run["together"] for run in runs)
        told = f"Times ({', '.join(self.machines)}) exclude the start-up time of the first epoch."
        if len({run["compiled"] for run in runs}) > 1:
            which = [cell.name for cell in self.cells if any(run["compiled"] for run in cell.results.values())]
            told += f" These runs were compiled, which shortens their epochs: {'; '.join(which)}."
        if crowded := sum(run.get("beside", 0) > 0 for run in runs):
            told += f" {crowded} of {len(runs)} runs shared their machine with other runs, which makes them slower."
        if most > 1:
            told += f" Up to {most} runs were trained in one batch; the time is divided by their number."
        return told

    def front(self, cost: str) -> list[Cell]:
        """The Pareto front: cells for which no other cell has both higher accuracy and lower cost."""
        return [
            cell
            for cell in self.cells
            if not any(
                other.number(cost) <= cell.number(cost)
                and other.accuracy >= cell.accuracy
                and (other.number(cost), other.accuracy) != (cell.number(cost), cell.accuracy)
                for other in self.cells
            )
        ]


def answer(design: Design, trials: list[Any]) -> Answer:
    """Collect the results of the storage's trials."""
    found: dict[tuple[tuple[str, str], ...], dict[int, dict[str, Any]]] = {}
    failed, waiting, left_off = [], 0, 0
    for trial in trials:
        told, state = trial.user_attrs, trial.state.name
        if state == "COMPLETE":
            results = {int(seed): result for seed, result in told["results"].items()}
            settings = tuple((key, told["cell"][key]) for key in design.varied)
            found.setdefault(settings, {}).update(results)
        elif state == "FAIL":
            which = named(told.get("cell", {}), f"seed {told['seeds'][0]}")
            failed.append((which, told.get("failed", "unknown")))
        waiting += state in ("WAITING", "RUNNING")
        left_off += state == "PRUNED"
    cells = [Cell(dict(settings), dict(sorted(results.items()))) for settings, results in found.items()]
    if design.search:
        cells.sort(key=lambda cell: -cell.accuracy)
    else:
        order = {tuple(cell.items()): place for place, cell in enumerate(design.cells)}
        cells.sort(key=lambda cell: order.get(tuple(cell.settings.items()), len(order)))
    return Answer(design, cells, failed, left_off, waiting)
