"""Finished trials -> what each setting did: mean and interval over seeds, and what can be told apart."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

from vitascope.records.arms import interval
from vitascope.study.design import Design, named

NO_SPREAD = 1e-9  # differences of so many images, the same for every seed, are equal but for rounding


def percent(shares: list[float]) -> str:
    """Their mean and half of its 95 % interval."""
    half = interval(shares)
    return f"{100 * mean(shares):.2f}{'' if half is None else f' ± {100 * half:.2f}'} %"


@dataclass(frozen=True)
class Cell:
    """One combination and what its seeds came to."""

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
        """Half of the 95 % interval of the mean (Student's t over seeds); None for one seed."""
        return interval(self.accuracies)

    @property
    def percent(self) -> str:
        return percent(self.accuracies)

    def number(self, name: str) -> float:
        """The mean over seeds of parameters, flops, seconds or images_seen."""
        return mean(found[name] for found in self.results.values())

    @property
    def seconds(self) -> str:
        """Their mean; of several machines' it would mean nothing."""
        machines = {found["machine"] for found in self.results.values()}
        return f"{self.number('seconds'):.1f}" if len(machines) == 1 else "–"

    def minus(self, other: "Cell", together: int) -> "Difference | None":
        """Of accuracies; None where no seed is in both. `together`: how many such differences are to hold side by
        side."""
        common = [seed for seed in self.results if seed in other.results]
        pairs = [self.results[seed]["accuracy"] - other.results[seed]["accuracy"] for seed in common]
        return Difference.of(pairs, together) if pairs else None

    def last(self, name: str) -> float | None:
        """The last epoch's mean of a curve."""
        found = [curve[-1] for curve in self.curves(name)]
        return mean(found) if found else None

    def mean_curve(self, name: str) -> list[float]:
        """Epoch by epoch, over the seeds."""
        return [mean(values) for values in zip(*self.curves(name), strict=True)]

    def curves(self, name: str) -> list[list[float]]:
        """A number over the epochs, of each seed that has it."""
        return [found["curves"][name] for found in self.results.values() if name in found["curves"]]


@dataclass(frozen=True)
class Difference:
    """Of one cell to others, seed by seed: the mean, and half of its 95 % interval."""

    points: float
    half: float | None

    @classmethod
    def of(cls, pairs: list[float], together: int) -> "Difference":
        """`together`: how many are to hold side by side (Bonferroni)."""
        return cls(mean(pairs), interval(pairs, together))

    def told(self, scale: float = 1.0) -> str:
        half = self.half
        return f"{scale * self.points:+.2f}{'' if half is None else f' ± {scale * half:.2f}'}"

    @property
    def no_spread(self) -> bool:
        return self.half is not None and self.half < NO_SPREAD

    @property
    def verdict(self) -> str:
        if self.half is None:
            return "one seed"
        if self.no_spread:  # among a few seeds that is luck, not certainty
            return "cannot be told"
        return "worse" if self.points < -self.half else "better" if self.points > self.half else "cannot be told"


@dataclass(frozen=True)
class Answer:
    design: Design
    cells: list[Cell]  # in the order of the grid; of a search the best first
    failed: list[tuple[str, str]]  # which, and why
    left_off: int  # tries of a search that were stopped early
    waiting: int

    @cached_property
    def best(self) -> Cell:
        """Among those with the most seeds: fewer are luckier."""
        most = max(len(cell.results) for cell in self.cells)
        return max((cell for cell in self.cells if len(cell.results) == most), key=lambda cell: cell.accuracy)

    def against_best(self, cell: Cell) -> Difference | None:
        """None for the best itself, and where no seed is in both. The best is known only afterwards, so the intervals
        are those of all pairs of cells together (Bonferroni)."""
        if cell is self.best:
            return None
        return cell.minus(self.best, math.comb(len(self.cells), 2))

    @property
    def as_good(self) -> list[Cell]:
        """Those of which it cannot be said that they are worse than the best."""
        others = [cell for cell in self.cells if cell is not self.best]
        found = [(cell, self.against_best(cell)) for cell in others]
        return [cell for cell, other in found if other is None or other.verdict != "worse"]

    @property
    def sentence(self) -> str:
        """What a reader should take home."""
        if not self.cells:
            return "No run has finished."
        if self.waiting:
            return f"Not finished; so far {self.best.name} has {self.best.percent}."
        said = f"Best: {self.best.name} with {self.best.percent}"
        if len(self.cells) == 1:
            return f"{said}; nothing else has finished."
        if len(self.best.results) < 2:
            more = " Take --seeds 5." if len(self.design.seeds) == 1 else ""
            return f"{said}. With one seed nothing can be said about chance.{more}"
        if len(self.as_good) == len(self.cells) - 1:
            return f"{said}, but no value can be told from it with {len(self.best.results)} seeds."
        if not self.as_good:
            return f"{said}; every other is worse, beyond the seeds' noise."
        return f"{said}; not to be told from it: {'; '.join(cell.name for cell in self.as_good)}."

    @property
    def measure(self) -> str:
        """What the accuracies are of."""
        return "linear probe" if self.design.objectives.isdisjoint({"classify"}) else "accuracy"

    @property
    def epochs(self) -> int:
        """How long the longest run learnt."""
        return max(len(curve) for cell in self.cells for curve in cell.curves("train_loss"))

    @property
    def machines(self) -> list[str]:
        """Where the runs were made, each once."""
        return list(dict.fromkeys(run["machine"] for cell in self.cells for run in cell.results.values()))

    @property
    def clock(self) -> str:
        """What the seconds are; nothing where there are none."""
        runs = [run for cell in self.cells for run in cell.results.values()]
        if not runs:
            return ""
        most = max(run["together"] for run in runs)
        told = f"Seconds ({', '.join(self.machines)}) are steady: the first epoch counts like those after it."
        if len({run["compiled"] for run in runs}) > 1:
            which = [cell.name for cell in self.cells if any(run["compiled"] for run in cell.results.values())]
            told += f" Long enough to be compiled, so that epochs are shorter: {'; '.join(which)}."
        if crowded := sum(run.get("beside", 0) > 0 for run in runs):
            told += f" {crowded} of {len(runs)} runs had others beside them on their machine, which makes them longer."
        if most > 1:
            told += f" Up to {most} runs learnt together, as one computation, and a run's seconds are its share."
        return told

    def front(self, cost: str) -> list[Cell]:
        """Pareto: cells that no other beats in accuracy without costing more."""
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
    """`trials`: of the storage."""
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
