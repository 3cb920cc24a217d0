"""A model <-> safetensors and config.json in a run's directory: enough to use it without the data."""

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
KEPT = "kept"  # a folder with copies from the way, where train.weight_snapshots asks for them


def save_facts(run: Run, facts: ModelFacts) -> None:
    write_json(run.file("config.json"), facts.as_dict())


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    write_whole(path, save({name: tensor.contiguous().cpu() for name, tensor in weights.items()}))


def save_folder(folder: Path, facts: ModelFacts, weights: dict[str, Tensor]) -> None:
    """What `weights=FOLDER`, `vitascope.load` and every verb take."""
    refuse_run(folder)
    make_folder(folder)
    write_json(folder / "config.json", facts.as_dict())
    save_weights(folder / LAST, weights)


def read_facts(run: Run) -> ModelFacts:
    path = run.file("config.json")
    if not path.is_file():
        raise UserError(f"{run.path} has no config.json: the run never started. Start it: vitascope resume {run.path}")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not whole ({type(error).__name__}). Copy it back, or train again.") from error
    return facts_from(said, str(path))


def load_weights(model: nn.Module, run: Run, *, best: bool = False) -> None:
    """The last epoch's weights, or the best epoch's on validation images."""
    path = run.file(BEST if best else LAST)
    if not path.is_file():
        way = "It kept no best weights: data.validation was 0." if best else f"Go on with: vitascope resume {run.path}"
        raise UserError(f"{run.path} has no {path.name}. {way}{'' if best else _beside(run)}")
    load_file_into(model, path)


def _beside(run: Run) -> str:
    """Who named the recipe's folder gets its newest run, and may have meant the newest that has ended."""
    ended = sorted(path.parent for path in run.path.resolve().parent.glob(f"*/{LAST}") if is_run(path.parent))
    return f", or take one that has ended: {run.path.parent / ended[-1].name}" if ended else ""


def load_file_into(model: nn.Module, path: Path) -> None:
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} does not fit its config.json, or is not whole: {first_line(error)}") from error
