"""Train a recipe: open the data, create the run folder, train, and write all results to it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from vitascope.data.config import resolve_augmentation
from vitascope.data.open_data import resolve_data_paths
from vitascope.data.splits import TrainingData, open_training_data
from vitascope.data.statistics import compute_data_hash
from vitascope.errors import UserError, format_count
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import format_recipe_yaml, format_value
from vitascope.run.checkpoint import load_checkpoint, read_model_info, save_model_info
from vitascope.run.directory import Run, create_run, open_run
from vitascope.run.files import write_json
from vitascope.run.machine import collect_machine_info
from vitascope.run.metrics import TensorBoardWriter, draw_run_curves, read_metrics, truncate_metrics_after
from vitascope.run.trackers import Tracker, open_trackers
from vitascope.run.wall_clock import TRAIN, begin_task, measure_task_seconds
from vitascope.training.hardware import DEFAULT_NUM_THREADS, Hardware
from vitascope.training.initial_weights import (
    STAGE_PREFIX,
    format_adaptation_report,
    load_pretrained_weights,
    make_first_stage_recipe,
    make_leakage_warning,
    resolve_weights_path,
)
from vitascope.training.loop import ALARMS_FILE, EpochRecord, train_epochs
from vitascope.training.messages import (
    describe_file_conversion,
    describe_shape,
    describe_training_values,
    summarize,
)
from vitascope.training.optim.build import count_trainable_parameters
from vitascope.training.progress import show_progress
from vitascope.training.session import Session, start_session
from vitascope.weights.adaptation import AdaptedModel
from vitascope.weights.model_info import ModelInfo


class RunCallback(Tracker, Protocol):
    """A tracker that also gets the run when it begins."""

    def begin_run(self, run: Run) -> None: ...


def train(recipe: str, *, runs: str | os.PathLike[str] = "runs", quiet: bool = False, **settings: Any) -> Run:
    """Train a recipe (a name or a path) with settings such as **{"train.epochs": 5}. Return the finished run."""
    words = [f"{key}={format_value(value)}" for key, value in settings.items()]
    return train_recipe(read_recipe(recipe, words), Path(runs), make_console(quiet))


def resume(run: str | os.PathLike[str], *, quiet: bool = False) -> Run:
    """Resume an interrupted run. The result is bit-identical to an uninterrupted run."""
    return resume_run(open_run(run), make_console(quiet))


def train_recipe(
    recipe: Recipe,
    runs_folder: Path,
    console: Console,
    callbacks: Sequence[RunCallback] = (),
    *,
    suggest_evaluation: bool = True,
) -> Run:
    """Train a recipe. `watchers` are called when the run begins and after every epoch; an exception stops the run.

    `suggest_evaluation`: print the command that evaluates the run."""
    if recipe.weights and recipe.weights.startswith(STAGE_PREFIX):
        try:
            first = _train_or_reuse_first_stage(recipe, runs_folder, console)
        except KeyboardInterrupt:
            console.print(
                "This was the first stage. To resume it and continue with the second, run the same command again.",
                highlight=False,
                soft_wrap=True,
            )
            raise
        model = (
            first.recipe.model if recipe.model == ModelConfig() else recipe.model
        )  # the recipe may have no model section
        recipe = replace(recipe, weights=str(first.path), model=model)
    recipe, data, adapted = prepare_run(recipe, console)
    session = start_session(recipe, data, initial_weights=adapted.weights if adapted else None)
    run = create_run(recipe, runs_folder)
    console.print(f"Run: {run.path}", highlight=False, soft_wrap=True)
    if adapted:
        write_json(run.get_path("adaptation.json"), asdict(adapted.report))
    _train_and_report(run, session, console, callbacks, suggest_evaluation=suggest_evaluation)
    return run


def _train_or_reuse_first_stage(recipe: Recipe, runs_folder: Path, console: Console) -> Run:
    """weights=recipe:NAME: a run of that recipe on the same data and seed. A finished run is reused, an interrupted run
    is resumed."""
    first = make_first_stage_recipe(recipe)
    console.print(f"First stage: {first.name}", highlight=False)
    complete_first, data, _ = prepare_run(first, make_console(quiet=True))
    images = compute_data_hash(data.train.images, data.train.labels)
    for place in sorted((runs_folder / first.name).glob("*/recipe.yaml"), reverse=True):
        run = Run(place.parent)
        with suppress(UserError):  # another version's recipe
            if (
                format_recipe_yaml(run.recipe) == format_recipe_yaml(complete_first)
                and run.machine.get("data_hash") == images
            ):
                return resume_run(run, console)
    return train_recipe(first, runs_folder, console)


def resume_run(run: Run, console: Console, callbacks: Sequence[RunCallback] = ()) -> Run:
    if run.is_finished:
        console.print(f"{run.path} is already finished.", highlight=False, soft_wrap=True)
        return run
    if run.is_from_older_version:
        raise UserError(
            f"{run.path} was made by an older version of Vitascope and cannot be resumed. Use that version, or train "
            "again: CHANGELOG.md lists the settings that were renamed."
        )
    recipe, state = run.recipe, load_checkpoint(run)
    data, weights = open_data(recipe, console), None
    if recipe.weights and state:
        data = replace(data, preprocessing=read_model_info(run).preparation)
    elif recipe.weights:  # interrupted before its first checkpoint: start again from the pretrained weights
        adapted = load_pretrained_weights(recipe, get_class_names(data))
        data, weights = replace(data, preprocessing=adapted.info.preparation), adapted.weights
    session = start_session(recipe, data, _read_earlier_hardware(run, state), weights)
    if state:
        session.restore_state(state)
    for name in ("metrics.jsonl", ALARMS_FILE):
        if run.get_path(name).is_file():
            truncate_metrics_after(run.get_path(name), session.epoch)
    console.print(f"Run: {run.path}, resuming after epoch {session.epoch}", highlight=False, soft_wrap=True)
    _train_and_report(run, session, console, callbacks)
    return run


def _read_earlier_hardware(run: Run, checkpoint: dict[str, Any] | None) -> Hardware | None:
    """The hardware of the run, from its checkpoint, or from machine.json if it has none yet."""
    said = checkpoint["hardware"] if checkpoint else run.machine.get("hardware")
    return Hardware(**said) if said else None


def open_data(recipe: Recipe, console: Console) -> TrainingData:
    model = recipe.model
    data = open_training_data(recipe.data, model.image_shape, model.in_chans, recipe.train.seed)
    if skipped := data.source.skipped_paths:
        names = ", ".join(skipped[:3]) + (", …" if len(skipped) > 3 else "")
        console.print(
            f"{format_count(len(skipped), 'image')} could not be read and will be skipped: {names}",
            highlight=False,
            soft_wrap=True,
        )
    if data.train.file_paths and (note := describe_file_conversion(Path(data.train.file_paths[0]), model)):
        console.print(note, highlight=False, soft_wrap=True)
    return data


def prepare_run(recipe: Recipe, console: Console) -> tuple[Recipe, TrainingData, AdaptedModel | None]:
    """Prepare a run: the complete recipe, its data, and its pretrained weights, if it has any."""
    data = open_data(recipe, console)
    recipe = complete_recipe(recipe, data, console)
    if recipe.train.distill:
        recipe = replace(recipe, train=replace(recipe.train, distill=resolve_weights_path(recipe.train.distill)))
    if not recipe.weights:
        return recipe, data, None
    adapted = load_pretrained_weights(recipe, get_class_names(data))
    _print_model_changes(recipe.model, adapted.info.model, console)
    recipe = replace(recipe, model=adapted.info.model, weights=resolve_weights_path(recipe.weights))
    data = replace(data, preprocessing=adapted.info.preparation)  # the normalisation that the weights were trained with
    console.print(format_adaptation_report(adapted.report), highlight=False, soft_wrap=True)
    if warning := make_leakage_warning(recipe):
        console.print(warning, highlight=False, soft_wrap=True)
    return recipe, data, adapted


def get_class_names(data: TrainingData) -> list[str] | None:
    """The class names of the data; None if its classes have only numbers."""
    return data.classes if data.source.has_class_names else None


def complete_recipe(recipe: Recipe, data: TrainingData, console: Console) -> Recipe:
    """Complete the recipe: add the data set's augmentation policy, and set num_classes to match the data."""
    stored = tuple(data.train.images.shape[1:])
    augment = resolve_augmentation(recipe.data.augment, recipe.data.name, stored[0], recipe.train.objective)
    recipe = replace(recipe, data=replace(resolve_data_paths(recipe.data), augment=augment))
    if recipe.model.num_classes != len(data.classes):
        console.print(f"model.num_classes: {recipe.model.num_classes} → {len(data.classes)}, as in the data")
        recipe = replace(recipe, model=replace(recipe.model, num_classes=len(data.classes)))
    wanted = (recipe.model.in_chans, *recipe.model.image_shape)
    if stored[0] != wanted[0] and {stored[0], wanted[0]} != {1, 3}:
        raise UserError(
            f"The images have {format_count(stored[0], 'channel')}, but model.in_chans={wanted[0]}. "
            "Only 1 channel and 3 channels can be converted into each other."
        )
    if recipe.train.batch_size > len(data.train):
        console.print(
            f"train.batch_size={recipe.train.batch_size} is larger than the training set: each step uses all "
            f"{len(data.train):,} images.",
            highlight=False,
        )
    if stored != wanted:
        before, after = describe_shape(stored), describe_shape(wanted)
        console.print(f"Images are converted from {before} to {after}, the input size of the model.")
    return recipe


