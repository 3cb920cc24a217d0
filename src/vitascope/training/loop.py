"""The training loop: train all epochs, save checkpoints, and yield the progress and a record of each epoch."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitascope.errors import UserError, format_count, is_out_of_memory
from vitascope.model.attention_variants import make_lora_merged_state_dict
from vitascope.run.checkpoint import CHECKPOINT, SNAPSHOTS_FOLDER, Checkpoint, save_checkpoint, save_weights
from vitascope.run.directory import Run
from vitascope.run.files import append_json_line, make_folder, sync_file
from vitascope.training.engines import Engine
from vitascope.training.engines.single_run import make_engine
from vitascope.training.objectives.objective import Alarm
from vitascope.training.optim.build import set_train_mode_except_frozen
from vitascope.training.optim.schedule import compute_lr_factor
from vitascope.training.state import TrainState

PROGRESS_SECONDS = 0.5
ALARMS_FILE = "alarms.jsonl"


@dataclass(frozen=True)
class StepProgress:
    """Progress within an epoch."""

    epoch: int
    step: int
    num_steps: int
    images_per_second: float


@dataclass(frozen=True)
class EpochRecord:
    """The metrics of an epoch, as in its line of metrics.jsonl, and an alarm if the model collapsed."""

    metrics: dict[str, Any]
    alarm: Alarm | None = None


class CheckpointSaver:
    """Copies the state in memory, and writes the newest copy to resume.pt when train.save_seconds have passed."""

    def __init__(self, state: TrainState, run: Run) -> None:
        self.state, self.run, self.interval = state, run, state.recipe.train.save_seconds
        self.newest, self.spare = state.copy_state(), None  # two buffers: one is always complete
        self.saved_at, self.is_saved = time.monotonic(), True

    def keep_copy_of_state(self) -> None:
        self.newest, self.spare, self.is_saved = self.state.copy_state(self.spare), self.newest, False

    def is_due_within_epoch(self, now: float) -> bool:
        """Return whether to save before the epoch ends. With train.save_seconds=0, every epoch's end is enough."""
        return now - self.saved_at >= self.interval > 0

    def save_within_epoch(self, epoch_start: float) -> None:
        """Write the state in the middle of an epoch. Waits for the device; values that are not finite are an error."""
        read_finite_metric_sums(self.state)
        self.state.epoch_seconds = time.monotonic() - epoch_start
        self.keep_copy_of_state()
        self._save()

    def save_if_due(self) -> None:
        if time.monotonic() - self.saved_at >= self.interval:
            self._save()

    def save_unsaved_copy(self) -> None:
        if not self.is_saved or not self.run.get_path(CHECKPOINT).is_file():
            self._save()

    def _save(self) -> None:
        save_checkpoint_and_best_weights(self.run, self.newest)
        self.saved_at, self.is_saved = time.monotonic(), True


def train_and_checkpoint_remaining_epochs(state: TrainState, run: Run) -> Iterator[StepProgress | EpochRecord]:
    """Train all remaining epochs. When the loop ends, also by an error, resume.pt holds the last copied state."""
    saver, began = CheckpointSaver(state, run), time.monotonic() - state.epoch_seconds
    engine = make_engine(state, state.metric_sums)
    try:
        while state.epoch < state.recipe.train.epochs and not is_out_of_patience(state):
            start = time.monotonic() - state.epoch_seconds
            try:
                yield from train_epoch_yielding_progress(state, engine, saver, start)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(format_out_of_memory_error(state)) from error
            metrics = compute_and_check_epoch_metrics(state, start)  # waits for the device
            state.epoch, state.epoch_seconds = state.epoch + 1, 0.0
            metrics, ended = metrics | state.objective.validate(state.epoch), time.monotonic()
            record = log_epoch_and_keep_best(state, run, metrics, ended - began)
            began = ended  # the time for writing and saving is counted in the next epoch
            save_weight_snapshot_if_due(state, run)
            saver.keep_copy_of_state()
            saver.save_if_due()
            yield record
    finally:
        engine.close()
        saver.save_unsaved_copy()
    save_weights(run.get_path("model.safetensors"), make_lora_merged_state_dict(state.eval_model))


def save_weight_snapshot_if_due(state: TrainState, run: Run) -> None:
    """Save the weights after this epoch if train.weight_snapshots includes it."""
    if state.epoch in state.recipe.train.snapshot_epochs:
        make_folder(run.get_path(SNAPSHOTS_FOLDER))
        save_weights(
            run.get_path(SNAPSHOTS_FOLDER) / f"epoch-{state.epoch:04d}.safetensors",
            make_lora_merged_state_dict(state.eval_model),
        )


def save_checkpoint_and_best_weights(run: Run, checkpoint: Checkpoint) -> None:
    """Write the checkpoint for `resume`, and the best weights so far."""
    sync_file(run.get_path("metrics.jsonl"))  # a checkpoint never has more epochs than the metrics
    save_checkpoint(run, checkpoint)
    if checkpoint["best"] is not None:
        save_weights(run.get_path("best.safetensors"), checkpoint["best"])


