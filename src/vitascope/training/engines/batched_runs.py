"""Train several runs of one shape as one batched computation; each leaves a run folder of its own."""

import math
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from vitascope.errors import UserError
from vitascope.inference.hardware import choose_or_check_device
from vitascope.model.attention_variants import make_lora_merged_state_dict
from vitascope.recipe.schema import Recipe
from vitascope.run.checkpoint import save_weights
from vitascope.run.directory import Run, create_run_folder
from vitascope.run.lock import lock_run
from vitascope.run.machine import TRAIN, record_task_start_in_this_process
from vitascope.run.metrics import save_run_curves_figure
from vitascope.training.engines.batched import BatchedTraining
from vitascope.training.engines.prepare_batched import check_batchable
from vitascope.training.hardware import DEFAULT_NUM_THREADS, count_train_flops_per_image
from vitascope.training.loop import (
    format_divergence_error,
    log_epoch_and_keep_best,
    make_metrics_row,
    save_weight_snapshot_if_due,
)
from vitascope.training.messages import make_curves_title
from vitascope.training.prepare import (
    complete_recipe_and_load_data_and_weights,
    make_console,
    seed_and_build_train_state,
)
from vitascope.training.state import TrainState
from vitascope.training.train import write_model_and_machine_info

BATCHED_RUNS_LIMIT = 32
GPU_SATURATION_FLOPS = 1.5e12  # FLOPs of a step that keep a GPU busy; batching larger steps saves no time


def choose_max_batched_runs(recipe: Recipe) -> int:
    """Return how many runs of this recipe to train in one batch: 1 if they cannot be batched or it saves no time."""
    try:
        check_batchable([recipe])
    except UserError:
        return 1
    if choose_or_check_device(recipe.train.device) != "cuda":  # one run already keeps a CPU busy
        return 1
    return max(
        1,
        min(
            BATCHED_RUNS_LIMIT,
            int(GPU_SATURATION_FLOPS / (count_train_flops_per_image(recipe) * recipe.train.batch_size)),
        ),
    )


def train_batched_runs(recipes: list[Recipe], runs_folder: Path) -> list[Run | UserError]:
    """Train the recipes as one batch; return the runs in the same order.

    A run whose loss becomes NaN or infinite is returned as an error; the others continue."""
    quiet = make_console(quiet=True)
    states: list[TrainState] = []
    for recipe in recipes:
        recipe, data, _ = complete_recipe_and_load_data_and_weights(recipe, quiet)
        first = states[0].hardware if states else None
        states.append(seed_and_build_train_state(recipe, data, first, num_batched_runs=len(recipes)))
    batched_training = BatchedTraining(states)
    new_runs = [create_run_folder(state.recipe, runs_folder) for state in states]
    try:
        with ExitStack() as locks:
            for run in new_runs:
                locks.enter_context(lock_run(run))
            return _train_epochs_and_save_runs(batched_training, new_runs)
    except BaseException:
        for run in new_runs:  # they have no checkpoint, so they cannot be resumed
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    finally:
        batched_training.close()
        torch.set_num_threads(DEFAULT_NUM_THREADS)


def _train_epochs_and_save_runs(batched_training: BatchedTraining, new_runs: list[Run]) -> list[Run | UserError]:
    runs: list[Run | UserError] = [*new_runs]
    for run, state in zip(new_runs, batched_training.states, strict=True):
        record_task_start_in_this_process(TRAIN, run)
        write_model_and_machine_info(run, state)
    for epoch in range(batched_training.train_config.epochs):
        _train_validate_and_log_epoch(batched_training, runs, epoch)
    for run, state in zip(runs, batched_training.states, strict=True):
        if isinstance(run, Run):
            save_run_curves_figure(run.path, run.metrics, state.recipe, make_curves_title(state.recipe))
            save_weights(run.get_path("model.safetensors"), make_lora_merged_state_dict(state.eval_model))
    return runs


def _train_validate_and_log_epoch(batched_training: BatchedTraining, runs: list[Run | UserError], epoch: int) -> None:
    start = time.monotonic()
    losses, accuracies = (values.tolist() for values in batched_training.train_epoch(epoch))  # waits for the device
    seconds = time.monotonic() - start
    batched_training.copy_weights_and_ema_to_states()
    validation_metrics = batched_training.validate()
    seconds_per_run = (time.monotonic() - start) / len(runs)
    for index, (state, validation) in enumerate(zip(batched_training.states, validation_metrics, strict=True)):
        run = runs[index]
        state.epoch, state.step = epoch + 1, (epoch + 1) * batched_training.steps_per_epoch
        if not isinstance(run, Run):
            continue
        if not math.isfinite(losses[index] + validation.get("val_loss", 0.0)):
            runs[index] = UserError(format_divergence_error("The loss became NaN or infinite", epoch + 1, state))
            continue
        metric_means = {"train_loss": losses[index], "train_accuracy": accuracies[index]}
        row = make_metrics_row(state, state.epoch, metric_means, seconds, len(runs)) | {"together": len(runs)}
        log_epoch_and_keep_best(state, run, row | validation, seconds_per_run)
        save_weight_snapshot_if_due(state, run)
