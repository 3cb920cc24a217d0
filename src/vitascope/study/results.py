"""Evaluate finished trials: mean and confidence interval over seeds, and which differences are significant."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

from vitascope.records.ablation import NOT_SIGNIFICANT, compute_ci_half_width, format_difference, format_mean
from vitascope.study.design import Design, format_combination

ROUNDING_TOLERANCE = 1e-9  # below this, the differences of all seeds are equal up to rounding


@dataclass(frozen=True)
class CombinationResults:
    """One combination of settings and the results of its seeds."""

    settings: dict[str, str]
    results: dict[int, dict[str, Any]]  # by seed

    @property
    def name(self) -> str:
        return format_combination({key.split(".")[-1]: value for key, value in self.settings.items()})

    @property
    def accuracies(self) -> list[float]:
        return [found["accuracy"] for found in self.results.values()]

    @property
    def mean_accuracy(self) -> float:
        return mean(self.accuracies)

    @property
    def ci_half_width(self) -> float | None:
        """Half-width of the 95 % confidence interval of the mean over seeds (Student's t); None for one seed."""
        return compute_ci_half_width(self.accuracies)

    @property
    def formatted_accuracy(self) -> str:
        """The mean with its interval; the values themselves with one or two seeds."""
        return format_mean(self.accuracies)

    def compute_mean(self, result_name: str) -> float:
        """The mean over seeds of parameters, flops, seconds or images_seen."""
        return mean(found[result_name] for found in self.results.values())

    @property
    def formatted_seconds(self) -> str:
        """The mean over seeds; a dash if the runs are from different machines."""
        machines = {found["machine"] for found in self.results.values()}
        return f"{self.compute_mean('seconds'):.1f}" if len(machines) == 1 else "–"

    def compute_difference(self, other: "CombinationResults", num_comparisons: int) -> "PairedDifference | None":
        """The difference in accuracy, seed by seed; None without common seeds. `together`: number of comparisons."""
        common = [seed for seed in self.results if seed in other.results]
        pairs = [self.results[seed]["accuracy"] - other.results[seed]["accuracy"] for seed in common]
        return PairedDifference.from_pairs(pairs, num_comparisons) if pairs else None

    def compute_mean_last_value(self, curve_name: str) -> float | None:
        """The mean over seeds of a curve's last epoch."""
        found = [curve[-1] for curve in self.get_curves(curve_name)]
        return mean(found) if found else None

    def compute_mean_curve(self, curve_name: str) -> list[float]:
        """The mean over seeds, per epoch."""
        return [mean(values) for values in zip(*self.get_curves(curve_name), strict=True)]

    def get_curves(self, curve_name: str) -> list[list[float]]:
        """One curve per seed that has it."""
        return [found["curves"][curve_name] for found in self.results.values() if curve_name in found["curves"]]


@dataclass(frozen=True)
class PairedDifference:
    """A paired difference, seed by seed: the mean and the half-width of its 95 % confidence interval."""

    mean_difference: float
    ci_half_width: float | None
    differences: tuple[float, ...] = ()  # one per seed

    @classmethod
    def from_pairs(cls, differences: list[float], num_comparisons: int) -> "PairedDifference":
        """`together`: number of comparisons, for the Bonferroni correction."""
        return cls(mean(differences), compute_ci_half_width(differences, num_comparisons), tuple(differences))

    def format_with_interval(self, scale: float = 1.0) -> str:
        """The mean with its interval; the differences themselves with one or two seeds."""
        return format_difference(self.differences, self.ci_half_width, scale)

    @property
    def has_no_spread(self) -> bool:
        return self.ci_half_width is not None and self.ci_half_width < ROUNDING_TOLERANCE

    @property
    def verdict(self) -> str:
        if self.ci_half_width is None:
            return "one seed"
        if self.has_no_spread:  # with few seeds, identical differences are a coincidence
            return "not testable"
        return (
            "worse"
            if self.mean_difference < -self.ci_half_width
            else "better"
            if self.mean_difference > self.ci_half_width
            else NOT_SIGNIFICANT
        )


@dataclass(frozen=True)
class StudyResults:
    design: Design
    combinations: list[CombinationResults]  # in the order of the grid; for a search, best first
    failed_trials: list[tuple[str, str]]  # combination and reason
    num_pruned: int  # trials of a search that were stopped early
    num_unfinished: int

    @cached_property
    def best_combination(self) -> CombinationResults:
        """The combination with the highest mean, among those with the most seeds."""
        most = max(len(cell.results) for cell in self.combinations)
        return max(
            (cell for cell in self.combinations if len(cell.results) == most), key=lambda cell: cell.mean_accuracy
        )

    def compare_with_best(self, combination: CombinationResults) -> PairedDifference | None:
        """The difference to the best; None for the best itself and without common seeds. The best is chosen afterwards,
        so intervals are corrected for all pairs of cells (Bonferroni)."""
        if combination is self.best_combination:
            return None
        return combination.compute_difference(self.best_combination, math.comb(len(self.combinations), 2))

    @property
    def not_worse_combinations(self) -> list[CombinationResults]:
        """The combinations that are not significantly worse than the best."""
        others = [cell for cell in self.combinations if cell is not self.best_combination]
        found = [(cell, self.compare_with_best(cell)) for cell in others]
        return [cell for cell, other in found if other is None or other.verdict != "worse"]

    @property
    def conclusion(self) -> str:
        """The conclusion of the study."""
        if not self.combinations:
            return "No run has finished."
        if self.num_unfinished:
            return f"Not finished. Best so far: {self.best_combination.name} with {self.best_combination.formatted_accuracy}."
        seeds = len(self.best_combination.results)
        said = f"Best: {self.best_combination.name} with {self.best_combination.formatted_accuracy} ({'one seed' if seeds == 1 else f'{seeds} seeds'})."
        if len(self.combinations) == 1:
            return f"{said} No other combination has finished."
        if seeds < 2:
            more = " Use --seeds 5." if len(self.design.seeds) == 1 else ""
            return f"{said} One seed is not enough to test significance.{more}"
        one = len(self.combinations) == 2
        if len(self.not_worse_combinations) == len(self.combinations) - 1:
            others = "The other combination does not differ" if one else "No other combination differs"
            return f"{said} {others} significantly."
        if not self.not_worse_combinations:
            return f"{said} {'The' if one else 'Every'} other combination is significantly worse."
        return f"{said} Not significantly different: {'; '.join(cell.name for cell in self.not_worse_combinations)}."

    @property
    def accuracy_label(self) -> str:
        """The name of the accuracy column."""
        return "linear probe" if self.design.objectives.isdisjoint({"classify"}) else "accuracy"

    @property
    def max_epochs(self) -> int:
        """The number of epochs of the longest run."""
        return max(len(curve) for cell in self.combinations for curve in cell.get_curves("train_loss"))

    @property
    def machine_names(self) -> list[str]:
        """The machines that trained the runs."""
        return list(dict.fromkeys(run["machine"] for cell in self.combinations for run in cell.results.values()))

    @property
    def timing_note(self) -> str:
        """How the seconds were measured; empty without runs."""
        runs = [run for cell in self.combinations for run in cell.results.values()]
        if not runs:
            return ""
        most = max(run["together"] for run in runs)
        told = f"Times ({', '.join(self.machine_names)}) exclude the start-up time of the first epoch."
        if len({run["compiled"] for run in runs}) > 1:
            which = [cell.name for cell in self.combinations if any(run["compiled"] for run in cell.results.values())]
            told += f" These runs were compiled, which shortens their epochs: {'; '.join(which)}."
        if crowded := sum(run.get("beside", 0) > 0 for run in runs):
            told += f" {crowded} of {len(runs)} runs shared their machine with other runs, which makes them slower."
        if most > 1:
            told += f" Up to {most} runs were trained in one batch; the time is divided by their number."
        return told

    def compute_pareto_front(self, cost_name: str) -> list[CombinationResults]:
        """The Pareto front: cells for which no other cell has both higher accuracy and lower cost."""
        return [
            cell
            for cell in self.combinations
            if not any(
                other.compute_mean(cost_name) <= cell.compute_mean(cost_name)
                and other.mean_accuracy >= cell.mean_accuracy
                and (other.compute_mean(cost_name), other.mean_accuracy)
                != (cell.compute_mean(cost_name), cell.mean_accuracy)
                for other in self.combinations
            )
        ]


def collect_results(design: Design, optuna_trials: list[Any]) -> StudyResults:
    """Collect the results of the storage's trials."""
    found: dict[tuple[tuple[str, str], ...], dict[int, dict[str, Any]]] = {}
    failed, waiting, left_off = [], 0, 0
    for trial in optuna_trials:
        told, state = trial.user_attrs, trial.state.name
        if state == "COMPLETE":
            results = {int(seed): result for seed, result in told["results"].items()}
            settings = tuple((key, told["cell"][key]) for key in design.varied_settings)
            found.setdefault(settings, {}).update(results)
        elif state == "FAIL":
            which = format_combination(told.get("cell", {}), f"seed {told['seeds'][0]}")
            failed.append((which, told.get("failed", "unknown")))
        waiting += state in ("WAITING", "RUNNING")
        left_off += state == "PRUNED"
    cells = [CombinationResults(dict(settings), dict(sorted(results.items()))) for settings, results in found.items()]
    if design.num_search_trials:
        cells.sort(key=lambda cell: -cell.mean_accuracy)
    else:
        order = {tuple(cell.items()): place for place, cell in enumerate(design.combinations)}
        cells.sort(key=lambda cell: order.get(tuple(cell.settings.items()), len(order)))
    return StudyResults(design, cells, failed, left_off, waiting)
