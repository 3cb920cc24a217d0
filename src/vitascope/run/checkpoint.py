"""Save and load checkpoints (resume.pt): plain containers and tensors only."""

import io
import pickle
from typing import Any

import torch

from vitascope.errors import UserError
from vitascope.run.directory import Run
from vitascope.run.files import write_whole

MARK = "vitascope-resume-1"


def save_checkpoint(run: Run, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save({"mark": MARK} | state, buffer)
    write_whole(run.file("resume.pt"), buffer.getvalue())


def load_checkpoint(run: Run) -> dict[str, Any] | None:
    """Load the checkpoint; None if the run stopped before its first checkpoint, so it restarts from its seed."""
    path = run.file("resume.pt")
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, OSError, ValueError) as error:
        raise UserError(
            f"{path} is incomplete or not a Vitascope checkpoint. Nothing was changed. {_way_out(run)}"
        ) from error
    if not isinstance(state, dict) or state.get("mark") != MARK or "identity" not in state:
        raise UserError(f"{path} was not written by this version of Vitascope. Nothing was changed. {_way_out(run)}")
    return state


def _way_out(run: Run) -> str:
    return f"To restart the run from the beginning, move the file away and run: vitascope resume {run.path}"
