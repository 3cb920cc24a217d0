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

from vitascope.errors import UserError, first_line
from vitascope.evaluation.trained import load
from vitascope.model.anatomy import total_flops, total_parameters
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run
from vitascope.run.machine import made_on
from vitascope.run.metrics import steady_times
from vitascope.study.design import Design, named
from vitascope.study.queue import Queue, Trial
from vitascope.training.alike import check_together
from vitascope.training.crowd import fitting, train_together
from vitascope.training.train import console_for, resume_run, train_recipe

CURVES = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


class NotWorthItError(Exception):
    """A trial of a search that is worse than the others were at this epoch."""


@dataclass(frozen=True)
class Told:
    """The outcome of a trial, to be printed."""

    number: int
    cell: dict[str, str]
    seeds: list[int]
    accuracy: float | None
    failed: str | None
    left: int
    score: str  # the name of the accuracy
    note: str = ""  # a further line for the user


def work_off(queue: Queue, folder: Path, until: float | None = None, together: int | None = None) -> Iterator[Told]:
    """Run trials until none is waiting or the time is up; a running trial is finished. `together`: the most runs to
    train in one batch; None: chosen for the device."""
    note = ""
    while until is None or time.monotonic() < until:
        trial = queue.take()
        if trial is None:
            return
        others = _company(queue, trial, together)
        if not others:
            yield replace(_one(queue, trial, folder), note=note)
            note = ""
        elif why := (yield from _many(queue, [trial, *others], folder)):
            note, together = (
                f"Training several runs in one batch failed ({why}). The remaining runs are trained one at a time.",
                1,
            )
            gc.collect()  # free memory for the single runs
            torch.cuda.empty_cache()


def _one(queue: Queue, trial: Trial, folder: Path) -> Told:
    accuracy, failed = None, None
    try:
        with queue.at_it(trial):
            accuracy = _measure(queue, trial, folder)
        queue.finish(trial, accuracy)
    except NotWorthItError:
        failed = "stopped early: worse than the other combinations at this epoch"
        queue.prune(trial)
    except KeyboardInterrupt:
        queue.back(trial)
        raise
    except Exception as error:  # any training error: the other trials continue
        failed = _said(error)
        queue.give_up(trial, failed)
    return _told(queue, trial, accuracy, failed)


def _company(queue: Queue, trial: Trial, together: int | None) -> list[Trial]:
    """Waiting trials that can be trained in one batch with this one."""
    if queue.design.search or "begun" in trial.told or together == 1:
        return []
    own = queue.design.recipe_for(trial.cell, trial.seeds[0])
    most = fitting(own) if together is None else together
    return queue.take_more(most - 1, lambda cell, seed: _alike(own, queue.design.recipe_for(cell, seed)))


def _alike(one: Recipe, other: Recipe) -> bool:
    try:
        check_together([one, other])
    except UserError:
        return False
    return True


def _many(queue: Queue, trials: list[Trial], folder: Path) -> Generator[Told, None, str]:
    """Train several trials in one batch. If that fails, for example for lack of memory, put them back into the queue
    and return the reason."""
    recipes = [queue.design.recipe_for(trial.cell, trial.seeds[0]) for trial in trials]
    why, found, beside = "", [], 0
    try:
        with ExitStack() as stack:
            for trial in trials:
                stack.enter_context(queue.at_it(trial))
            try:
                runs = train_together(recipes, folder / "runs")
            except Exception as error:  # as above
                why = _said(error)
            else:
                found, beside = [_judged(run, queue.design) for run in runs], queue.beside()
    except KeyboardInterrupt:
        for trial in trials:
            queue.back(trial)
        raise
    if why:
        for trial in trials:
            queue.back(trial)
        return why
    # Store all results before printing the first one, so that an interruption loses none.
    ends = [_ended(queue, trial, came, beside) for trial, came in zip(trials, found, strict=True)]
    for trial, (accuracy, failed) in zip(trials, ends, strict=True):
        yield _told(queue, trial, accuracy, failed)
    return ""


def _told(queue: Queue, trial: Trial, accuracy: float | None, failed: str | None) -> Told:
    return Told(trial.handle.number, trial.cell, trial.seeds, accuracy, failed, queue.waiting, score=queue.design.score)


