"""Take trials from the queue, train or resume their runs, evaluate them, and store the results."""

import gc
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vitascope.errors import UserError, shorten_error_message
from vitascope.evaluation.trained import load
from vitascope.model.anatomy import count_flops, count_parameters
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run
from vitascope.run.machine import get_run_machine_name
from vitascope.run.metrics import list_seconds_without_setup
from vitascope.study.design import Design, format_combination
from vitascope.study.queue import StudyTrial, TrialQueue
from vitascope.training.engines.batchable import check_batchable
from vitascope.training.engines.batched_runs import max_batched_runs, train_batched_runs
from vitascope.training.train import make_console, resume_run, train_recipe

CURVE_NAMES = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


class TrialPrunedError(Exception):
    """A trial of a search that is worse than the others were at this epoch."""


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a trial, to be printed."""

    trial_number: int
    settings: dict[str, str]
    seeds: list[int]
    accuracy: float | None
    failure_reason: str | None
    num_waiting: int
    score: str  # the name of the accuracy
    note: str = ""  # a further line for the user


def run_trials(
    queue: TrialQueue, study_folder: Path, deadline: float | None = None, max_runs_per_batch: int | None = None
) -> Iterator[TrialOutcome]:
    """Run trials until none is waiting or the time is up; a running trial is finished. `together`: the most runs to
    train in one batch; None: chosen for the device."""
    note = ""
    while deadline is None or time.monotonic() < deadline:
        trial = queue.take_trial()
        if trial is None:
            return
        others = _take_batchable_trials(queue, trial, max_runs_per_batch)
        if not others:
            yield replace(_run_single_trial(queue, trial, study_folder), note=note)
            note = ""
        elif why := (yield from _run_batched_trials(queue, [trial, *others], study_folder)):
            note, max_runs_per_batch = (
                f"Training several runs in one batch failed ({why}). The remaining runs are trained one at a time.",
                1,
            )
            gc.collect()  # free memory for the single runs
            torch.cuda.empty_cache()


def _run_single_trial(queue: TrialQueue, trial: StudyTrial, study_folder: Path) -> TrialOutcome:
    accuracy, failed = None, None
    try:
        with queue.heartbeat(trial):
            accuracy = _train_and_score_trial(queue, trial, study_folder)
        queue.finish_trial(trial, accuracy)
    except TrialPrunedError:
        failed = "stopped early: worse than the other combinations at this epoch"
        queue.prune_trial(trial)
    except KeyboardInterrupt:
        queue.requeue_trial(trial)
        raise
    except Exception as error:  # any training error: the other trials continue
        failed = _format_error(error)
        queue.fail_trial(trial, failed)
    return _told(queue, trial, accuracy, failed)


def _take_batchable_trials(queue: TrialQueue, trial: StudyTrial, max_runs_per_batch: int | None) -> list[StudyTrial]:
    """Waiting trials that can be trained in one batch with this one."""
    if queue.design.num_search_trials or "begun" in trial.attributes or max_runs_per_batch == 1:
        return []
    own = queue.design.build_recipe(trial.settings, trial.seeds[0])
    most = max_batched_runs(own) if max_runs_per_batch is None else max_runs_per_batch
    return queue.take_matching_trials(
        most - 1, lambda cell, seed: _can_batch(own, queue.design.build_recipe(cell, seed))
    )


def _can_batch(recipe: Recipe, other_recipe: Recipe) -> bool:
    try:
        check_batchable([recipe, other_recipe])
    except UserError:
        return False
    return True


def _run_batched_trials(
    queue: TrialQueue, trials: list[StudyTrial], study_folder: Path
) -> Generator[TrialOutcome, None, str]:
    """Train several trials in one batch. If that fails, for example for lack of memory, put them back into the queue
    and return the reason."""
    recipes = [queue.design.build_recipe(trial.settings, trial.seeds[0]) for trial in trials]
    why, found, beside = "", [], 0
    try:
        with ExitStack() as stack:
            for trial in trials:
                stack.enter_context(queue.heartbeat(trial))
            try:
                runs = train_batched_runs(recipes, study_folder / "runs")
            except Exception as error:  # as above
                why = _format_error(error)
            else:
                found, beside = [_evaluate_run(run, queue.design) for run in runs], queue.count_other_workers()
    except KeyboardInterrupt:
        for trial in trials:
            queue.requeue_trial(trial)
        raise
    if why:
        for trial in trials:
            queue.requeue_trial(trial)
        return why
    # Store all results before printing the first one, so that an interruption loses none.
    ends = [_store_batched_result(queue, trial, came, beside) for trial, came in zip(trials, found, strict=True)]
    for trial, (accuracy, failed) in zip(trials, ends, strict=True):
        yield _told(queue, trial, accuracy, failed)
    return ""


def _told(queue: TrialQueue, trial: StudyTrial, accuracy: float | None, failed: str | None) -> TrialOutcome:
    return TrialOutcome(
        trial.optuna_trial.number,
        trial.settings,
        trial.seeds,
        accuracy,
        failed,
        queue.num_waiting,
        score=queue.design.score,
    )


def _store_batched_result(
    queue: TrialQueue, trial: StudyTrial, result_or_error: dict[str, Any] | str, num_other_workers: int
) -> tuple[float | None, str | None]:
    """Store the result of one trial of a batch; return its accuracy or the error."""
    try:
        if isinstance(result_or_error, dict):
            trial.set_attribute("results", {str(trial.seeds[0]): result_or_error | {"beside": num_other_workers}})
            queue.finish_trial(trial, result_or_error["accuracy"])
            return result_or_error["accuracy"], None
    except Exception as error:  # the storage is unreachable, or another worker has the trial
        result_or_error = _format_error(error)
    queue.fail_trial(trial, result_or_error)
    return None, result_or_error


def _evaluate_run(run_or_error: Run | UserError, design: Design) -> dict[str, Any] | str:
    """The result of a run, or the error message."""
    try:
        return (
            collect_run_result(run_or_error, design) if isinstance(run_or_error, Run) else _format_error(run_or_error)
        )
    except Exception as error:  # as above
        return _format_error(error)


def _format_error(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {shorten_error_message(error)}"


def _train_and_score_trial(queue: TrialQueue, trial: StudyTrial, study_folder: Path) -> float:
    """The mean accuracy over the trial's seeds; seeds with a known result are not repeated."""
    done: dict[str, dict[str, Any]] = trial.attributes.get("results", {})
    if queue.design.num_search_trials:
        wanted = set(map(str, trial.seeds))
        done = {
            seed: found for seed, found in queue.find_known_results(trial.settings).items() if seed in wanted
        } | done
        trial.set_attribute("results", done)
    for seed in trial.seeds:
        if str(seed) not in done:
            run = _train_or_resume_run(queue, trial, seed, study_folder)
            done = done | {str(seed): collect_run_result(run, queue.design) | {"beside": queue.count_other_workers()}}
            trial.set_attribute("results", done)
    return sum(found["accuracy"] for found in done.values()) / len(done)


