"""Take trials from the queue, train or resume their runs, evaluate them, and store the results."""

import gc
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from vitascope.errors import UserError, shorten_error_message
from vitascope.inference.open_model import open_model
from vitascope.model.anatomy import count_forward_flops_per_image, count_parameters
from vitascope.number_format import format_percent
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run
from vitascope.run.lock import RunInUseError
from vitascope.run.machine import get_run_device_name
from vitascope.run.metrics import MetricsRow, list_epoch_seconds_without_setup
from vitascope.study.design import Design, format_combination
from vitascope.study.queue import StudyTrial, TrialQueue
from vitascope.study.storage import RunResult, Settings
from vitascope.training.engines.batched_runs import choose_max_batched_runs, train_batched_runs
from vitascope.training.engines.prepare_batched import check_batchable
from vitascope.training.prepare import make_console
from vitascope.training.train import resume_run_if_unfinished, train_recipe

CURVE_NAMES = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


class TrialPrunedError(Exception):
    """A trial of a search that is worse than the others were at this epoch."""


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial, to be printed."""

    trial_number: int
    settings: Settings
    seeds: list[int]
    accuracy: float | None
    failure_reason: str | None
    num_waiting: int
    score_name: str
    note: str = ""  # a further line for the user


class TrialScore(NamedTuple):
    """The accuracy of a finished trial, or the reason why it failed."""

    accuracy: float | None
    failure_reason: str | None


def run_trials(
    queue: TrialQueue,
    study_folder: Path,
    monotonic_deadline: float | None = None,
    max_runs_per_batch: int | None = None,
) -> Iterator[TrialOutcome]:
    """Run trials until none is waiting or the deadline (of `time.monotonic`) has passed; a running trial is finished.

    `max_runs_per_batch`: None chooses it for the device."""
    note = ""
    while monotonic_deadline is None or time.monotonic() < monotonic_deadline:
        trial = queue.take_next_trial()
        if trial is None:
            return
        others = _take_other_trials_for_batch(queue, trial, max_runs_per_batch)
        if not others:
            yield replace(_run_single_trial(queue, trial, study_folder), note=note)
            note = ""
        elif reason := (yield from _run_batched_or_requeue_trials(queue, [trial, *others], study_folder)):
            note = (
                f"Training several runs in one batch failed ({reason}). The remaining runs are trained one at a time."
            )
            max_runs_per_batch = 1
            gc.collect()  # free memory for the single runs
            torch.cuda.empty_cache()


def _run_single_trial(queue: TrialQueue, trial: StudyTrial, study_folder: Path) -> TrialOutcome:
    accuracy, failure_reason = None, None
    try:
        with queue.send_heartbeats_while_open(trial):
            accuracy = _train_seeds_store_results_and_get_mean_accuracy(queue, trial, study_folder)
        queue.mark_trial_finished(trial, accuracy)
    except TrialPrunedError:
        failure_reason = "stopped early: worse than the other combinations at this epoch"
        queue.mark_trial_pruned(trial)
    except KeyboardInterrupt:
        queue.requeue_unfinished_trial(trial)
        raise
    except Exception as error:  # any training error: the other trials continue
        failure_reason = _format_error(error)
        queue.mark_trial_failed_if_possible(trial, failure_reason)
    return _build_trial_outcome(queue, trial, TrialScore(accuracy, failure_reason))


def _take_other_trials_for_batch(
    queue: TrialQueue, trial: StudyTrial, max_runs_per_batch: int | None
) -> list[StudyTrial]:
    """Take waiting trials that can be trained in one batch with this one."""
    if queue.design.num_search_trials or "begun" in trial.attributes or max_runs_per_batch == 1:
        return []
    recipe = queue.design.build_recipe(trial.settings, trial.seeds[0])
    max_runs = choose_max_batched_runs(recipe) if max_runs_per_batch is None else max_runs_per_batch
    return queue.take_matching_unstarted_trials(
        max_runs - 1, lambda settings, seed: _can_train_in_one_batch(recipe, queue.design.build_recipe(settings, seed))
    )


def _can_train_in_one_batch(recipe: Recipe, other_recipe: Recipe) -> bool:
    try:
        check_batchable([recipe, other_recipe])
    except UserError:
        return False
    return True


def _run_batched_or_requeue_trials(
    queue: TrialQueue, trials: list[StudyTrial], study_folder: Path
) -> Generator[TrialOutcome, None, str | None]:
    """Train several trials in one batch. If that fails, for example for lack of memory, put them back into the queue
    and return the reason, else None."""
    recipes = [queue.design.build_recipe(trial.settings, trial.seeds[0]) for trial in trials]
    failure_reason, results, num_other_workers = None, [], 0
    try:
        with ExitStack() as stack:
            for trial in trials:
                stack.enter_context(queue.send_heartbeats_while_open(trial))
            try:
                runs = train_batched_runs(recipes, study_folder / "runs")
            except Exception as error:  # any training error: the trials are run one at a time
                failure_reason = _format_error(error)
            else:
                results = [_collect_result_or_error(run, queue.design) for run in runs]
                num_other_workers = queue.count_other_workers_on_this_machine()
    except KeyboardInterrupt:
        for trial in trials:
            queue.requeue_unfinished_trial(trial)
        raise
    if failure_reason is not None:
        for trial in trials:
            queue.requeue_unfinished_trial(trial)
        return failure_reason
    # Store all results before printing the first one, so that an interruption loses none.
    scores = [
        _store_batched_result_or_failure(queue, trial, result, num_other_workers)
        for trial, result in zip(trials, results, strict=True)
    ]
    for trial, score in zip(trials, scores, strict=True):
        yield _build_trial_outcome(queue, trial, score)
    return None


def _build_trial_outcome(queue: TrialQueue, trial: StudyTrial, score: TrialScore) -> TrialOutcome:
    return TrialOutcome(
        trial.optuna_trial.number,
        trial.settings,
        trial.seeds,
        *score,
        num_waiting=queue.num_waiting,
        score_name=queue.design.score_name,
    )


def _store_batched_result_or_failure(
    queue: TrialQueue, trial: StudyTrial, result_or_error: RunResult | Exception, num_other_workers: int
) -> TrialScore:
    """Store the result or the error of one trial of a batch."""
    try:
        if not isinstance(result_or_error, Exception):
            trial.set_attribute("results", {str(trial.seeds[0]): result_or_error | {"beside": num_other_workers}})
            queue.mark_trial_finished(trial, result_or_error["accuracy"])
            return TrialScore(result_or_error["accuracy"], None)
    except Exception as error:  # the storage is unreachable, or another worker has the trial
        result_or_error = error
    failure_reason = _format_error(result_or_error)
    queue.mark_trial_failed_if_possible(trial, failure_reason)
    return TrialScore(None, failure_reason)


def _collect_result_or_error(run_or_error: Run | UserError, design: Design) -> RunResult | Exception:
    """Return the result of a trained run, or the error."""
    try:
        return score_and_collect_run_result(run_or_error, design) if isinstance(run_or_error, Run) else run_or_error
    except Exception as error:  # any evaluation error: the other trials continue
        return error


def _format_error(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {shorten_error_message(error)}"


def _train_seeds_store_results_and_get_mean_accuracy(queue: TrialQueue, trial: StudyTrial, study_folder: Path) -> float:
    """Return the mean accuracy over the trial's seeds. Seeds with a known result are not repeated."""
    results: dict[str, RunResult] = trial.attributes.get("results", {})
    if queue.design.num_search_trials:
        seeds = set(map(str, trial.seeds))
        known = queue.find_finished_results_by_seed(trial.settings)
        results = {seed: result for seed, result in known.items() if seed in seeds} | results
        trial.set_attribute("results", results)
    for seed in trial.seeds:
        if str(seed) not in results:
            run = _train_or_resume_run(queue, trial, seed, study_folder)
            result = score_and_collect_run_result(run, queue.design)
            result["beside"] = queue.count_other_workers_on_this_machine()
            results = results | {str(seed): result}
            trial.set_attribute("results", results)
    return sum(result["accuracy"] for result in results.values()) / len(results)