def _ended(queue: Queue, trial: Trial, came: dict[str, Any] | str, beside: int) -> tuple[float | None, str | None]:
    """Store the result of one trial of a batch; return its accuracy or the error."""
    try:
        if isinstance(came, dict):
            trial.note("results", {str(trial.seeds[0]): came | {"beside": beside}})
            queue.finish(trial, came["accuracy"])
            return came["accuracy"], None
    except Exception as error:  # the storage is unreachable, or another worker has the trial
        came = _said(error)
    queue.give_up(trial, came)
    return None, came


def _judged(run: Run | UserError, design: Design) -> dict[str, Any] | str:
    """The result of a run, or the error message."""
    try:
        return result(run, design) if isinstance(run, Run) else _said(run)
    except Exception as error:  # as above
        return _said(error)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def _measure(queue: Queue, trial: Trial, folder: Path) -> float:
    """The mean accuracy over the trial's seeds; seeds with a known result are not repeated."""
    done: dict[str, dict[str, Any]] = trial.told.get("results", {})
    if queue.design.search:
        wanted = set(map(str, trial.seeds))
        done = {seed: found for seed, found in queue.known(trial.cell).items() if seed in wanted} | done
        trial.note("results", done)
    for seed in trial.seeds:
        if str(seed) not in done:
            run = _run(queue, trial, seed, folder)
            done = done | {str(seed): result(run, queue.design) | {"beside": queue.beside()}}
            trial.note("results", done)
    return sum(found["accuracy"] for found in done.values()) / len(done)


def _run(queue: Queue, trial: Trial, seed: int, folder: Path) -> Run:
    """Train the run, or resume the run that this trial started."""
    begun = trial.told.get("begun")
    watchers = [Following(trial, seed, folder, prunes=bool(queue.design.search) and seed == trial.seeds[0])]
    if begun and begun[0] == seed and (folder / begun[1] / "recipe.yaml").is_file():
        return resume_run(Run(folder / begun[1]), console_for(quiet=True), watchers)
    return train_recipe(queue.design.recipe_for(trial.cell, seed), folder / "runs", console_for(quiet=True), watchers)


class Following:
    """Store the run's path as soon as it exists. For a search, report the validation accuracy of every epoch and stop
    unpromising trials."""

    def __init__(self, trial: Trial, seed: int, folder: Path, *, prunes: bool) -> None:
        self.trial, self.seed, self.folder, self.prunes = trial, seed, folder, prunes

    def begin(self, run: Run) -> None:
        self.trial.note("begun", [self.seed, str(run.path.relative_to(self.folder))])

    def add(self, row: dict[str, Any]) -> None:
        if self.prunes and "val_accuracy" in row:
            self.trial.handle.report(row["val_accuracy"], row["epoch"])
            if self.trial.handle.should_prune():
                raise NotWorthItError

    def close(self) -> None:
        """Required of a tracker; nothing to close."""


def result(run: Run, design: Design) -> dict[str, Any]:
    """The results of a run that the report needs, small enough for a storage."""
    rows, recipe, facts = run.metrics, run.recipe, run.machine
    if design.judge == "test":
        accuracy = load(run, device=recipe.train.device).evaluate(robust=False).accuracy
    else:
        accuracy = rows[-1]["val_accuracy"]
    curves = {name: [round(row[name], 4) for row in rows if name in row] for name in CURVES}
    curves["seconds"] = [round(since, 4) for since in accumulate(steady_times(rows))]
    curves["waited"] = [round(since, 4) for since in accumulate(row["seconds"] for row in rows)]  # with setting up
    return {
        "run": "/".join(run.path.parts[-2:]),  # below the study's runs
        "accuracy": accuracy,
        "seconds": curves["seconds"][-1],
        "together": rows[-1].get("together", 1),
        "machine": made_on(facts),
        "compiled": facts["hardware"]["compiled"],
        "parameters": total_parameters(recipe.model),
        "flops": total_flops(recipe.model),
        "images_seen": rows[-1]["images_seen"],
        "curves": {name: values for name, values in curves.items() if values},
    }


def show(told: Told, console: Console) -> None:
    seeds = f"seed {told.seeds[0]}" if len(told.seeds) == 1 else f"{len(told.seeds)} seeds"
    if told.note:
        console.print(told.note, highlight=False, soft_wrap=True)
    what = told.failed if told.accuracy is None else f"{told.score} {told.accuracy:.2%}"
    console.print(f"{named(told.cell, seeds)}: {what}  ({told.left} to do)", highlight=False, soft_wrap=True)
