"""Train a recipe: open the data, create the run folder, train, and write all results to it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from vitascope.data.dataset import has_fingerprint
from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import is_data_reference, read_recipe
from vitascope.recipe.schema import Recipe, format_keyword_settings, format_recipe_yaml
from vitascope.run.checkpoint import (
    Checkpoint,
    clean_up_checkpoints,
    load_checkpoint,
    read_model_info,
    save_model_info,
)
from vitascope.run.directory import Run, create_run_folder, open_run_or_newest
from vitascope.run.files import write_json
from vitascope.run.lock import lock_run
from vitascope.run.machine import (
    TRAIN,
    collect_machine_info,
    measure_process_wall_seconds_if_alone,
    record_task_start_in_this_process,
)
from vitascope.run.metrics import (
    TensorBoardWriter,
    Tracker,
    open_trackers,
    read_metrics,
    save_run_curves_figure,
    truncate_metrics_file_after_epoch,
)
from vitascope.training.checkpoint_check import load_fitting_checkpoint, read_checkpoint_hardware
from vitascope.training.hardware import DEFAULT_NUM_THREADS, Hardware
from vitascope.training.initial_weights import STAGE_PREFIX, load_and_adapt_pretrained_weights, read_first_stage_recipe
from vitascope.training.loop import ALARMS_FILE, EpochRecord, train_and_checkpoint_remaining_epochs
from vitascope.training.messages import (
    describe_teacher,
    explain_worse_training_metrics,
    format_training_summary,
    make_curves_title,
    show_progress_and_yield_epochs,
)
from vitascope.training.optim.build import count_trainable_and_all_parameters
from vitascope.training.prepare import (
    complete_recipe_and_load_data_and_weights,
    find_class_names,
    make_console,
    open_data_and_print_notes,
    seed_and_build_train_state,
)
from vitascope.training.state import TrainState
from vitascope.weights.model_info import ModelInfo


class RunCallback(Tracker, Protocol):
    """A tracker that also gets the run when it begins."""

    def begin_run(self, run: Run) -> None: ...


def train(
    recipe: str | os.PathLike[str], *, runs: str | os.PathLike[str] = "runs", quiet: bool = False, **settings: Any
) -> Run:
    """Train a recipe (a name or a path). Return the finished run.

    A folder of images, an .npz file or data:NAME instead of a recipe is trained with chosen settings.

    Settings are sections such as train={"epochs": 5}, or full names such as **{"train.epochs": 5}, or both."""
    recipe, overrides = os.fspath(recipe), format_keyword_settings(settings)
    if is_data_reference(recipe):
        from vitascope.training.auto.train_images import choose_settings_and_train

        return choose_settings_and_train(recipe, overrides, Path(runs), make_console(quiet))
    return train_recipe(read_recipe(recipe, overrides), Path(runs), make_console(quiet))


def resume(run: str | os.PathLike[str], *, quiet: bool = False, force: bool = False) -> Run:
    """Resume an interrupted run. The result is bit-identical to an uninterrupted run.

    `force`: also if the run is locked by a process of another host, which must have ended."""
    return resume_run_if_unfinished(open_run_or_newest(run), make_console(quiet), force=force)


def train_recipe(
    recipe: Recipe,
    runs_folder: Path,
    console: Console,
    callbacks: Sequence[RunCallback] = (),
    *,
    suggest_evaluation: bool = True,
) -> Run:
    """Train a recipe. `callbacks` are called when the run begins and after every epoch; an exception stops the run.

    `suggest_evaluation`: print the command that evaluates the run."""
    if recipe.weights and recipe.weights.startswith(STAGE_PREFIX):
        try:
            first = _train_resume_or_reuse_first_stage(recipe, runs_folder, console)
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
    recipe, data, adapted = complete_recipe_and_load_data_and_weights(recipe, console)
    state = seed_and_build_train_state(recipe, data, initial_weights=adapted.weights if adapted else None)
    run = create_run_folder(recipe, runs_folder)
    with lock_run(run):
        console.print(f"Run: {run.path}", highlight=False, soft_wrap=True)
        if adapted:
            write_json(run.get_path("adaptation.json"), asdict(adapted.report))
        _train_and_write_run_files(run, state, console, callbacks, suggest_evaluation=suggest_evaluation)
    return run


def _train_resume_or_reuse_first_stage(recipe: Recipe, runs_folder: Path, console: Console) -> Run:
    """Return the run of the first stage (weights=recipe:NAME) on the same data and seed.

    A finished run is reused, an interrupted run is resumed."""
    first = read_first_stage_recipe(recipe)
    console.print(f"First stage: {first.name}", highlight=False)
    complete_first, data, _ = complete_recipe_and_load_data_and_weights(first, make_console(quiet=True))
    for recipe_path in sorted((runs_folder / first.name).glob("*/recipe.yaml"), reverse=True):
        run = Run(recipe_path.parent)
        with suppress(UserError):  # another version's recipe
            if format_recipe_yaml(run.recipe) == format_recipe_yaml(complete_first) and has_fingerprint(
                data.train, run.machine.get("data_hash", "")
            ):
                return resume_run_if_unfinished(run, console)
    return train_recipe(first, runs_folder, console)


def resume_run_if_unfinished(
    run: Run, console: Console, callbacks: Sequence[RunCallback] = (), *, force: bool = False
) -> Run:
    """Train an interrupted run to the end. A finished run is returned as it is.

    `force`: take the run's lock from a process of another host."""
    if run.is_finished:
        console.print(f"{run.path} is already finished.", highlight=False, soft_wrap=True)
        if not run.get_path("curves.png").is_file():  # the process was killed after it wrote the weights
            save_run_curves_figure(run.path, run.metrics, run.recipe, make_curves_title(run.recipe))
        return run
    with lock_run(run, force=force):
        _resume_locked_run(run, console, callbacks)
    return run