def _print_model_changes(requested_config: ModelConfig, weights_config: ModelConfig, console: Console) -> None:
    """Print the model settings that the pretrained weights change."""
    both = {
        item.name: (getattr(requested_config, item.name), getattr(weights_config, item.name))
        for item in fields(ModelConfig)
    }
    words = [f"model.{name}: {old} → {new}" for name, (old, new) in both.items() if old != new]
    if words:
        console.print(f"Changed to match the weights: {', '.join(words)}", highlight=False, soft_wrap=True)


def _train_and_report(
    run: Run,
    session: Session,
    console: Console,
    callbacks: Sequence[RunCallback] = (),
    *,
    suggest_evaluation: bool = True,
) -> None:
    """Write the facts of the run, train, and draw the curves even if the training fails."""
    recipe, data = session.recipe, session.data
    if recipe.train.tune != "full" or recipe.train.freeze:
        console.print(
            "{:,} of {:,} parameters are trained.".format(*count_trainable_parameters(session.model)), highlight=False
        )
    if note := describe_training_values(recipe):
        console.print(note, highlight=False, soft_wrap=True)
    write_run_info(run, session)
    events = TensorBoardWriter(run.path, read_metrics(run.get_path("metrics.jsonl")))
    trackers: list[Tracker] = [*open_trackers(recipe, run), *callbacks]
    try:
        for watcher in callbacks:
            watcher.begin_run(run)
        _log_metrics(
            show_progress(train_epochs(session, run), recipe.train.epochs, session.epoch, console), events, trackers
        )
    except KeyboardInterrupt:
        console.print(f"Interrupted. To resume: vitascope resume {run.path}", highlight=False, soft_wrap=True)
        raise
    finally:
        torch.set_num_threads(DEFAULT_NUM_THREADS)
        events.close()
        for tracker in trackers:
            tracker.close()
        draw_run_curves(run.get_path("curves.png"), run.metrics, f"{recipe.name}, seed {recipe.train.seed}")
    text = summarize(run, "test" in data.source.split_names, suggest_evaluation=suggest_evaluation)
    console.print(text, highlight=False, soft_wrap=True)
    _write_wall_seconds(run)


