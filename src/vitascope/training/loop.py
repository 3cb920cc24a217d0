"""A session and its run -> small records, one per epoch and one now and then between; whoever reads them draws them."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vitascope.errors import UserError, format_count
from vitascope.model.lora import plain_state
from vitascope.run.checkpoint import save_checkpoint
from vitascope.run.directory import Run
from vitascope.run.files import append_line, make_folder
from vitascope.run.weights import KEPT, save_weights
from vitascope.training.alarm import Alarm
from vitascope.training.feeding import EpochLoader
from vitascope.training.schedule import rate_factor
from vitascope.training.session import Session
from vitascope.training.step import Tally
from vitascope.training.tuning import train_mode

PROGRESS_SECONDS = 0.5
ALARMS = "alarms.jsonl"


@dataclass(frozen=True)
class Progress:
    """Where the loop is, between two epochs' records."""

    epoch: int
    step: int
    steps: int
    images_per_second: float


@dataclass(frozen=True)
class EpochRecord:
    """What an epoch came to; the same numbers as its line in metrics.jsonl."""

    row: dict[str, Any]
    alarm: Alarm | None = None


def learn(session: Session, run: Run) -> Iterator[Progress | EpochRecord]:
    """Train to the end. However the loop is left, the last whole epoch's state is in resume.pt."""
    kept, spare, saved_at, dirty = session.snapshot(), None, time.monotonic(), False
    loader, tally, began = EpochLoader(session), Tally.empty(session), time.monotonic()
    try:
        while session.epoch < session.recipe.train.epochs and not out_of_patience(session):
            start = time.monotonic()
            try:
                yield from run_epoch(session, loader, tally)
            except torch.OutOfMemoryError as error:
                raise UserError(too_large(session)) from error
            row = epoch_row(session, tally, start)  # waits for the device; raises where the loss was not a number
            session.epoch += 1
            row, ended = row | session.objective.look(session.epoch), time.monotonic()
            record = finish_epoch(session, run, row, ended - began)
            began = ended  # writing, showing and saving count with the next epoch
            keep_on_the_way(session, run)
            kept, spare, dirty = (
                session.snapshot(spare),
                kept,
                True,
            )  # two buffers in alternation: one of them is always complete
            if time.monotonic() - saved_at >= session.recipe.train.save_seconds:
                save_state(run, kept)
                saved_at, dirty = time.monotonic(), False
            yield record
    finally:
        loader.close()
        if dirty or not run.file("resume.pt").is_file():
            save_state(run, kept)
    save_weights(run.file("model.safetensors"), plain_state(session.answering))


def keep_on_the_way(session: Session, run: Run) -> None:
    """Save the weights after this epoch if train.weight_snapshots includes it."""
    if session.epoch in session.recipe.train.kept_epochs:
        make_folder(run.file(KEPT))
        save_weights(run.file(KEPT) / f"epoch-{session.epoch:04d}.safetensors", plain_state(session.answering))


def save_state(run: Run, state: dict[str, Any]) -> None:
    """Write the checkpoint for `resume`, and the best weights so far."""
    save_checkpoint(run, state)
    if state["best"] is not None:
        save_weights(run.file("best.safetensors"), state["best"])


def run_epoch(session: Session, loader: EpochLoader, tally: Tally) -> Iterator[Progress]:
    train_mode(session.model)
    session.objective.extra.train()
    one_step_on = loader.start(session.epoch, tally)
    shown, start = time.monotonic(), time.monotonic()
    for step in range(session.steps_per_epoch):
        one_step_on(step)
        session.step += 1
        now = time.monotonic()
        if now - shown > PROGRESS_SECONDS:
            shown = now
            speed = (step + 1) * session.batch / (now - start)
            yield Progress(session.epoch, step + 1, session.steps_per_epoch, speed)


def epoch_row(session: Session, tally: Tally, start: float) -> dict[str, Any]:
    """The epoch's training metrics. Only here does the host wait for the device."""
    finite = nn.utils.get_total_norm(session.answering.parameters(), float("inf")).isfinite()  # of the largest weight
    found = [*tally.sums.values(), tally.bad_step.float(), finite.float()]
    *sums, bad, whole = torch.stack(found).tolist()
    seconds = time.monotonic() - start
    if bad >= 0:
        raise UserError(broken(f"The loss became NaN or infinite at step {int(bad) + 1}", session.epoch + 1, session))
    if not whole:
        raise UserError(broken("The weights became NaN or infinite", session.epoch + 1, session))
    steps = session.steps_per_epoch
    told = {name: total / steps for name, total in zip(tally.sums, sums, strict=True)}
    return training_row(session, session.epoch + 1, told, seconds)


def training_row(
    session: Session, epoch: int, told: dict[str, float], seconds: float, shared: int = 1
) -> dict[str, Any]:
    """One line of metrics.jsonl: progress, metrics and speed. `shared`: number of batched runs; divides the time."""
    return {
        "epoch": epoch,
        "step": session.step,
        "images_seen": session.step * session.batch,
        "lr": session.recipe.train.lr * rate_factor(session.step - 1, session.steps, session.recipe.train),
        **told,
        "train_seconds": round(seconds / shared, 4),
        "images_per_second": round(session.steps_per_epoch * session.batch * shared / seconds, 1),
    }


def finish_epoch(session: Session, run: Run, row: dict[str, Any], seconds: float) -> EpochRecord:
    """Keep the best weights and write the line of metrics. `row` includes the validation metrics."""
    if not math.isfinite(row.get("val_loss", 0.0)):
        raise UserError(broken("The validation loss became NaN or infinite", session.epoch, session))
    if row.get(session.objective.measure, -1.0) > session.best_accuracy:
        session.keep_best(row[session.objective.measure])
    if session.epoch == 1:
        row["prepared_seconds"] = round(session.prepared_seconds, 4)
        seconds += session.prepared_seconds + session.set_up_seconds
    row["seconds"] = round(seconds, 4)
    append_line(run.file("metrics.jsonl"), row)
    session.objective.draw(run.path, session.epoch)
    found = session.objective.alarm(row)
    if found:
        append_line(run.file(ALARMS), {"epoch": session.epoch, "kind": found.kind, "text": found.text})
    return EpochRecord(row, found)


def broken(what: str, epoch: int, session: Session) -> str:
    """Error message for NaN or infinite values, with settings that may help."""
    train = session.recipe.train
    ways = [f"train.lr below {train.lr:g}"]
    ways += [f"train.muon_lr below {train.muon_lr:g}"] if train.optimizer == "muon" else []
    ways += ["train.clip_grad=1"] if not train.clip_grad else []
    ways += ["train.precision=float32"] if session.hardware.precision != "float32" else []
    said = f"{what} (epoch {epoch}). The run would fail again if resumed."
    return f"{said} Start a new run with {' or '.join(ways)}."


def too_large(session: Session) -> str:
    """Error message for a lack of device memory, with settings that may help."""
    recipe, train, batch = session.recipe, session.recipe.train, session.batch
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


def out_of_patience(session: Session) -> bool:
    patience = session.recipe.train.patience
    return bool(patience) and session.epoch - session.best_epoch >= patience