def train_epoch_yielding_progress(
    state: TrainState, engine: Engine, saver: CheckpointSaver, epoch_start: float
) -> Iterator[StepProgress]:
    """Train one epoch, or the rest of one. Save when it is due; yield the progress about every half second."""
    set_train_mode_except_frozen(state.model)
    state.objective.extra_module.train()
    first_step, num_steps = state.num_steps_of_current_epoch_done, state.steps_per_epoch
    engine.start_epoch(state.epoch, first_step)
    reported_at, start = time.monotonic(), time.monotonic()
    for step in range(first_step, num_steps):
        engine.run_next_step()
        state.step += 1
        now = time.monotonic()
        if saver.is_due_within_epoch(now) and step + 1 < num_steps:
            saver.save_within_epoch(epoch_start)
        if now - reported_at > PROGRESS_SECONDS:
            reported_at = now
            speed = (step + 1 - first_step) * state.batch_size / (now - start)
            yield StepProgress(state.epoch, step + 1, num_steps, speed)


def read_finite_metric_sums(state: TrainState) -> dict[str, float]:
    """Return the sums of the epoch's metrics; raise an error for NaN or infinite values. Waits for the device."""
    is_finite = nn.utils.get_total_norm(state.eval_model.parameters(), float("inf")).isfinite()  # largest weight
    metric_sums = state.metric_sums
    values = [*metric_sums.sums.values(), metric_sums.first_nonfinite_step.float(), is_finite.float()]
    *sums, nonfinite_step, weights_are_finite = torch.stack(values).tolist()
    if nonfinite_step >= 0:
        problem = f"The loss became NaN or infinite at step {int(nonfinite_step) + 1}"
        raise UserError(format_divergence_error(problem, state.epoch + 1, state))
    if not weights_are_finite:
        raise UserError(format_divergence_error("The weights became NaN or infinite", state.epoch + 1, state))
    return dict(zip(metric_sums.sums, sums, strict=True))


def compute_and_check_epoch_metrics(state: TrainState, start_time: float) -> dict[str, Any]:
    """Return the training metrics of an epoch; raise an error for NaN or infinite values. Waits for the device."""
    sums = read_finite_metric_sums(state)
    seconds = time.monotonic() - start_time
    means = {name: total / state.steps_per_epoch for name, total in sums.items()}
    return make_metrics_row(state, state.epoch + 1, means, seconds)


def make_metrics_row(
    state: TrainState, epoch: int, metric_means: dict[str, float], seconds: float, num_batched_runs: int = 1
) -> dict[str, Any]:
    """Return one line of metrics.jsonl: progress, metrics and speed. The time is divided by `num_batched_runs`."""
    return {
        "epoch": epoch,
        "step": state.step,
        "images_seen": state.step * state.batch_size,
        "lr": state.recipe.train.lr * compute_lr_factor(state.step - 1, state.total_steps, state.recipe.train),
        **metric_means,
        "train_seconds": round(seconds / num_batched_runs, 4),
        "images_per_second": round(state.steps_per_epoch * state.batch_size * num_batched_runs / seconds, 1),
    }


def log_epoch_and_keep_best(state: TrainState, run: Run, metrics: dict[str, Any], seconds: float) -> EpochRecord:
    """Store the best weights and write the line of metrics. `metrics` includes the validation metrics."""
    if not math.isfinite(metrics.get("val_loss", 0.0)):
        raise UserError(format_divergence_error("The validation loss became NaN or infinite", state.epoch, state))
    if metrics.get(state.objective.selection_metric, -1.0) > state.best_accuracy:
        state.store_current_weights_as_best(metrics[state.objective.selection_metric])
    if state.epoch == 1:
        metrics["prepared_seconds"] = round(state.prepared_seconds, 4)
        seconds += state.prepared_seconds + state.setup_seconds
    metrics["seconds"] = round(seconds, 4)
    append_json_line(run.get_path("metrics.jsonl"), metrics)
    state.objective.save_figures(run.path, state.epoch)
    alarm = state.objective.detect_collapse(metrics)
    if alarm:
        append_json_line(
            run.get_path(ALARMS_FILE), {"epoch": state.epoch, "kind": alarm.collapse_type, "text": alarm.text}
        )
    return EpochRecord(metrics, alarm)


def format_divergence_error(problem: str, epoch: int, state: TrainState) -> str:
    """Error message for NaN or infinite values, with settings that may help."""
    train = state.recipe.train
    suggestions = [f"train.lr below {train.lr:g}"]
    suggestions += [f"train.muon_lr below {train.muon_lr:g}"] if train.optimizer == "muon" else []
    suggestions += ["train.clip_grad=1"] if not train.clip_grad else []
    suggestions += ["train.precision=float32"] if state.hardware.precision != "float32" else []
    text = f"{problem} (epoch {epoch}). The run would fail again if resumed."
    return f"{text} Start a new run with {' or '.join(suggestions)}."


def format_out_of_memory_error(state: TrainState) -> str:
    """Error message for a lack of device memory, with settings that may help."""
    recipe, train, batch = state.recipe, state.recipe.train, state.batch_size
    images_at_once = batch // train.grad_accum_steps
    text = f"The memory of the {state.hardware.device} device is too small for {format_count(images_at_once, 'image')}"
    suggestions = []
    divisors = [count for count in range(train.grad_accum_steps + 1, batch + 1) if train.batch_size % count == 0]
    if divisors and state.objective.can_accumulate:
        suggestions.append(f"train.grad_accum_steps={divisors[0]} (less memory, same result)")
    if not recipe.model.grad_checkpointing:
        suggestions.append("model.grad_checkpointing=true (less memory, more time)")
    suggestions.append(f"train.batch_size={batch // 2}" if batch > 1 else "a smaller model")
    return f"{text} at once. Try {' or '.join(suggestions)}."


def is_out_of_patience(state: TrainState) -> bool:
    """Return whether the best epoch is train.patience epochs ago."""
    patience = state.recipe.train.patience
    return bool(patience) and state.epoch - state.best_epoch >= patience