def _write_wall_seconds(run: Run) -> None:
    """Add the seconds since the process's start to machine.json, where one process trained the whole run."""
    seconds, machine = measure_task_seconds(run), run.machine
    if seconds is not None and "resumed" not in machine:
        write_json(run.get_path("machine.json"), machine | {"wall_seconds": round(seconds, 2)})


def write_run_info(run: Run, session: Session) -> None:
    """Write config.json and machine.json before the first step."""
    begin_task(TRAIN, run)
    recipe, data = session.recipe, session.data
    channels, rows, columns = data.train.images.shape[1:]
    probe = recipe.train.objective != "classify"
    save_model_info(run, ModelInfo(recipe.model, data.classes, data.preprocessing, (channels, rows, columns), probe))
    write_json(run.get_path("machine.json"), _collect_machine_info(run, session))


def _collect_machine_info(run: Run, session: Session) -> dict[str, Any]:
    """The machine and the data of the run. A resumed run keeps the first record and appends a new one."""
    now, before = collect_machine_info(), run.machine
    if before:
        return before | {"resumed": [*before.get("resumed", []), now]}
    return now | {
        "hardware": asdict(session.hardware),
        "data_hash": session.fingerprints["data"],
        "whole_data_hash": session.data.full_train_hash,
        "training_images": len(session.data.train),
    }


def _log_metrics(records: Iterator[EpochRecord], events: TensorBoardWriter, trackers: list[Tracker]) -> None:
    for record in records:
        events.log_epoch(record.metrics)
        for tracker in trackers:
            tracker.log_epoch(record.metrics)


def make_console(quiet: bool) -> Console:
    """A console that prints nothing if `quiet`."""
    return Console(quiet=quiet)
