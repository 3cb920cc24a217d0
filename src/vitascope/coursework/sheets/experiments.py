"""Run a sheet's experiments as small studies; train each run once for all sheets (runs.jsonl lists the results)."""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from vitascope.data.dataset import Labels
from vitascope.data.open_data import (
    draw_stratified_subset_indices,
    open_data_by_name_or_path,
    split_train_validation_indices,
)
from vitascope.errors import UserError
from vitascope.recipe.schema import find_non_default_settings, hash_values
from vitascope.run.directory import Run
from vitascope.run.files import append_json_line, make_folder, read_json_object_or_empty, write_json
from vitascope.study.design import Design, EvalSplit, format_combination, parse_and_check_design
from vitascope.study.queue import TrialQueue
from vitascope.study.results import CombinationResults, StudyResults, collect_results
from vitascope.study.storage import RunResult, Settings, make_sqlite_storage_url
from vitascope.study.workers import print_trial_outcome, run_trials, score_and_collect_run_result

QUICK_SEEDS = 2
OTHER_FOLDER_HINT = "Choose another folder with --out."
RunRecord = dict[str, Any]  # a line of runs.jsonl: RECORD_ID_FIELDS and a RunResult


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
    study_titles: dict[str, str] = field(default_factory=dict)  # the sheet's studies: name -> title

    def print_line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def format_study_title(self, study_name: str) -> str:
        """Return the study's position in the sheet and its title."""
        if study_name not in self.study_titles:
            return f"Experiment: {study_name}"
        position = list(self.study_titles).index(study_name) + 1
        return f"Experiment {position} of {len(self.study_titles)}: {self.study_titles[study_name]}"

    def run_study(
        self,
        study_name: str,
        recipe_name: str,
        overrides: list[str],
        *,
        eval_split: EvalSplit = "val",
        needs_weights: bool = False,
    ) -> StudyResults:
        """Train every combination with all seeds; finished runs are not repeated. `needs_weights`: not only the results
        but also the weights of the runs are needed afterwards."""
        design = parse_and_check_design(
            recipe_name,
            [*overrides, f"train.device={self.device}"],
            self.num_seeds,
            eval_split=eval_split,
            allow_no_variation=True,
        )
        self._print_design(study_name, design)
        first = design.build_recipe(design.combinations[0], design.seeds[0])
        source = open_data_by_name_or_path(
            first.data, first.model.image_shape, first.model.in_chans
        )  # reports missing data once
        self._print_image_counts(design, source.load_split("train").labels)
        folder = self.folder / study_name
        make_folder(folder, OTHER_FOLDER_HINT)
        queue = TrialQueue(design, make_sqlite_storage_url(folder), study_name, OTHER_FOLDER_HINT)
        queue.requeue_failed_trials()  # the cause may be gone
        finished_runs = FinishedRuns(self.folder.parent, self.console)
        finished_runs.finish_trials_with_earlier_results(
            queue, single_runs_only=self.max_batched_runs == 1, needs_weights=needs_weights
        )
        for outcome in run_trials(queue, folder, max_runs_per_batch=self.max_batched_runs):
            finished_runs.append_unrecorded_finished_runs(queue, folder)
            print_trial_outcome(outcome, self.console)
        finished_runs.append_unrecorded_finished_runs(queue, folder)  # also those just before an interruption
        results = collect_results(design, queue.trials)
        self._check_study_is_complete(study_name, results)
        self.machine_names.extend(name for name in results.machine_names if name not in self.machine_names)
        return results

    def _print_design(self, study_name: str, design: Design) -> None:
        varied = "".join(f" {key}={','.join(values)}" for key, values in design.values_by_setting.items())
        self.print_line(f"{self.format_study_title(study_name)}. {design.size_text}{':' if varied else ''}{varied}")

    def _print_image_counts(self, design: Design, train_labels: Labels) -> None:
        """Print the number of training images for each data.fraction, if it is varied."""
        for fraction in design.values_by_setting.get("data.fraction", []):
            settings = {key: values[0] for key, values in design.values_by_setting.items()} | {
                "data.fraction": fraction
            }
            data, seed = design.build_recipe(settings, design.seeds[0]).data, design.seeds[0]
            labels = train_labels[split_train_validation_indices(train_labels, data.validation, seed).train]
            count = len(draw_stratified_subset_indices(labels, data.fraction, seed))
            self.print_line(f"data.fraction={fraction}: {count:,} training images")

    def _check_study_is_complete(self, study_name: str, results: StudyResults) -> None:
        """Reject a study with failed or unfinished runs."""
        if results.failed_trials:
            combination, reason = results.failed_trials[0]
            raise UserError(f"{self.format_study_title(study_name)}: {combination} failed: {reason}")
        if results.num_unfinished or not results.combinations:
            raise UserError(
                f"{self.format_study_title(study_name)}: another process is training some of the runs. Repeat the "
                "command when it has finished."
            )

    def load_or_measure_and_store(self, measurement_name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure once and store the result, so that a page written again has the same numbers."""
        path = self.folder.with_name(f"{self.folder.name}-{measurement_name}.json")
        measurement = read_json_object_or_empty(path)
        if not measurement:
            make_folder(path.parent, OTHER_FOLDER_HINT)
            measurement = measure()
            write_json(path, measurement)
        return measurement

    def copy_for_single_run(self) -> "SheetExperiments":
        """Return a copy for a single run, trained alone, whose seconds include the set-up."""
        return replace(self, num_seeds=1, max_batched_runs=1)

    def get_first_finished_run(self, study_name: str, **settings: object) -> Run:
        """Return the first finished run of a study with these settings, such as data.fraction=0.8."""
        for path in sorted((self.folder / study_name / "runs").glob("*/*/model.safetensors")):
            recipe = Run(path.parent).recipe
            values = {key: getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) for key in settings}
            if values == settings:
                return Run(path.parent)
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
        if not self.num_seeds_not_reached:
            return text
        num_seeds = len(self.epochs) + self.num_seeds_not_reached
        return f"{text} (not reached by {self.num_seeds_not_reached} of {num_seeds} seeds)"


def find_first_epoch_reaching_target(accuracy_curve: list[float], target_accuracy: float) -> int | None:
    """Return the first epoch with this accuracy; None if there is none."""
    return next((epoch for epoch, value in enumerate(accuracy_curve, start=1) if value >= target_accuracy), None)


def compute_time_to_accuracy(
    cell: CombinationResults, target_accuracy: float, time_curve: str = "seconds"
) -> TimeToAccuracy:
    """Find when the validation accuracy at the end of an epoch first reached a target. `time_curve`: "seconds" (without
    set-up) or "waited" (with set-up)."""
    epochs, seconds, num_not_reached, num_epochs = [], [], 0, 0
    for result in cell.results.values():
        curve = result["curves"]["val_accuracy"]
        num_epochs = max(num_epochs, len(curve))
        first = find_first_epoch_reaching_target(curve, target_accuracy)
        if first is None:
            num_not_reached += 1
        else:
            epochs.append(first)
            seconds.append(result["curves"][time_curve][first - 1])
    return TimeToAccuracy(epochs, seconds, num_not_reached, num_epochs)


RUNS_FILE = "runs.jsonl"


@dataclass(frozen=True)
class FinishedRuns:
    """`folder`/runs.jsonl: one line per finished run and split, enough to write the reports again without the runs, for
    example on another machine."""

    folder: Path
    console: Console

    def finish_trials_with_earlier_results(
        self, queue: TrialQueue, *, single_runs_only: bool, needs_weights: bool
    ) -> None:
        """Reuse the results of other studies. `single_runs_only`: only runs that were trained alone; `needs_weights`:
        only runs whose weights still exist."""
        records = self._read_records()
        loaders: dict[str, Callable[[], RunResult]] = {}  # by combination and seed

        def has_result(settings: Settings, seed: int) -> bool:
            key = hash_run_settings(queue.design, settings, seed)
            matching = [
                record
                for record in records
                if record["key"] == key and not (single_runs_only and record["together"] > 1)
            ]
            loader = self._find_result_loader(matching, queue.design, needs_weights)
            if loader is not None:
                loaders[format_combination(settings, f"seed {seed}")] = loader
            return loader is not None

        trials = queue.take_matching_unstarted_trials(queue.num_waiting, has_result)
        with ExitStack() as stack:
            for trial in trials:
                stack.enter_context(queue.send_heartbeats_while_open(trial))
            for index, trial in enumerate(trials):
                label = format_combination(trial.settings, f"seed {trial.seeds[0]}")
                try:
                    result = loaders[label]()
                except KeyboardInterrupt:
                    for remaining in trials[index:]:
                        queue.requeue_unfinished_trial(remaining)
                    raise
                except Exception:  # a changed or incomplete run is trained again
                    queue.requeue_unfinished_trial(trial)
                    continue
                trial.set_attribute("results", {str(trial.seeds[0]): result | {"run": ""}})  # of another study
                queue.mark_trial_finished(trial, result["accuracy"])
                self.console.print(
                    f"{label}: reuses a finished run with the same settings", highlight=False, soft_wrap=True
                )

    def append_unrecorded_finished_runs(self, queue: TrialQueue, study_folder: Path) -> None:
        """Append the runs that this study has finished, without reused ones."""
        make_folder(self.folder)
        recorded = {(record["judge"], record["run"]) for record in self._read_records()}
        design = queue.design
        for attributes in (trial.user_attrs for trial in queue.trials if trial.state.name == "COMPLETE"):
            for seed, result in attributes["results"].items():
                run_path = (study_folder / "runs" / result["run"]).relative_to(self.folder).as_posix()
                if result["run"] and (design.eval_split, run_path) not in recorded:
                    settings = attributes["cell"]
                    record_id = {"key": hash_run_settings(design, settings, int(seed)), "recipe": design.recipe}
                    record_id |= {"cell": settings, "seed": int(seed), "judge": design.eval_split}
                    append_json_line(self.folder / RUNS_FILE, record_id | result | {"run": run_path})

    def _find_result_loader(
        self, records: list[RunRecord], design: Design, needs_weights: bool
    ) -> Callable[[], RunResult] | None:
        """Return a function that gets a run's result, from its record or by evaluating the run; else None."""
        run_paths = [self.folder / record["run"] for record in records]
        runs = [Run(path) for path in run_paths if (path / "model.safetensors").is_file()]
        same_split = [record for record in records if record["judge"] == design.eval_split]
        if same_split and (runs or not needs_weights):
            return lambda: _extract_result_of_record(same_split[-1])
        return partial(score_and_collect_run_result, runs[-1], design) if runs else None

    def _read_records(self) -> list[RunRecord]:
        """Read all complete lines; an interruption may have cut one off."""
        lines = []
        if (self.folder / RUNS_FILE).is_file():
            for line in (self.folder / RUNS_FILE).read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    lines.append(json.loads(line))
        return lines


RECORD_ID_FIELDS = ("key", "recipe", "cell", "seed", "judge")  # identify the run; the rest of a line is its result


def _extract_result_of_record(record: RunRecord) -> RunResult:
    return cast(RunResult, {name: value for name, value in record.items() if name not in RECORD_ID_FIELDS})


def hash_run_settings(design: Design, cell_settings: Settings, seed: int) -> str:
    """Compute a hash of this run's settings, independent of the study and of the path of its initial weights."""
    recipe = replace(design.build_recipe(cell_settings, seed), name="any")
    if recipe.weights and Path(recipe.weights).is_file():
        recipe = replace(recipe, weights=hashlib.blake2b(Path(recipe.weights).read_bytes()).hexdigest())
    return hash_values(find_non_default_settings(recipe))
