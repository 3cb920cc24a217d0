"""A model <-> safetensors and config.json in a run's directory: enough to use it without the data."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.run.directory import Run
from vitascope.run.files import write_json, write_whole

LAST, BEST = "model.safetensors", "best.safetensors"
KEPT = "kept"  # a folder with copies from the way, where train.keep asks for them


@dataclass(frozen=True)
class ModelFacts:
    """What the weights alone do not say: sizes, class names, how images are prepared."""

    model: ModelConfig
    classes: list[str]
    preparation: Preparation
    stored: tuple[int, int, int]  # channels, rows, columns of an image before it is prepared


def save_facts(run: Run, facts: ModelFacts) -> None:
    write_json(run.file("config.json"), asdict(facts))


def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    write_whole(path, save({name: tensor.contiguous().cpu() for name, tensor in weights.items()}))


def read_facts(run: Run) -> ModelFacts:
    path = run.file("config.json")
    if not path.is_file():
        raise UserError(f"{run.path} has no config.json: the run never started. Start it: vitascope resume {run.path}")
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {item.name for item in fields(ModelConfig)}
        model = ModelConfig(**{name: value for name, value in said["model"].items() if name in known})
        how = said["preparation"]
        preparation = Preparation(tuple(how["size"]), tuple(how["mean"]), tuple(how["std"]))
        stored = tuple(said.get("stored", (model.in_chans, *model.image_shape)))
        return ModelFacts(model, said["classes"], preparation, stored)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not whole ({type(error).__name__}). Copy it back, or train again.") from error


def load_weights(model: nn.Module, run: Run, *, best: bool = False) -> None:
    """The last epoch's weights, or the best epoch's on validation images."""
    path = run.file(BEST if best else LAST)
    if not path.is_file():
        way = "It kept no best weights: data.validation was 0." if best else f"Go on with: vitascope resume {run.path}"
        raise UserError(f"{run.path} has no {path.name}. {way}")
    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise UserError(
            f"{path} does not fit its config.json, or is not whole: {str(error).splitlines()[0]}"
        ) from error
