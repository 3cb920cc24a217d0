"""Check that a checkpoint fits the training state before it is loaded: another version may have written it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitascope.errors import UserError, shorten_error_message
from vitascope.run.checkpoint import Checkpoint
from vitascope.run.directory import Run
from vitascope.run.stored_values import is_stored_hardware
from vitascope.training.hardware import Hardware
from vitascope.training.state import TrainState

KEYS_ADDED_LATER = {"epoch_seconds", "metric_sums"}  # checkpoints of older versions are always between two epochs


def read_checkpoint_hardware(run: Run, checkpoint: Checkpoint) -> Hardware:
    """Return the hardware that the checkpoint describes."""
    fields = checkpoint.get("hardware")
    try:
        if is_stored_hardware(fields):
            return Hardware(**fields)  # pyright: ignore[reportCallIssue]
        reason = "its description of the hardware is damaged"
    except TypeError as error:
        reason = f"its hardware: {shorten_error_message(error)}"
    raise make_unfit_checkpoint_error(run, reason)


def load_fitting_checkpoint(state: TrainState, run: Run, checkpoint: Checkpoint) -> None:
    """Load the checkpoint into the state. One that does not fit this version, or this run, is refused."""
    problem = _find_problem(state, checkpoint)
    if problem:
        raise make_unfit_checkpoint_error(run, problem)
    state.check_resumable_from(checkpoint)
    try:
        state.load_state_dict(checkpoint)
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise make_unfit_checkpoint_error(run, shorten_error_message(error)) from error


def make_unfit_checkpoint_error(run: Run, reason: str) -> UserError:
    return UserError(
        f"{run.get_path('resume.pt')} does not fit this version of Vitascope ({reason}). Nothing was changed. "
        f"To restart the run from the beginning, move the file away and run: vitascope resume {run.path}"
    )


def _find_problem(state: TrainState, checkpoint: Checkpoint) -> str | None:
    """Return what does not fit; None if nothing is found."""
    own = state.state_dict()
    if missing := sorted(own.keys() - checkpoint.keys() - KEYS_ADDED_LATER):
        return f"it has no '{missing[0]}'"
    if extra := sorted(map(str, checkpoint.keys() - own.keys() - {"mark"})):
        return f"'{extra[0]}' is unknown"
    for name, has_right_type in _TYPE_CHECKS.items():
        if name in checkpoint and not has_right_type(checkpoint[name]):
            return f"its '{name}' is damaged"
    if not 0 <= checkpoint["epoch"] <= state.recipe.train.epochs:
        return f"it has {checkpoint['epoch']} epochs, but the recipe {state.recipe.train.epochs}"
    if len(checkpoint["optimizers"]) != len(own["optimizers"]):
        return "it has another number of optimizers"
    return _find_tensor_problem(own, checkpoint)


def _find_tensor_problem(own: Checkpoint, checkpoint: Checkpoint) -> str | None:
    for name in ("model", "extra", "average"):
        if (own[name] is None) != (checkpoint[name] is None):
            return f"its '{name}' does not fit the recipe"
        if own[name] is not None and (problem := _find_difference(own[name], checkpoint[name])):
            return problem
    if checkpoint["best"] is not None and not _is_state_dict(checkpoint["best"]):
        return "its best weights are damaged"
    for optimizer in checkpoint["optimizers"]:
        values = optimizer["state"].values() if _has_optimizer_fields(optimizer) else [None]
        names = {tuple(sorted(map(str, value))) if isinstance(value, dict) else None for value in values}
        if None in names or len(names) > 1:
            return "its optimizer state is damaged"
    return None


def _find_difference(own: Any, saved: Any) -> str | None:
    """Return a tensor that is missing, unknown or of another shape."""
    if not isinstance(saved, dict):
        return "its weights are damaged"
    for name in own.keys() ^ saved.keys():
        return f"{name} is {'missing' if name in own else 'unknown'}"
    for name, value in own.items():
        if isinstance(value, Tensor) and getattr(saved[name], "shape", None) != value.shape:
            return f"{name} has another shape"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_generator_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, Tensor) for item in value.values())


def _has_optimizer_fields(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("state"), dict) and "param_groups" in value


_TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {
    "epoch": _is_count,
    "step": _is_count,
    "epoch_seconds": lambda value: isinstance(value, int | float),
    "metric_sums": lambda value: isinstance(value, dict),
    "best_epoch": _is_count,
    "best_accuracy": lambda value: isinstance(value, int | float),
    "identity": lambda value: isinstance(value, dict),
    "scaler": lambda value: isinstance(value, dict),
    "optimizers": lambda value: isinstance(value, list),
    "rng": _is_generator_state,
    "cuda_rng": lambda value: value is None or _is_generator_state(value),
}