def _resume_locked_run(run: Run, console: Console, callbacks: Sequence[RunCallback]) -> None:
    if run.is_from_older_version:
        raise UserError(
            f"{run.path} was made by an older version of Vitascope and cannot be resumed. Use that version, or train "
            "again: CHANGELOG.md lists the settings that were renamed."
        )
    recipe, loaded = run.recipe, load_checkpoint(run)
    checkpoint = loaded.state
    data, weights = open_data_and_print_notes(recipe, console), None
    if recipe.weights and checkpoint:
        data = replace(data, preprocessing=read_model_info(run).preparation)
    elif recipe.weights:  # interrupted before its first checkpoint: start again from the pretrained weights
        adapted = load_and_adapt_pretrained_weights(recipe, find_class_names(data))
        data, weights = replace(data, preprocessing=adapted.info.preparation), adapted.weights
    state = seed_and_build_train_state(recipe, data, _find_stored_hardware(run, checkpoint), weights)
    if checkpoint:
        load_fitting_checkpoint(state, run, checkpoint)
    clean_up_checkpoints(run, loaded)
    if loaded.note:
        console.print(loaded.note, highlight=False, soft_wrap=True)
    for name in ("metrics.jsonl", ALARMS_FILE):
        if run.get_path(name).is_file():
            truncate_metrics_file_after_epoch(run.get_path(name), state.epoch)
    start = f"after epoch {state.epoch}" if state.epoch else "from the start"
    if num_steps := state.num_steps_of_current_epoch_done:
        start = f"in epoch {state.epoch + 1}, after {num_steps:,} of {state.steps_per_epoch:,} steps"
    console.print(f"Run: {run.path}, resuming {start}", highlight=False, soft_wrap=True)
    _train_and_write_run_files(run, state, console, callbacks)


def _find_stored_hardware(run: Run, checkpoint: Checkpoint | None) -> Hardware | None:
    """Return the hardware of the run, from its checkpoint, or from machine.json if it has none yet."""
    if checkpoint:
        return read_checkpoint_hardware(run, checkpoint)
    try:
        return Hardware(**run.machine["hardware"])
    except (KeyError, TypeError):  # no machine.json yet, or another version's: nothing has been trained
        return None


