"""Make one record from finished runs of one recipe: settings, machine, time, and each seed's test results."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from vitascope.errors import UserError
from vitascope.evaluation.openings import Opening, first_result
from vitascope.evaluation.trained import load
from vitascope.model.anatomy import total_parameters
from vitascope.recipe.schema import Recipe
from vitascope.records.belonging import check_one_thing, check_same, facts_of
from vitascope.records.settings import command_for, flat_settings
from vitascope.records.track import published, stages_before, track_of
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import machine_name, made_on
from vitascope.run.metrics import Row, steady_seconds, whole_seconds
from vitascope.training.views import check_views


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
    def accuracy(self) -> float:
        return mean(self.test_accuracy)

    @property
    def known_wall_seconds(self) -> list[float]:
        return [seconds for seconds in self.wall_seconds or [] if seconds is not None]

    @property
    def machine_name(self) -> str:
        return machine_name(self.machine, self.hardware["device"])


def make_record(runs: list[Run], name: str, *, views: int = 1, commit: str | None = None) -> Record:
    """Evaluate on the test set only runs that were not evaluated like this before; the first result counts."""
    facts = [facts_of(run) for run in runs]
    check_one_thing(runs, facts, commit)
    recipe = published(runs[0])
    check_views(recipe, views)
    found = [_scored(run, views) for run in runs]
    check_same("test images", [str(opening.data_hash) for opening in found])
    where = made_on(facts[0])
    after = [_test_seconds(opening, where) for opening in found]
    seeds = [run.recipe.train.seed for run in runs]
    rows = [run.metrics for run in runs]
    before = [[stage.metrics for stage in stages_before(run)] for run in runs]  # that counts too
    return Record(
        name=name,
        recipe=recipe.name,
        data=Path(recipe.data.name).name,
        track=track_of(runs[0]),
        params=total_parameters(recipe.model),
        tokens=recipe.model.num_tokens,
        epochs=rows[0][-1]["epoch"] * recipe.data.passes_per_epoch,
        training_images=facts[0].get("training_images", rows[0][-1]["images_seen"] // rows[0][-1]["epoch"]),
        images_seen=sum(part[-1]["images_seen"] for part in (*before[0], rows[0])),
        views=views,
        seeds=seeds,
        test_accuracy=[opening.found["accuracy"] for opening in found],
        top5=[opening.found["top5"] for opening in found],
        ece=[opening.found["ece"] for opening in found],
        recall={label: [opening.found["recall"][label] for opening in found] for label in found[0].found["recall"]},
        openings=[opening.number for opening in found],
        seconds=_together(steady_seconds, before, rows, after),
        cold_seconds=_together(whole_seconds, before, rows, [_test_seconds(one, where, cold=True) for one in found]),
        hardware=facts[0]["hardware"],
        machine=facts[0]["machine"],
        versions=facts[0]["versions"],
        commit=facts[0]["commit"] or commit,
        date=max(fact["date"] for fact in facts),
        command="; ".join([*map(_stage_command, stages_before(runs[0])), _command(recipe, seeds, name, views)]),
        settings=flat_settings(recipe) | {"train.seed": seeds},
        wall_seconds=_list_wall_seconds(runs, found, where),
    )


def _together(
    count: Callable[[list[Row]], float], before: list[list[list[Row]]], rows: list[list[Row]], after: list[float]
) -> list[float]:
    """Per run: the sum over its earlier stages, its own epochs and the test evaluation."""
    parts = zip(before, rows, after, strict=True)
    return [round(sum(map(count, early)) + count(own) + more, 2) for early, own, more in parts]


def _stage_command(stage: Run) -> str:
    """The command that trains an earlier stage again."""
    return command_for(published(stage), [stage.recipe.train.seed])


def _command(recipe: Recipe, seeds: list[int], name: str, views: int) -> str:
    runs = " ".join(f"runs/{recipe.name}/*-seed{seed}" for seed in seeds)
    more = f" --views {views}" if views > 1 else ""
    return f"{command_for(recipe, seeds)}; vitascope record {runs} --name {name}{more}"


def write_record(record: Record, folder: Path) -> Path:
    """Write NAME.json, or NAME.MACHINE.json if NAME.json is from another machine. A file of the same machine is
    replaced."""
    make_folder(folder)
    path = folder / f"{record.name}.json"
    if path.is_file() and read_record(path).machine_name != record.machine_name:
        path = folder / f"{record.name}.{_slug(record.machine_name)}.json"
    write_json(path, asdict(record))
    return path


def read_record(path: Path) -> Record:
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{path} is not a record written by vitascope record ({type(error).__name__}).") from error


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise UserError(f"--name {name} cannot be a file name. Use letters, digits, - and _.")


def _scored(run: Run, views: int) -> Opening:
    """The first evaluation on the test set counts; a run without one is evaluated now."""
    known = first_result(run, views)
    if known is None:
        load(run, device="auto").evaluate(views=views, robust=False)
        known = first_result(run, views)
    if known is None or "recall" not in known.found:
        raise UserError(
            f"{run.path} was evaluated by an older version, which stored too little. Train this seed again."
        )
    return known


def _test_seconds(opening: Opening, machine: str, *, cold: bool = False) -> float:
    """The seconds of the test evaluation, if the run's machine computed it; `cold` adds the set-up time."""
    if opening.machine not in (None, machine):
        return 0.0
    return opening.found["seconds"] + (opening.found.get("set_up_seconds", 0.0) if cold else 0.0)


def _list_wall_seconds(runs: list[Run], found: list[Opening], machine: str) -> list[float | None] | None:
    """One value per seed; None if no value is known."""
    seconds = [_sum_wall_seconds(run, opening, machine) for run, opening in zip(runs, found, strict=True)]
    return None if all(value is None for value in seconds) else seconds


def _sum_wall_seconds(run: Run, opening: Opening, machine: str) -> float | None:
    """Earlier stages, training and evaluation, if all are known and from one machine."""
    seconds = opening.found.get("wall_seconds")
    if seconds is None or opening.machine not in (None, machine):
        return None
    trained = stages_before(run) + ([] if opening.found.get("wall_includes_training") else [run])
    known = [part.machine["wall_seconds"] for part in trained if "wall_seconds" in part.machine]
    return round(seconds + sum(known), 2) if len(known) == len(trained) else None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