def _train_or_resume_run(queue: TrialQueue, trial: StudyTrial, seed: int, study_folder: Path) -> Run:
    """Train the run, or resume the run that this trial started."""
    can_prune = bool(queue.design.num_search_trials) and seed == trial.seeds[0]
    callbacks = [TrialPruningCallback(trial, seed, study_folder, can_prune=can_prune)]
    unfinished_seed, run_path = trial.attributes.get("begun", (None, ""))
    if unfinished_seed == seed and (study_folder / run_path / "recipe.yaml").is_file():
        with suppress(RunInUseError):  # a worker whose heartbeat has expired still trains it: train another run
            return resume_run_if_unfinished(
                Run(study_folder / run_path), make_console(quiet=True), callbacks, force=True
            )
    recipe = queue.design.build_recipe(trial.settings, seed)
    return train_recipe(recipe, study_folder / "runs", make_console(quiet=True), callbacks)


class TrialPruningCallback:
    """Store the run's path as soon as it exists. For a search, report the validation accuracy of every epoch and stop
    unpromising trials."""

    def __init__(self, trial: StudyTrial, seed: int, study_folder: Path, *, can_prune: bool) -> None:
        self.trial, self.seed, self.study_folder, self.can_prune = trial, seed, study_folder, can_prune

    def begin_run(self, run: Run) -> None:
        self.trial.set_attribute("begun", [self.seed, str(run.path.relative_to(self.study_folder))])

    def log_epoch(self, metrics: MetricsRow) -> None:
        if self.can_prune and "val_accuracy" in metrics:
            self.trial.optuna_trial.report(metrics["val_accuracy"], metrics["epoch"])
            if self.trial.optuna_trial.should_prune():
                raise TrialPrunedError

    def close(self) -> None:
        """Required of a tracker; nothing to close."""


