"""Finished runs of one recipe -> one record: what was trained, where, in what time, how good each seed became."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from vitascope.errors import UserError
from vitascope.evaluation.evaluate import check_views
from vitascope.evaluation.openings import Opening, first_result
from vitascope.evaluation.trained import load
from vitascope.model.anatomy import anatomy
from vitascope.records.settings import command_for, differing, flat_settings
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, write_json
from vitascope.run.metrics import steady_seconds, whole_seconds

TRACK = "pure"  # non-overlapping patches, attention, MLP: all that can be built so far


@dataclass(frozen=True)
class Record:
    """Lists have one value per seed; shares are fractions. Seconds run from images on the device to the last logits."""

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
    recall: dict[str, list[float]]  # per class
    openings: list[int]  # the how-manieth look at test images each number comes from
    seconds: list[float]  # steady: without compiling and recording the step
    cold_seconds: list[float]
    hardware: dict[str, Any]
    machine: dict[str, str]
    versions: dict[str, str | None]
    commit: str | None
    date: str
    command: str
    settings: dict[str, Any]

    @property
    def accuracy(self) -> float:
        return mean(self.test_accuracy)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return stdev(self.test_accuracy) if len(self.seeds) > 1 else None

    @property
    def machine_name(self) -> str:
        return machine_name(self.machine, self.hardware)


def make_record(runs: list[Run], name: str, *, views: int = 1, commit: str | None = None) -> Record:
    """Test images are opened only for runs that were not scored in this manner before; the first number counts."""
    facts = [_facts_of(run) for run in runs]
    _check_one_thing(runs, facts, commit)
    recipe = runs[0].recipe
    check_views(recipe, views)
    found = [_scored(run, views) for run in runs]
    seeds = [run.recipe.train.seed for run in runs]
    rows = [run.metrics for run in runs]
    classes = found[0].found["recall"]
    call = command_for(recipe, seeds)
    return Record(
        name=name,
        recipe=recipe.name,
        data=Path(recipe.data.name).name,
        track=TRACK,
        params=sum(stage.parameters for stage in anatomy(recipe.model)),
        tokens=recipe.model.num_tokens,
        epochs=rows[0][-1]["epoch"],
        training_images=facts[0]["training_images"],
        images_seen=rows[0][-1]["images_seen"],
        views=views,
        seeds=seeds,
        test_accuracy=[opening.found["accuracy"] for opening in found],
        top5=[opening.found["top5"] for opening in found],
        ece=[opening.found["ece"] for opening in found],
        recall={label: [opening.found["recall"][label] for opening in found] for label in classes},
        openings=[opening.number for opening in found],
        seconds=[round(steady_seconds(row) + o.found["seconds"], 2) for row, o in zip(rows, found, strict=True)],
        cold_seconds=[round(whole_seconds(row) + o.found["seconds"], 2) for row, o in zip(rows, found, strict=True)],
        hardware=facts[0]["hardware"],
        machine=facts[0]["machine"],
        versions=facts[0]["versions"],
        commit=facts[0]["commit"] or commit,
        date=max(fact["date"] for fact in facts),
        command=f"{call}; vitascope record runs/{recipe.name}/* --name {name}" + (" --views 2" if views == 2 else ""),
        settings=flat_settings(recipe) | {"train.seed": seeds},
    )


def write_record(record: Record, folder: Path) -> Path:
    """NAME.json; where that is another machine's, NAME.MACHINE.json beside it. The same machine's is replaced."""
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
        raise UserError(f"--name {name} cannot name a file. Use letters, digits, - and _.")


def machine_name(machine: dict[str, str], hardware: dict[str, Any]) -> str:
    """The device that computed: a GPU's name, or the CPU's with its cores."""
    told = machine.get(hardware["device"]) or machine["cpu"]
    return re.sub(r", \d+ threads$", "", told)


def _facts_of(run: Run) -> dict[str, Any]:
    """What the run itself wrote about where and with what it was made."""
    if not run.finished:
        raise UserError(f"{run.path} is not finished. Go on with: vitascope resume {run.path}")
    path = run.file("machine.json")
    try:
        return {"training_images": None, **json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}), so nobody knows where it was made."
        ) from error


def _check_one_thing(runs: list[Run], facts: list[dict[str, Any]], commit: str | None) -> None:
    """Runs in one record differ by their seed and by nothing else."""
    seeds = [run.recipe.train.seed for run in runs]
    if repeated := [seed for seed in set(seeds) if seeds.count(seed) > 1]:
        raise UserError(f"Seed {repeated[0]} is there more than once; a record has one number per seed.")
    if other := [key for key in differing([run.recipe for run in runs]) if key != "train.seed"]:
        raise UserError(f"The runs differ in {', '.join(other[:4])}. One record is one recipe with several seeds.")
    _check_same("machines", [machine_name(fact["machine"], fact["hardware"]) for fact in facts])
    _check_same("commits", [str(fact["commit"]) for fact in facts])
    _check_same("versions of torch", [str(fact["versions"].get("torch")) for fact in facts])
    _check_same("numbers of images seen", [str(run.metrics[-1]["images_seen"]) for run in runs])
    if runs[0].recipe.data.validation == 0:
        _check_same("training images", [fact["data_hash"] for fact in facts])
    own = facts[0]["commit"]
    if own and commit and own != commit:
        raise UserError(f"--commit {commit[:12]}: the runs say they were made at {own[:12]}. Leave --commit out.")


def _check_same(what: str, values: Iterable[str]) -> None:
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise UserError(f"The runs have different {what}: {different[0]} and {different[1]}. Record them apart.")


def _scored(run: Run, views: int) -> Opening:
    known = first_result(run, run.recipe.data.name, views)
    if known is None or "recall" not in known.found:
        load(run, device="auto").evaluate(views=views, robust=False)
        known = first_result(run, run.recipe.data.name, views)
    if known is None:
        raise UserError(f"{run.path} could not be scored.")
    return known


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
