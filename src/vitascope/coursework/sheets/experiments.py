"""Run a sheet's experiments as small studies; train each run once for all sheets (runs.jsonl lists the results)."""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from vitascope.data.open_data import open_data_source
from vitascope.errors import UserError
from vitascope.recipe.writing import find_non_default_settings, hash_values
from vitascope.run.directory import Run
from vitascope.run.files import append_json_line, make_folder, read_json, write_json
from vitascope.study.design import Design, format_combination, read_design
from vitascope.study.queue import TrialQueue
from vitascope.study.results import CombinationResults, StudyResults, collect_results
from vitascope.study.storage import get_default_storage_url
from vitascope.study.workers import collect_run_result, print_outcome, run_trials

QUICK_SEEDS = 2


@dataclass(frozen=True)
class SheetExperiments:
    """One sheet's folder, number of seeds and options."""

    folder: Path
    num_seeds: int
    quick: bool
    console: Console
    device: str = "auto"
    max_batched_runs: int | None = None  # most runs to train in one batch; None: chosen for the device
    weights_ref: str | None = None  # pretrained weights for sheet D; None: the default
    machine_names: list[str] = field(default_factory=list)  # machines that trained the runs so far
    experiments: dict[str, str] = field(default_factory=dict)  # the sheet's studies: name -> title

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def title(self, name: str) -> str:
        """The study's number and title."""
        if name not in self.experiments:
            return f"Experiment: {name}"
        place = list(self.experiments).index(name) + 1
        return f"Experiment {place} of {len(self.experiments)}: {self.experiments[name]}"

    def run_study(
        self,
        study_name: str,
        recipe_name: str,
        overrides: list[str],
        *,
        eval_split: str = "val",
        needs_weights: bool = False,
    ) -> StudyResults:
        """Train every combination with all seeds; finished runs are not repeated. `weights`: the runs' weights are
        needed afterwards, not only their results."""
        made = read_design(
            recipe_name,
            [*overrides, f"train.device={self.device}"],
            self.num_seeds,
            eval_split=eval_split,
            allow_single=True,
        )
        varied = "".join(f" {key}={','.join(values)}" for key, values in made.values_by_setting.items())
        self.say(f"{self.title(study_name)}. {made.size}{':' if varied else ''}{varied}")
        first = made.build_recipe(made.combinations[0], made.seeds[0])
        open_data_source(first.data, first.model.image_shape, first.model.in_chans)  # reports missing data once
        folder = self.folder / study_name
        elsewhere = "Choose another folder with --out."
        make_folder(folder, elsewhere)
        queue = TrialQueue(made, get_default_storage_url(folder), study_name, elsewhere)
        queue.requeue_failed_trials()  # the cause may be gone
        made_already = FinishedRuns(self.folder.parent, self.console)
        made_already.reuse_results(queue, single_runs_only=self.max_batched_runs == 1, needs_weights=needs_weights)
        for told in run_trials(queue, folder, max_runs_per_batch=self.max_batched_runs):
            made_already.record_finished_runs(queue, folder)
            print_outcome(told, self.console)
        made_already.record_finished_runs(queue, folder)  # also runs that finished just before an interruption
        found = collect_results(made, queue.trials)
        if found.failed_trials:
            which, why = found.failed_trials[0]
            raise UserError(f"{self.title(study_name)}: {which} failed: {why}")
        if found.num_unfinished or not found.combinations:
            raise UserError(
                f"{self.title(study_name)}: another process is training some of the runs. Repeat the command when it has "
                "finished."
            )
        self.machine_names.extend(name for name in found.machine_names if name not in self.machine_names)
        return found

    def measure_once(self, measurement_name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure once and store the result, so that a page written again has the same numbers."""
        place = self.folder.with_name(f"{self.folder.name}-{measurement_name}.json")
        known = read_json(place)
        if not known:
            make_folder(place.parent, "Choose another folder with --out.")
            known = measure()
            write_json(place, known)
        return known

    def copy_for_single_run(self) -> "SheetExperiments":
        """For a single run, trained alone, whose seconds include the set-up."""
        return replace(self, num_seeds=1, max_batched_runs=1)

    def find_run(self, study_name: str, **settings: object) -> Run:
        """The first finished run of a study with these settings, such as data.fraction=0.8."""
        for place in sorted((self.folder / study_name / "runs").glob("*/*/model.safetensors")):
            recipe = Run(place.parent).recipe
            said = {key: getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) for key in settings}
            if said == settings:
                return Run(place.parent)
        raise UserError(f"{self.folder / study_name} has no run with {settings}.")


@dataclass(frozen=True)
class TimeToAccuracy:
    """When the seeds of a cell first reached an accuracy, in epochs and seconds, and how many never did."""

    epochs: list[int]
    seconds: list[float]
    num_seeds_not_reached: int
    num_epochs: int

    def __str__(self) -> str:
        if not self.epochs:
            return f"not reached in {self.num_epochs} epochs"
        low, high = min(self.epochs), max(self.epochs)
        epochs = f"{low}" if low == high else f"{low}–{high}"
        text = f"epoch {epochs}, {sum(self.seconds) / len(self.seconds):.1f} s"
        return (
            text
            if not self.num_seeds_not_reached
            else f"{text} (not reached by {self.num_seeds_not_reached} of {len(self.epochs) + self.num_seeds_not_reached} seeds)"
        )


def find_first_epoch(accuracy_curve: list[float], target_accuracy: float) -> int | None:
    """The first epoch with this accuracy; None if there is none."""
    return next((epoch for epoch, value in enumerate(accuracy_curve, start=1) if value >= target_accuracy), None)


def compute_time_to_accuracy(
    cell: CombinationResults, target_accuracy: float, time_curve: str = "seconds"
) -> TimeToAccuracy:
    """By validation accuracy at the end of epochs. `clock`: seconds (without set-up) or waited (with set-up)."""
    epochs, seconds, never, length = [], [], 0, 0
    for found in cell.results.values():
        curve = found["curves"]["val_accuracy"]
        length = max(length, len(curve))
        first = find_first_epoch(curve, target_accuracy)
        if first is None:
            never += 1
        else:
            epochs.append(first)
            seconds.append(found["curves"][time_curve][first - 1])
    return TimeToAccuracy(epochs, seconds, never, length)


RUNS_FILE = "runs.jsonl"


@dataclass(frozen=True)
class FinishedRuns:
    """`folder`/runs.jsonl: one line per finished run and split, enough to write the reports again without the runs, for
    example on another machine."""

    folder: Path
    console: Console

    def reuse_results(self, queue: TrialQueue, *, single_runs_only: bool, needs_weights: bool) -> None:
        """Reuse the results of other studies. `alone`: only runs that were trained alone; `weights`: only runs whose
        weights still exist."""
        lines, found = self._read_records(), {}

        def there(cell: dict[str, str], seed: int) -> bool:
            key = compute_run_key(queue.design, cell, seed)
            mine = [line for line in lines if line["key"] == key and not (single_runs_only and line["together"] > 1)]
            way = self._find_result_loader(mine, queue.design, needs_weights)
            if way is not None:
                found[format_combination(cell, f"seed {seed}")] = way
            return way is not None

        taken = queue.take_matching_trials(queue.num_waiting, there)
        with ExitStack() as stack:
            for trial in taken:
                stack.enter_context(queue.heartbeat(trial))
            for place, trial in enumerate(taken):
                which = format_combination(trial.settings, f"seed {trial.seeds[0]}")
                try:
                    came = found[which]()
                except KeyboardInterrupt:
                    for rest in taken[place:]:
                        queue.requeue_trial(rest)
                    raise
                except Exception:  # a changed or incomplete run is trained again
                    queue.requeue_trial(trial)
                    continue
                trial.set_attribute("results", {str(trial.seeds[0]): came | {"run": ""}})  # it belongs to another study
                queue.finish_trial(trial, came["accuracy"])
                self.console.print(f"{which}: already trained, reused", highlight=False, soft_wrap=True)

    def record_finished_runs(self, queue: TrialQueue, study_folder: Path) -> None:
        """Append the runs that this study has finished, without reused ones."""
        make_folder(self.folder)
        known = {(line["judge"], line["run"]) for line in self._read_records()}
        design = queue.design
        for told in (trial.user_attrs for trial in queue.trials if trial.state.name == "COMPLETE"):
            for seed, found in told["results"].items():
                place = (study_folder / "runs" / found["run"]).relative_to(self.folder).as_posix()
                if found["run"] and (design.eval_split, place) not in known:
                    head = {"key": compute_run_key(design, told["cell"], int(seed)), "recipe": design.recipe}
                    head |= {"cell": told["cell"], "seed": int(seed), "judge": design.eval_split}
                    append_json_line(self.folder / RUNS_FILE, head | found | {"run": place})

    def _find_result_loader(self, records: list[dict[str, Any]], design: Design, needs_weights: bool) -> Any:
        """How to get a run's result: from its line, or by evaluating the run; else None."""
        runs = [self.folder / line["run"] for line in records]
        there = [run for run in runs if (run / "model.safetensors").is_file()]
        same = [line for line in records if line["judge"] == design.eval_split]
        if same and (there or not needs_weights):
            return lambda: {name: value for name, value in same[-1].items() if name not in RECORD_ID_FIELDS}
        return partial(collect_run_result, Run(there[-1]), design) if there else None

    def _read_records(self) -> list[dict[str, Any]]:
        """All complete lines; an interruption may have cut one off."""
        lines = []
        if (self.folder / RUNS_FILE).is_file():
            for line in (self.folder / RUNS_FILE).read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    lines.append(json.loads(line))
        return lines


RECORD_ID_FIELDS = ("key", "recipe", "cell", "seed", "judge")  # identify the run; the rest of a line is its result


def compute_run_key(design: Design, cell_settings: dict[str, str], seed: int) -> str:
    """A hash of this run's settings, independent of the study and of the path of its initial weights."""
    recipe = replace(design.build_recipe(cell_settings, seed), name="any")
    if recipe.weights and Path(recipe.weights).is_file():
        recipe = replace(recipe, weights=hashlib.blake2b(Path(recipe.weights).read_bytes()).hexdigest())
    return hash_values(find_non_default_settings(recipe))