def score_and_collect_run_result(run: Run, design: Design) -> RunResult:
    """Return the results of a run that the report needs, small enough for a storage."""
    rows, recipe, machine_info = run.metrics, run.recipe, run.machine
    if design.eval_split == "test":
        accuracy = open_model(run, device=recipe.train.device).evaluate().accuracy
    else:
        accuracy = rows[-1]["val_accuracy"]
    curves = {name: [round(row[name], 4) for row in rows if name in row] for name in CURVE_NAMES}
    curves["seconds"] = [round(seconds, 4) for seconds in accumulate(list_epoch_seconds_without_setup(rows))]
    curves["waited"] = [round(seconds, 4) for seconds in accumulate(row["seconds"] for row in rows)]  # with set-up
    return {
        "run": "/".join(run.path.parts[-2:]),  # below the study's runs
        "accuracy": accuracy,
        "seconds": curves["seconds"][-1],
        "together": rows[-1].get("together", 1),
        "machine": get_run_device_name(machine_info),
        "compiled": machine_info["hardware"]["compiled"],
        "parameters": count_parameters(recipe.model),
        "flops": count_forward_flops_per_image(recipe.model),
        "images_seen": rows[-1]["images_seen"],
        "curves": {name: values for name, values in curves.items() if values},
    }


def print_trial_outcome(outcome: TrialOutcome, console: Console) -> None:
    seeds = f"seed {outcome.seeds[0]}" if len(outcome.seeds) == 1 else f"{len(outcome.seeds)} seeds"
    if outcome.note:
        console.print(outcome.note, highlight=False, soft_wrap=True)
    result = (
        outcome.failure_reason
        if outcome.accuracy is None
        else f"{outcome.score_name} {format_percent(outcome.accuracy, 2)}"
    )
    console.print(
        f"{format_combination(outcome.settings, seeds)}: {result}  ({outcome.num_waiting} to do)",
        highlight=False,
        soft_wrap=True,
    )
