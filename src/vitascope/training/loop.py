"""A session and its run -> small records, one per epoch and one now and then between; whoever reads them draws them."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitascope.errors import UserError, format_count
from vitascope.model.lora import merge_lora_state_dict
from vitascope.run.checkpoint import SNAPSHOTS_FOLDER, save_checkpoint, save_weights
from vitascope.run.directory import Run
from vitascope.run.files import append_json_line, make_folder
from vitascope.training.loader import EpochLoader
from vitascope.training.objectives.collapse import Alarm
from vitascope.training.optim.build import set_train_mode
from vitascope.training.optim.schedule import compute_lr_factor
from vitascope.training.session import Session
from vitascope.training.step import MetricSums

PROGRESS_SECONDS = 0.5
ALARMS_FILE = "alarms.jsonl"


@dataclass(frozen=True)
class StepProgress:
    """Where the loop is, between two epochs' records."""

    epoch: int
    step: int
    num_steps: int
    images_per_second: float


@dataclass(frozen=True)
class EpochRecord:
    """What an epoch came to; the same numbers as its line in metrics.jsonl."""

    metrics: dict[str, Any]
    alarm: Alarm | None = None


def train_epochs(session: Session, run: Run) -> Iterator[StepProgress | EpochRecord]:
    """Train to the end. However the loop is left, the last whole epoch's state is in resume.pt."""
    kept, spare, saved_at, dirty = session.copy_state(), None, time.monotonic(), False
    loader, tally, began = EpochLoader(session), MetricSums.empty(session), time.monotonic()
    try:
        while session.epoch < session.recipe.train.epochs and not is_out_of_patience(session):
            start = time.monotonic()
            try:
                yield from run_epoch(session, loader, tally)
            except torch.OutOfMemoryError as error:
                raise UserError(format_out_of_memory_error(session)) from error
            row = compute_epoch_metrics(
                session, tally, start
            )  # waits for the device; raises where the loss was not a number
            session.epoch += 1
            row, ended = row | session.objective.validate(session.epoch), time.monotonic()
            record = finish_epoch(session, run, row, ended - began)
            began = ended  # writing, showing and saving count with the next epoch
            save_weight_snapshot(session, run)
            kept, spare, dirty = (
                session.copy_state(spare),
                kept,
                True,
            )  # two buffers in alternation: one of them is always complete
            if time.monotonic() - saved_at >= session.recipe.train.save_seconds:
                save_checkpoint_and_best(run, kept)
                saved_at, dirty = time.monotonic(), False
            yield record
    finally:
        loader.close()
        if dirty or not run.get_path("resume.pt").is_file():
            save_checkpoint_and_best(run, kept)
    save_weights(run.get_path("model.safetensors"), merge_lora_state_dict(session.eval_model))


def save_weight_snapshot(session: Session, run: Run) -> None:
    """Save the weights after this epoch if train.weight_snapshots includes it."""
    if session.epoch in session.recipe.train.snapshot_epochs:
        make_folder(run.get_path(SNAPSHOTS_FOLDER))
        save_weights(
            run.get_path(SNAPSHOTS_FOLDER) / f"epoch-{session.epoch:04d}.safetensors",
            merge_lora_state_dict(session.eval_model),
        )


def save_checkpoint_and_best(run: Run, snapshot: dict[str, Any]) -> None:
    """Write the checkpoint for `resume`, and the best weights so far."""
    save_checkpoint(run, snapshot)
    if snapshot["best"] is not None:
        save_weights(run.get_path("best.safetensors"), snapshot["best"])


def run_epoch(session: Session, loader: EpochLoader, metric_sums: MetricSums) -> Iterator[StepProgress]:
    set_train_mode(session.model)
    session.objective.extra_module.train()
    one_step_on = loader.start_epoch(session.epoch, metric_sums)
    shown, start = time.monotonic(), time.monotonic()
    for step in range(session.steps_per_epoch):
        one_step_on(step)
        session.step += 1
        now = time.monotonic()
        if now - shown > PROGRESS_SECONDS:
            shown = now
            speed = (step + 1) * session.batch_size / (now - start)
            yield StepProgress(session.epoch, step + 1, session.steps_per_epoch, speed)


