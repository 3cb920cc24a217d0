"""Recipes of one shape -> finished runs that learnt together: each leaves what a run alone would, but no checkpoint."""

import math
import shutil
import time
from pathlib import Path

import torch

from vitascope.errors import UserError
from vitascope.model.lora import plain_state
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run, new_run
from vitascope.run.metrics import draw_run_curves
from vitascope.run.weights import save_weights
from vitascope.training.alike import check_together
from vitascope.training.hardware import ALL_THREADS, choose_device, training_flops
from vitascope.training.loop import broken, finish_epoch, keep_on_the_way, training_row
from vitascope.training.session import Session, start_session
from vitascope.training.together import Together
from vitascope.training.train import console_for, decided, write_facts

MOST = 32
FULL = 1.5e12  # FLOPs of a step that keep a GPU busy: a model that has as many gains nothing from company


def fitting(recipe: Recipe) -> int:
    """How many runs like this one should learn together: 1 where they cannot, or where it gains nothing."""
    try:
        check_together([recipe])
    except UserError:
        return 1
    if choose_device(recipe.train.device) != "cuda":  # two cores are busy with one
        return 1
    return max(1, min(MOST, int(FULL / (training_flops(recipe) * recipe.train.batch_size))))


def train_together(recipes: list[Recipe], folder: Path) -> list[Run | UserError]:
    """In the order of the recipes; a run whose loss is no number any more is an error, and the others go on."""
    quiet = console_for(quiet=True)
    sessions: list[Session] = []
    for recipe in recipes:
        recipe, data, _ = decided(recipe, quiet)
        first = sessions[0].hardware if sessions else None
        sessions.append(start_session(recipe, data, first, models=len(recipes)))
    crowd = Together(sessions)
    made = [new_run(session.recipe, folder) for session in sessions]
    try:
        return _learnt(crowd, made)
    except BaseException:
        for run in made:  # without a checkpoint nobody can go on with them
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    finally:
        crowd.close()
        torch.set_num_threads(ALL_THREADS)


def _learnt(crowd: Together, made: list[Run]) -> list[Run | UserError]:
    runs: list[Run | UserError] = [*made]
    for run, session in zip(made, crowd.sessions, strict=True):
        write_facts(run, session)
    for epoch in range(crowd.config.epochs):
        _one_epoch(crowd, runs, epoch)
    for run, session in zip(runs, crowd.sessions, strict=True):
        if isinstance(run, Run):
            draw_run_curves(
                run.file("curves.png"), run.metrics, f"{session.recipe.name}, seed {session.recipe.train.seed}"
            )
            save_weights(run.file("model.safetensors"), plain_state(session.answering))
    return runs


def _one_epoch(crowd: Together, runs: list[Run | UserError], epoch: int) -> None:
    start = time.monotonic()
    losses, rights = crowd.epoch(epoch).tolist()  # waits for the device
    seconds = time.monotonic() - start
    crowd.give_back()
    scores = crowd.scores()
    share = (time.monotonic() - start) / len(runs)
    for number, (session, looked) in enumerate(zip(crowd.sessions, scores, strict=True)):
        run = runs[number]
        session.epoch, session.step = epoch + 1, (epoch + 1) * crowd.steps_per_epoch
        if not isinstance(run, Run):
            continue
        if not math.isfinite(losses[number] + looked.get("val_loss", 0.0)):
            runs[number] = UserError(broken("The loss became NaN or infinite", epoch + 1, session))
            continue
        told = {"train_loss": losses[number], "train_accuracy": rights[number]}
        row = training_row(session, session.epoch, told, seconds, len(runs)) | {"together": len(runs)}
        finish_epoch(session, run, row | looked, share)
        keep_on_the_way(session, run)
