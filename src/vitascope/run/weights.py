"""Save and load a model: safetensors and config.json, enough to use it without the data."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from vitascope.errors import UserError, first_line
from vitascope.run.directory import Run, is_run, refuse_run
from vitascope.run.files import make_folder, write_json, write_whole
from vitascope.weights.facts import ModelFacts, facts_from

LAST, BEST = "model.safetensors", "best.safetensors"
KEPT = "kept"  # folder of the weight snapshots (train.weight_snapshots)


def save_facts(run: Run, facts: ModelFacts) -> None:
    write_json(run.file("config.json"), facts.as_dict())


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    write_whole(path, save({name: tensor.contiguous().cpu() for name, tensor in weights.items()}))


def save_folder(folder: Path, facts: ModelFacts, weights: dict[str, Tensor]) -> None:
    """Save a model folder for `weights=FOLDER`, `vitascope.load` and every command."""
    refuse_run(folder)
    make_folder(folder)
    write_json(folder / "config.json", facts.as_dict())
    save_weights(folder / LAST, weights)


def read_facts(run: Run) -> ModelFacts:
    path = run.file("config.json")
    if not path.is_file():
        raise UserError(
            f"{run.path} has no config.json: training never started. Start it with: vitascope resume {run.path}"
        )
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is incomplete ({type(error).__name__}). Restore the file, or train again.") from error
    return facts_from(said, str(path))


def load_weights(model: nn.Module, run: Run, *, best: bool = False) -> None:
    """Load the weights of the last epoch, or of the best epoch on validation images."""
    path = run.file(BEST if best else LAST)
    if not path.is_file():
        way = (
            "data.validation was 0, so no best epoch exists."
            if best
            else f"Resume it with: vitascope resume {run.path}"
        )
        raise UserError(f"{run.path} has no {path.name}. {way}{'' if best else _beside(run)}")
    load_file_into(model, path)


def _beside(run: Run) -> str:
    """Return a hint to the newest finished run of the same recipe."""
    ended = sorted(path.parent for path in run.path.resolve().parent.glob(f"*/{LAST}") if is_run(path.parent))
    return f", or use a finished run: {run.path.parent / ended[-1].name}" if ended else ""


def load_file_into(model: nn.Module, path: Path) -> None:
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} is incomplete or does not match its config.json: {first_line(error)}") from error