def _train_and_write_run_files(
    run: Run,
    state: TrainState,
    console: Console,
    callbacks: Sequence[RunCallback] = (),
    *,
    suggest_evaluation: bool = True,
) -> None:
    """Write config.json and machine.json, train, and draw the curves even if the training fails."""
    recipe, data = state.recipe, state.data
    _print_notes_before_training(state, console)
    record_task_start_in_this_process(TRAIN, run)
    write_model_and_machine_info(run, state)
    events = TensorBoardWriter(run.path, read_metrics(run.get_path("metrics.jsonl")))
    trackers: list[Tracker] = [*open_trackers(recipe, run), *callbacks]
    try:
        for callback in callbacks:
            callback.begin_run(run)
        records = train_and_checkpoint_remaining_epochs(state, run)
        epochs = show_progress_and_yield_epochs(records, recipe.train.epochs, state.epoch, console)
        _consume_and_log_epoch_records(epochs, events, trackers)
    except KeyboardInterrupt:
        console.print(f"Interrupted. To resume: vitascope resume {run.path}", highlight=False, soft_wrap=True)
        raise
    except UserError as error:
        _check_run_folder_exists(run, error)
        raise
    finally:
        torch.set_num_threads(DEFAULT_NUM_THREADS)
        events.close()
        for tracker in trackers:
            tracker.close()
        if run.path.is_dir():
            save_run_curves_figure(run.path, run.metrics, recipe, make_curves_title(recipe))
    _check_run_folder_exists(run)
    text = format_training_summary(run, data, suggest_evaluation=suggest_evaluation)
    console.print(text, highlight=False, soft_wrap=True)
    _write_wall_seconds_if_known(run)


def _print_notes_before_training(state: TrainState, console: Console) -> None:
    recipe = state.recipe
    if recipe.train.tune != "full" or recipe.train.freeze:
        counts = count_trainable_and_all_parameters(state.model)
        console.print(f"{counts.trainable:,} of {counts.total:,} parameters are trained.", highlight=False)
    for note in filter(None, (describe_teacher(recipe), explain_worse_training_metrics(recipe))):
        console.print(note, highlight=False, soft_wrap=True)


def _check_run_folder_exists(run: Run, cause: Exception | None = None) -> None:
    if not run.get_path("recipe.yaml").is_file():
        raise UserError(f"{run.path} was deleted or moved during the training, so it has no result.") from cause


def _write_wall_seconds_if_known(run: Run) -> None:
    """Add the seconds since the process's start to machine.json, where one process trained the whole run."""
    seconds, machine = measure_process_wall_seconds_if_alone(run), run.machine
    if seconds is not None and "resumed" not in machine:
        write_json(run.get_path("machine.json"), machine | {"wall_seconds": round(seconds, 2)})


def write_model_and_machine_info(run: Run, state: TrainState) -> None:
    """Write config.json and machine.json before the first step."""
    recipe, data = state.recipe, state.data
    probe = not recipe.train.uses_labels
    save_model_info(run, ModelInfo(recipe.model, data.classes, data.preprocessing, data.train.image_shape, probe))
    write_json(run.get_path("machine.json"), _collect_or_extend_machine_info(run, state))


def _collect_or_extend_machine_info(run: Run, state: TrainState) -> dict[str, Any]:
    """Describe the machine and the data of the run. A resumed run keeps the first record and appends a new one."""
    machine, first_record = collect_machine_info(), run.machine
    if "hardware" in first_record:
        return first_record | {"resumed": [*first_record.get("resumed", []), machine]}
    return machine | {
        "hardware": asdict(state.hardware),
        "data_hash": state.input_fingerprints["data"],
        "whole_data_hash": state.data.full_train_fingerprint,
        "training_images": len(state.data.train),
        "validation_images": 0 if state.data.validation is None else len(state.data.validation),
    }


def _consume_and_log_epoch_records(
    records: Iterator[EpochRecord], events: TensorBoardWriter, trackers: list[Tracker]
) -> None:
    for record in records:
        events.log_epoch(record.metrics)
        for tracker in trackers:
            tracker.log_epoch(record.metrics)
