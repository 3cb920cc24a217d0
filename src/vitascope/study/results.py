"""Evaluate finished trials: mean and confidence interval over seeds, and which differences are significant."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from vitascope.recipe.choices import LABELLED_OBJECTIVE
from vitascope.records.ablation import PairedDifference, compute_ci_half_width, format_percent_mean_or_values
from vitascope.study.design import Design, format_combination
from vitascope.study.storage import RunResult, Settings, TrialAttributes

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

ResultName = Literal["parameters", "flops", "seconds", "images_seen"]


@dataclass(frozen=True)
class CombinationResults:
    """One combination of settings and the results of its seeds."""

    settings: Settings
    results: dict[int, RunResult]  # by seed

    @property
    def name(self) -> str:
        return format_combination({key.split(".")[-1]: value for key, value in self.settings.items()})

    @property
    def accuracies(self) -> list[float]:
        return [result["accuracy"] for result in self.results.values()]

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
        return format_percent_mean_or_values(self.accuracies)

    def compute_mean(self, result_name: ResultName) -> float:
        """Compute the mean of a result over seeds."""
        return mean(result[result_name] for result in self.results.values())

    def describe_accuracy_and_seeds(self) -> str:
        """Return for example "97.50 ± 0.30 % (5 seeds)"; with two seeds the mean, and the value of each seed."""
        if len(self.results) == 2:
            seeds = ", ".join(map(str, self.results))
            return f"{100 * self.mean_accuracy:.2f} % (seeds {seeds}: {self.formatted_accuracy})"
        seeds = "one seed" if len(self.results) == 1 else f"{len(self.results)} seeds"
        return f"{self.formatted_accuracy} ({seeds})"

    @property
    def formatted_mean_seconds(self) -> str:
        """The mean over seeds; a dash if the runs are from different machines."""
        machines = {result["machine"] for result in self.results.values()}
        return f"{self.compute_mean('seconds'):.1f}" if len(machines) == 1 else "–"

    def compute_accuracy_difference_from(
        self, baseline: "CombinationResults", num_comparisons: int
    ) -> PairedDifference | None:
        """Compute the difference in accuracy, seed by seed, with an interval corrected for the number of comparisons.
        None without common seeds."""
        common = [seed for seed in self.results if seed in baseline.results]
        pairs = [self.results[seed]["accuracy"] - baseline.results[seed]["accuracy"] for seed in common]
        return PairedDifference.from_pairs(pairs, num_comparisons) if pairs else None

    def compute_mean_last_value(self, curve_name: str) -> float | None:
        """Compute the mean over seeds of a curve's last epoch; None if no seed has the curve."""
        last_values = [curve[-1] for curve in self.get_curves_of_all_seeds(curve_name)]
        return mean(last_values) if last_values else None

    def compute_mean_curve(self, curve_name: str) -> list[float]:
        """Compute the mean over seeds, per epoch."""
        return [mean(values) for values in zip(*self.get_curves_of_all_seeds(curve_name), strict=True)]

    def get_curves_of_all_seeds(self, curve_name: str) -> list[list[float]]:
        """Return one curve per seed that has it."""
        curves = [result["curves"] for result in self.results.values()]
        return [curves_of_seed[curve_name] for curves_of_seed in curves if curve_name in curves_of_seed]


STARTUP_TIME = "start-up (compilation, CUDA graph recording, set-up of the first batch)"


class FailedTrial(NamedTuple):
    combination: str
    reason: str