def compute_epoch_metrics(session: Session, metric_sums: MetricSums, start_time: float) -> dict[str, Any]:
    """The epoch's training metrics. Only here does the host wait for the device."""
    finite = nn.utils.get_total_norm(session.eval_model.parameters(), float("inf")).isfinite()  # of the largest weight
    found = [*metric_sums.sums.values(), metric_sums.first_nonfinite_step.float(), finite.float()]
    *sums, bad, whole = torch.stack(found).tolist()
    seconds = time.monotonic() - start_time
    if bad >= 0:
        raise UserError(
            format_divergence_error(
                f"The loss became NaN or infinite at step {int(bad) + 1}", session.epoch + 1, session
            )
        )
    if not whole:
        raise UserError(format_divergence_error("The weights became NaN or infinite", session.epoch + 1, session))
    steps = session.steps_per_epoch
    told = {name: total / steps for name, total in zip(metric_sums.sums, sums, strict=True)}
    return make_metrics_row(session, session.epoch + 1, told, seconds)


def make_metrics_row(
    session: Session, epoch: int, metric_means: dict[str, float], seconds: float, num_batched_runs: int = 1
) -> dict[str, Any]:
    """One line of metrics.jsonl: progress, metrics and speed. `shared`: number of batched runs; divides the time."""
    return {
        "epoch": epoch,
        "step": session.step,
        "images_seen": session.step * session.batch_size,
        "lr": session.recipe.train.lr * compute_lr_factor(session.step - 1, session.total_steps, session.recipe.train),
        **metric_means,
        "train_seconds": round(seconds / num_batched_runs, 4),
        "images_per_second": round(session.steps_per_epoch * session.batch_size * num_batched_runs / seconds, 1),
    }


def finish_epoch(session: Session, run: Run, metrics: dict[str, Any], seconds: float) -> EpochRecord:
    """Keep the best weights and write the line of metrics. `row` includes the validation metrics."""
    if not math.isfinite(metrics.get("val_loss", 0.0)):
        raise UserError(format_divergence_error("The validation loss became NaN or infinite", session.epoch, session))
    if metrics.get(session.objective.selection_metric, -1.0) > session.best_accuracy:
        session.store_best_weights(metrics[session.objective.selection_metric])
    if session.epoch == 1:
        metrics["prepared_seconds"] = round(session.prepared_seconds, 4)
        seconds += session.prepared_seconds + session.setup_seconds
    metrics["seconds"] = round(seconds, 4)
    append_json_line(run.get_path("metrics.jsonl"), metrics)
    session.objective.save_figures(run.path, session.epoch)
    found = session.objective.detect_collapse(metrics)
    if found:
        append_json_line(
            run.get_path(ALARMS_FILE), {"epoch": session.epoch, "kind": found.collapse_type, "text": found.text}
        )
    return EpochRecord(metrics, found)


def format_divergence_error(problem: str, epoch: int, session: Session) -> str:
    """Error message for NaN or infinite values, with settings that may help."""
    train = session.recipe.train
    ways = [f"train.lr below {train.lr:g}"]
    ways += [f"train.muon_lr below {train.muon_lr:g}"] if train.optimizer == "muon" else []
    ways += ["train.clip_grad=1"] if not train.clip_grad else []
    ways += ["train.precision=float32"] if session.hardware.precision != "float32" else []
    said = f"{problem} (epoch {epoch}). The run would fail again if resumed."
    return f"{said} Start a new run with {' or '.join(ways)}."


def format_out_of_memory_error(session: Session) -> str:
    """Error message for a lack of device memory, with settings that may help."""
    recipe, train, batch = session.recipe, session.recipe.train, session.batch_size
    at_once = batch // train.grad_accum_steps
    said = f"The memory of the {session.hardware.device} device is too small for {format_count(at_once, 'image')}"
    ways = []
    parts = [number for number in range(train.grad_accum_steps + 1, batch + 1) if train.batch_size % number == 0]
    if parts and not (train.objective == "dino" and recipe.dino.batch_norm):
        ways.append(f"train.grad_accum_steps={parts[0]} (less memory, same result)")
    if not recipe.model.grad_checkpointing:
        ways.append("model.grad_checkpointing=true (less memory, more time)")
    ways.append(f"train.batch_size={batch // 2}" if batch > 1 else "a smaller model")
    return f"{said} at once. Try {' or '.join(ways)}."


def is_out_of_patience(session: Session) -> bool:
    patience = session.recipe.train.patience
    return bool(patience) and session.epoch - session.best_epoch >= patience
