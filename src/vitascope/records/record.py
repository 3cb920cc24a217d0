"""Make one record from finished runs of one recipe, read records from a folder, and format their numbers for tables."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from vitascope.errors import UserError, suggest_choice
from vitascope.evaluation.eval_data import has_test_images
from vitascope.inference.open_model import open_model
from vitascope.inference.scoring import check_views_match_training
from vitascope.model.anatomy import count_parameters
from vitascope.recipe.schema import Recipe
from vitascope.records.ablation import format_percent_mean_or_values
from vitascope.records.track import (
    check_equal_in_all_runs,
    check_recordable_and_read_machine_info,
    check_runs_fit_one_record,
    determine_training_track,
    list_previous_stage_runs,
    make_portable_recipe,
)
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, write_json
from vitascope.run.listing import flatten_comparable_settings, format_shortest_train_command
from vitascope.run.machine import get_device_or_cpu_name, get_run_device_name
from vitascope.run.metrics import sum_epoch_seconds, sum_seconds_without_setup
from vitascope.run.test_set_log import EvalLogEntry, find_first_finished_test_entry


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
        return get_device_or_cpu_name(self.machine, self.hardware["device"])


def evaluate_and_make_record(runs: list[Run], record_name: str, *, views: int = 1, commit: str | None = None) -> Record:
    """Make a record. Only runs without a test evaluation with these views are evaluated; the first result counts."""
    machine_infos = [check_recordable_and_read_machine_info(run) for run in runs]
    check_runs_fit_one_record(runs, machine_infos, commit)
    recipe, first_info = make_portable_recipe(runs[0]), machine_infos[0]
    check_views_match_training(recipe, views)
    evaluations = [_get_or_run_first_test_evaluation(run, views) for run in runs]
    check_equal_in_all_runs("test images", [str(entry.data_hash) for entry in evaluations])
    machine_name = get_run_device_name(first_info)
    seeds, last_row = [run.recipe.train.seed for run in runs], runs[0].metrics[-1]
    previous_stages = list_previous_stage_runs(runs[0])  # their images and seconds count too
    results = [entry.result for entry in evaluations]
    own_command = _format_train_and_record_command(recipe, seeds, record_name, views)
    return Record(
        name=record_name,
        recipe=recipe.name,
        data=Path(recipe.data.name).name,
        track=determine_training_track(runs[0]),
        params=count_parameters(recipe.model),
        tokens=recipe.model.num_tokens,
        epochs=last_row["epoch"] * recipe.data.passes_per_epoch,
        training_images=first_info.get("training_images", last_row["images_seen"] // last_row["epoch"]),
        images_seen=sum(run.metrics[-1]["images_seen"] for run in (*previous_stages, runs[0])),
        views=views,
        seeds=seeds,
        test_accuracy=[result["accuracy"] for result in results],
        top5=[result["top5"] for result in results],
        ece=[result["ece"] for result in results],
        recall={label: [result["recall"][label] for result in results] for label in results[0]["recall"]},
        openings=[entry.use_count for entry in evaluations],
        seconds=_list_total_seconds_per_run(runs, evaluations, machine_name),
        cold_seconds=_list_total_seconds_per_run(runs, evaluations, machine_name, include_setup=True),
        hardware=first_info["hardware"],
        machine=first_info["machine"],
        versions=first_info["versions"],
        commit=first_info["commit"] or commit,
        date=max(machine_info["date"] for machine_info in machine_infos),
        command="; ".join([*map(_format_stage_command, previous_stages), own_command]),
        settings=flatten_comparable_settings(recipe) | {"train.seed": seeds},
        wall_seconds=_list_wall_seconds_if_known(runs, evaluations, machine_name),
    )


def _list_total_seconds_per_run(
    runs: list[Run], log_entries: list[EvalLogEntry], machine_name: str, *, include_setup: bool = False
) -> list[float]:
    """Return for each run the seconds of its earlier stages, its own epochs and the test evaluation."""
    sum_seconds = sum_epoch_seconds if include_setup else sum_seconds_without_setup
    return [
        round(
            sum(sum_seconds(stage.metrics) for stage in list_previous_stage_runs(run))
            + sum_seconds(run.metrics)
            + _get_test_seconds_on_machine(log_entry, machine_name, include_setup=include_setup),
            2,
        )
        for run, log_entry in zip(runs, log_entries, strict=True)
    ]


def _format_stage_command(stage_run: Run) -> str:
    """Return the command that trains an earlier stage again."""
    return format_shortest_train_command(make_portable_recipe(stage_run), [stage_run.recipe.train.seed])


def _format_train_and_record_command(recipe: Recipe, seeds: list[int], record_name: str, views: int) -> str:
    """Return the commands that train all seeds and record them."""
    runs = " ".join(f"runs/{recipe.name}/*-seed{seed}" for seed in seeds)
    views_option = f" --views {views}" if views > 1 else ""
    return f"{format_shortest_train_command(recipe, seeds)}; vitascope record {runs} --name {record_name}{views_option}"


def write_record_per_machine(record: Record, results_folder: Path) -> Path:
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


def _get_or_run_first_test_evaluation(run: Run, views: int) -> EvalLogEntry:
    """Return the first test evaluation with the last weights and this many views; without one, evaluate now."""
    log_entry = find_first_finished_test_entry(run, views)
    if log_entry is None:
        model = open_model(run, device="auto")
        if not has_test_images(run, model.info):
            raise UserError(f"{run.recipe.data.name} has no test images. A record needs test images.")
        model.evaluate(views=views)
        log_entry = find_first_finished_test_entry(run, views)
    if log_entry is None or "recall" not in log_entry.result:
        raise UserError(
            f"{run.path} was evaluated by an older version, which stored too little. Train this seed again."
        )
    return log_entry


def _get_test_seconds_on_machine(log_entry: EvalLogEntry, machine_name: str, *, include_setup: bool = False) -> float:
    """Return the seconds of the test evaluation; 0 if another machine than the run's computed it."""
    if log_entry.machine not in (None, machine_name):
        return 0.0
    return log_entry.result["seconds"] + (log_entry.result.get("set_up_seconds", 0.0) if include_setup else 0.0)