@dataclass(frozen=True)
class StudyResults:
    """All results of a study, and its conclusion."""

    design: Design
    combinations: list[CombinationResults]  # in the order of the grid; for a search, best first
    failed_trials: list[FailedTrial]
    num_pruned: int  # trials of a search that were stopped early
    num_unfinished: int

    @cached_property
    def best_combination(self) -> CombinationResults:
        """The combination with the highest mean, among those with the most seeds."""
        num_seeds = max(len(cell.results) for cell in self.combinations)
        complete = [cell for cell in self.combinations if len(cell.results) == num_seeds]
        return max(complete, key=lambda cell: cell.mean_accuracy)

    def compute_corrected_difference_from_best(self, combination: CombinationResults) -> PairedDifference | None:
        """Compute the difference to the best; None for the best itself and without common seeds. The best is chosen
        afterwards, so intervals are corrected for all pairs of combinations (Bonferroni)."""
        if combination is self.best_combination:
            return None
        return combination.compute_accuracy_difference_from(self.best_combination, math.comb(len(self.combinations), 2))

    @property
    def combinations_tied_with_best(self) -> list[CombinationResults]:
        """The combinations that are not significantly worse than the best."""
        others = [cell for cell in self.combinations if cell is not self.best_combination]
        compared = [(cell, self.compute_corrected_difference_from_best(cell)) for cell in others]
        return [cell for cell, difference in compared if difference is None or difference.verdict != "worse"]

    @property
    def best_or_highest_mean_label(self) -> str:
        """What `best_combination` is called: "best" only if another combination is significantly worse."""
        if len(self.combinations_tied_with_best) < len(self.combinations) - 1:
            return "best"
        num_seeds = max((len(cell.results) for cell in self.combinations), default=1)
        return "highest mean" if num_seeds > 1 else "highest accuracy"

    @property
    def best_combination_label(self) -> str:
        """`best_or_highest_mean_label` with its noun: best combination, or combination with the highest mean."""
        return (
            "best combination"
            if self.best_or_highest_mean_label == "best"
            else f"combination with the {self.best_or_highest_mean_label}"
        )

    @property
    def conclusion(self) -> str:
        """The conclusion of the study."""
        if not self.combinations:
            return "No run has finished."
        if self.num_unfinished:
            best = f"{self.best_combination.name} with {self.best_combination.formatted_accuracy}"
            return f"Not finished. Best so far: {best}."
        num_seeds = len(self.best_combination.results)
        best = (
            f"{self.best_or_highest_mean_label.capitalize()}: {self.best_combination.name} with "
            f"{self.best_combination.describe_accuracy_and_seeds()}."
        )
        if len(self.combinations) == 1:
            return f"{best} No other combination has finished."
        if num_seeds < 2:
            name = " --name NAME" if self.design.num_search_trials else ""  # a search cannot change its seeds
            hint = f" Run again with --seeds 5{name}." if len(self.design.seeds) == 1 else ""
            return f"{best} One seed is not enough to test significance.{hint}"
        one = len(self.combinations) == 2
        if len(self.combinations_tied_with_best) == len(self.combinations) - 1:
            others = "The other combination does not differ" if one else "No other combination differs"
            power = " Two seeds can show only very large differences." if num_seeds == 2 else ""
            return f"{best} {others} significantly.{power}"
        if not self.combinations_tied_with_best:
            return f"{best} {'The' if one else 'Every'} other combination is significantly worse."
        return (
            f"{best} Not significantly different: {'; '.join(cell.name for cell in self.combinations_tied_with_best)}."
        )

    @property
    def uses_linear_probe(self) -> bool:
        """Whether all runs are trained without labels, so that a linear probe measures their accuracy."""
        return self.design.objective_names.isdisjoint({LABELLED_OBJECTIVE})

    @property
    def max_epochs(self) -> int:
        """The number of epochs of the longest run."""
        return max(len(curve) for cell in self.combinations for curve in cell.get_curves_of_all_seeds("train_loss"))

    @property
    def machine_names(self) -> list[str]:
        """The machines that trained the runs."""
        return list(dict.fromkeys(run["machine"] for cell in self.combinations for run in cell.results.values()))

    @property
    def timing_note(self) -> str:
        """How the seconds were measured; empty without runs."""
        return self.format_timing_note("Times")

    def format_timing_note(self, sentence_subject: str) -> str:
        """Say how the seconds were measured. `sentence_subject`: the first words, such as "Times"."""
        runs = [run for cell in self.combinations for run in cell.results.values()]
        if not runs:
            return ""
        max_batched = max(run["together"] for run in runs)
        note = f"{sentence_subject} ({', '.join(self.machine_names)}) exclude {STARTUP_TIME}."
        if len({run["compiled"] for run in runs}) > 1:
            names = [cell.name for cell in self.combinations if any(run["compiled"] for run in cell.results.values())]
            note += f" These runs were compiled, which shortens their epochs: {'; '.join(names)}."
        if num_shared := sum(run.get("beside", 0) > 0 for run in runs):
            note += f" {num_shared} of {len(runs)} runs shared their machine with other runs, which makes them slower."
        if max_batched > 1:
            note += f" Up to {max_batched} runs were trained in one batch; the time is divided by their number."
        return note

    def compute_pareto_front(self, cost_name: ResultName) -> list[CombinationResults]:
        """Return the combinations to which no other is at least equal in both accuracy and cost and better in one."""
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


def collect_results(design: Design, optuna_trials: "list[FrozenTrial]") -> StudyResults:
    """Collect the results of the storage's trials."""
    results_by_settings: dict[tuple[tuple[str, str], ...], dict[int, RunResult]] = {}
    failed, num_unfinished, num_pruned = [], 0, 0
    for trial in optuna_trials:
        attributes, state = cast(TrialAttributes, trial.user_attrs), trial.state.name
        if state == "COMPLETE":
            results = {int(seed): result for seed, result in attributes["results"].items()}
            settings = tuple((key, attributes["cell"][key]) for key in design.varied_settings)
            results_by_settings.setdefault(settings, {}).update(results)
        elif state == "FAIL":
            combination = format_combination(attributes.get("cell", {}), f"seed {attributes['seeds'][0]}")
            failed.append(FailedTrial(combination, attributes.get("failed", "unknown")))
        num_unfinished += state in ("WAITING", "RUNNING")
        num_pruned += state == "PRUNED"
    cells = [
        CombinationResults(dict(settings), dict(sorted(results.items())))
        for settings, results in results_by_settings.items()
    ]
    if design.num_search_trials:
        cells.sort(key=lambda cell: -cell.mean_accuracy)
    else:
        order = {tuple(settings.items()): index for index, settings in enumerate(design.combinations)}
        cells.sort(key=lambda cell: order.get(tuple(cell.settings.items()), len(order)))
    return StudyResults(design, cells, failed, num_pruned, num_unfinished)
