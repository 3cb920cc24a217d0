"""Make one record from finished runs of one recipe: settings, machine, time, and each seed's test results."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from vitascope.errors import UserError
from vitascope.evaluation.trained import load
from vitascope.model.anatomy import count_parameters
from vitascope.recipe.differences import flatten_recipe, format_train_command
from vitascope.recipe.schema import Recipe
from vitascope.records.track import (
    check_all_equal,
    check_runs_match,
    determine_track,
    get_portable_recipe,
    list_previous_stages,
    read_checked_machine_info,
)
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import get_machine_name, get_run_machine_name
from vitascope.run.metrics import MetricsRow, sum_epoch_seconds, sum_seconds_without_setup
from vitascope.run.test_set_log import EvalLogEntry, find_first_test_result
from vitascope.training.scoring import check_views


@dataclass(frozen=True)
class Record:
    """Lists have one value per seed; accuracies are fractions. Seconds end with the last test logits."""

    name: str
    recipe: str
    data: str
    track: str
    params: int
    tokens: int
    epochs: int
    training_images: int
    images_seen: int
    views: int
    seeds: list[int]
    test_accuracy: list[float]
    top5: list[float]
    ece: list[float]
    recall: dict[str, list[float | None]]  # per class; None if the test set has no image of it
    openings: list[int]  # 1: the first evaluation on the test set, per seed
    seconds: list[float]  # steady: without compilation and CUDA graph recording
    cold_seconds: list[float]
    hardware: dict[str, Any]
    machine: dict[str, str]
    versions: dict[str, str | None]
    commit: str | None
    date: str
    command: str
    settings: dict[str, Any]
    # Wall-clock time of the training process plus that of the evaluation process; None if unknown.
    wall_seconds: list[float | None] | None = None

    @property
    def mean_test_accuracy(self) -> float:
        return mean(self.test_accuracy)

    @property
    def known_wall_seconds(self) -> list[float]:
        return [seconds for seconds in self.wall_seconds or [] if seconds is not None]

    @property
    def machine_name(self) -> str:
        return get_machine_name(self.machine, self.hardware["device"])


def make_record(runs: list[Run], record_name: str, *, views: int = 1, commit: str | None = None) -> Record:
    """Evaluate on the test set only runs that were not evaluated like this before; the first result counts."""
    facts = [read_checked_machine_info(run) for run in runs]
    check_runs_match(runs, facts, commit)
    recipe = get_portable_recipe(runs[0])
    check_views(recipe, views)
    found = [_get_first_test_evaluation(run, views) for run in runs]
    check_all_equal("test images", [str(opening.data_hash) for opening in found])
    where = get_run_machine_name(facts[0])
    after = [_get_test_seconds(opening, where) for opening in found]
    seeds = [run.recipe.train.seed for run in runs]
    rows = [run.metrics for run in runs]
    before = [[stage.metrics for stage in list_previous_stages(run)] for run in runs]  # that counts too
    return Record(
        name=record_name,
        recipe=recipe.name,
        data=Path(recipe.data.name).name,
        track=determine_track(runs[0]),
        params=count_parameters(recipe.model),
        tokens=recipe.model.num_tokens,
        epochs=rows[0][-1]["epoch"] * recipe.data.passes_per_epoch,
        training_images=facts[0].get("training_images", rows[0][-1]["images_seen"] // rows[0][-1]["epoch"]),
        images_seen=sum(part[-1]["images_seen"] for part in (*before[0], rows[0])),
        views=views,
        seeds=seeds,
        test_accuracy=[opening.result["accuracy"] for opening in found],
        top5=[opening.result["top5"] for opening in found],
        ece=[opening.result["ece"] for opening in found],
        recall={label: [opening.result["recall"][label] for opening in found] for label in found[0].result["recall"]},
        openings=[opening.use_count for opening in found],
        seconds=_sum_run_seconds(sum_seconds_without_setup, before, rows, after),
        cold_seconds=_sum_run_seconds(
            sum_epoch_seconds, before, rows, [_get_test_seconds(one, where, include_setup=True) for one in found]
        ),
        hardware=facts[0]["hardware"],
        machine=facts[0]["machine"],
        versions=facts[0]["versions"],
        commit=facts[0]["commit"] or commit,
        date=max(fact["date"] for fact in facts),
        command="; ".join(
            [
                *map(_format_stage_command, list_previous_stages(runs[0])),
                _format_record_command(recipe, seeds, record_name, views),
            ]
        ),
        settings=flatten_recipe(recipe) | {"train.seed": seeds},
        wall_seconds=_list_wall_seconds(runs, found, where),
    )


def _sum_run_seconds(
    sum_rows: Callable[[list[MetricsRow]], float],
    previous_stage_rows: list[list[list[MetricsRow]]],
    run_rows: list[list[MetricsRow]],
    test_seconds: list[float],
) -> list[float]:
    """Per run: the sum over its earlier stages, its own epochs and the test evaluation."""
    parts = zip(previous_stage_rows, run_rows, test_seconds, strict=True)
    return [round(sum(map(sum_rows, early)) + sum_rows(own) + more, 2) for early, own, more in parts]


def _format_stage_command(stage_run: Run) -> str:
    """The command that trains an earlier stage again."""
    return format_train_command(get_portable_recipe(stage_run), [stage_run.recipe.train.seed])


def _format_record_command(recipe: Recipe, seeds: list[int], record_name: str, views: int) -> str:
    runs = " ".join(f"runs/{recipe.name}/*-seed{seed}" for seed in seeds)
    more = f" --views {views}" if views > 1 else ""
    return f"{format_train_command(recipe, seeds)}; vitascope record {runs} --name {record_name}{more}"


def write_record(record: Record, results_folder: Path) -> Path:
    """Write NAME.json, or NAME.MACHINE.json if NAME.json is from another machine. A file of the same machine is
    replaced."""
    make_folder(results_folder)
    path = results_folder / f"{record.name}.json"
    if path.is_file() and read_record(path).machine_name != record.machine_name:
        path = results_folder / f"{record.name}.{_make_slug(record.machine_name)}.json"
    write_json(path, asdict(record))
    return path


def read_record(path: Path) -> Record:
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{path} is not a record written by vitascope record ({type(error).__name__}).") from error


def check_record_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise UserError(f"--name {name} cannot be a file name. Use letters, digits, - and _.")


def _get_first_test_evaluation(run: Run, views: int) -> EvalLogEntry:
    """The first evaluation on the test set counts; a run without one is evaluated now."""
    known = find_first_test_result(run, views)
    if known is None:
        load(run, device="auto").evaluate(views=views, robust=False)
        known = find_first_test_result(run, views)
    if known is None or "recall" not in known.result:
        raise UserError(
            f"{run.path} was evaluated by an older version, which stored too little. Train this seed again."
        )
    return known


def _get_test_seconds(log_entry: EvalLogEntry, machine_name: str, *, include_setup: bool = False) -> float:
    """The seconds of the test evaluation, if the run's machine computed it; `cold` adds the set-up time."""
    if log_entry.machine not in (None, machine_name):
        return 0.0
    return log_entry.result["seconds"] + (log_entry.result.get("set_up_seconds", 0.0) if include_setup else 0.0)


def _list_wall_seconds(
    runs: list[Run], log_entries: list[EvalLogEntry], machine_name: str
) -> list[float | None] | None:
    """One value per seed; None if no value is known."""
    seconds = [_sum_wall_seconds(run, opening, machine_name) for run, opening in zip(runs, log_entries, strict=True)]
    return None if all(value is None for value in seconds) else seconds


def _sum_wall_seconds(run: Run, log_entry: EvalLogEntry, machine_name: str) -> float | None:
    """Earlier stages, training and evaluation, if all are known and from one machine."""
    seconds = log_entry.result.get("wall_seconds")
    if seconds is None or log_entry.machine not in (None, machine_name):
        return None
    trained = list_previous_stages(run) + ([] if log_entry.result.get("wall_includes_training") else [run])
    known = [part.machine["wall_seconds"] for part in trained if "wall_seconds" in part.machine]
    return round(seconds + sum(known), 2) if len(known) == len(trained) else None


def _make_slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