def _list_wall_seconds_if_known(
    runs: list[Run], log_entries: list[EvalLogEntry], machine_name: str
) -> list[float | None] | None:
    """Return one value per seed; None if no value is known."""
    seconds = [
        _sum_wall_seconds_if_known(run, entry, machine_name) for run, entry in zip(runs, log_entries, strict=True)
    ]
    return None if all(value is None for value in seconds) else seconds


def _sum_wall_seconds_if_known(run: Run, log_entry: EvalLogEntry, machine_name: str) -> float | None:
    """Sum earlier stages, training and evaluation; None unless all are known and from one machine."""
    seconds = log_entry.result.get("wall_seconds")
    if seconds is None or log_entry.machine not in (None, machine_name):
        return None
    trained_runs = list_previous_stage_runs(run) + ([] if log_entry.result.get("wall_includes_training") else [run])
    train_seconds = [trained.machine.get("wall_seconds") for trained in trained_runs]
    known_seconds = [value for value in train_seconds if value is not None]
    return round(seconds + sum(known_seconds), 2) if len(known_seconds) == len(trained_runs) else None


def _make_slug(name: str) -> str:
    """Return a name as part of a file name: lower case, with hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


BenchmarkRow = dict[str, Any]  # a row of a results file; the keys depend on the benchmark


class StoredRecord(NamedTuple):
    """A record and the path of its file."""

    path: Path
    record: Record


def format_mean_test_accuracy(record: Record) -> str:
    """Format the mean over seeds with its 95 % confidence interval; the values themselves with one or two seeds."""
    return format_percent_mean_or_values(record.test_accuracy)


def format_seconds_range(seconds: list[float]) -> str:
    """Format one number if the seeds agree after rounding (to seconds, to tenths below ten), else the range."""
    low, high = (f"{value:.{0 if value >= 10 else 1}f}" for value in (min(seconds), max(seconds)))
    return low if low == high else f"{low}–{high}"


def format_longest_wall_seconds_or_dash(record: Record) -> str:
    """Format the longest known wall-clock time of the seeds, as for cold seconds."""
    seconds = record.known_wall_seconds
    return format_seconds_range([max(seconds)]) if seconds else "–"


def format_thousands_or_millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"


def format_record_link(record_path: Path, record: Record) -> str:
    """Format a record's name as a link to its file. `{results}` stands for the folder's path relative to the page."""
    return f"[{record.name}]({{results}}/{record_path.name})"


def find_record_files_by_name(results_folder: Path) -> dict[str, list[Path]]:
    """Return record name -> its files, one per machine. A record has seeds and one test accuracy per seed."""
    paths_by_name: dict[str, list[Path]] = {}
    for path in sorted(results_folder.glob("*.json")):
        results = read_record_or_benchmark_file(path)
        if "test_accuracy" in results and "seeds" in results:
            paths_by_name.setdefault(results["name"], []).append(path)
    return paths_by_name


def read_named_or_all_records(results_folder: Path, record_names: list[str]) -> list[StoredRecord]:
    """Read the named records, or all records."""
    paths_by_name = find_record_files_by_name(results_folder)
    for name in record_names:
        if name not in paths_by_name:
            no_records = "The folder has no records. Write one with: vitascope record"
            hint = suggest_choice(name, paths_by_name) if paths_by_name else no_records
            raise UserError(f"There is no record '{name}' in {results_folder}. {hint}")
    names = record_names or sorted(paths_by_name)
    return [StoredRecord(path, read_record(path)) for name in names for path in paths_by_name[name]]


def read_benchmark_rows(results_folder: Path, record_names: list[str]) -> list[BenchmarkRow]:
    """Read the rows of all named results files."""
    if not record_names:
        raise UserError("This kind of results mark needs the name of a record.")
    return [
        row
        for name in record_names
        for row in read_record_or_benchmark_file(results_folder / f"{name}.json").get("rows", [])
    ]


def read_record_or_benchmark_file(path: Path) -> dict[str, Any]:
    """Read a file of the results folder: a record or a benchmark."""
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a record ({type(error).__name__}).") from error