def _train_or_resume_run(queue: TrialQueue, trial: StudyTrial, seed: int, study_folder: Path) -> Run:
    """Train the run, or resume the run that this trial started."""
    begun = trial.attributes.get("begun")
    watchers = [
        TrialCallback(
            trial, seed, study_folder, can_prune=bool(queue.design.num_search_trials) and seed == trial.seeds[0]
        )
    ]
    if begun and begun[0] == seed and (study_folder / begun[1] / "recipe.yaml").is_file():
        return resume_run(Run(study_folder / begun[1]), make_console(quiet=True), watchers)
    return train_recipe(
        queue.design.build_recipe(trial.settings, seed), study_folder / "runs", make_console(quiet=True), watchers
    )


class TrialCallback:
    """Store the run's path as soon as it exists. For a search, report the validation accuracy of every epoch and stop
    unpromising trials."""

    def __init__(self, trial: StudyTrial, seed: int, study_folder: Path, *, can_prune: bool) -> None:
        self.trial, self.seed, self.study_folder, self.can_prune = trial, seed, study_folder, can_prune

    def begin_run(self, run: Run) -> None:
        self.trial.set_attribute("begun", [self.seed, str(run.path.relative_to(self.study_folder))])

    def log_epoch(self, metrics: dict[str, Any]) -> None:
        if self.can_prune and "val_accuracy" in metrics:
            self.trial.optuna_trial.report(metrics["val_accuracy"], metrics["epoch"])
            if self.trial.optuna_trial.should_prune():
                raise TrialPrunedError

    def close(self) -> None:
        """Required of a tracker; nothing to close."""


def collect_run_result(run: Run, design: Design) -> dict[str, Any]:
    """The results of a run that the report needs, small enough for a storage."""
    rows, recipe, facts = run.metrics, run.recipe, run.machine
    if design.eval_split == "test":
        accuracy = load(run, device=recipe.train.device).evaluate(robust=False).accuracy
    else:
        accuracy = rows[-1]["val_accuracy"]
    curves = {name: [round(row[name], 4) for row in rows if name in row] for name in CURVE_NAMES}
    curves["seconds"] = [round(since, 4) for since in accumulate(list_seconds_without_setup(rows))]
    curves["waited"] = [round(since, 4) for since in accumulate(row["seconds"] for row in rows)]  # with setting up
    return {
        "run": "/".join(run.path.parts[-2:]),  # below the study's runs
        "accuracy": accuracy,
        "seconds": curves["seconds"][-1],
        "together": rows[-1].get("together", 1),
        "machine": get_run_machine_name(facts),
        "compiled": facts["hardware"]["compiled"],
        "parameters": count_parameters(recipe.model),
        "flops": count_flops(recipe.model),
        "images_seen": rows[-1]["images_seen"],
        "curves": {name: values for name, values in curves.items() if values},
    }


def print_outcome(outcome: TrialOutcome, console: Console) -> None:
    seeds = f"seed {outcome.seeds[0]}" if len(outcome.seeds) == 1 else f"{len(outcome.seeds)} seeds"
    if outcome.note:
        console.print(outcome.note, highlight=False, soft_wrap=True)
    what = outcome.failure_reason if outcome.accuracy is None else f"{outcome.score} {outcome.accuracy:.2%}"
    console.print(
        f"{format_combination(outcome.settings, seeds)}: {what}  ({outcome.num_waiting} to do)",
        highlight=False,
        soft_wrap=True,
    )
