"""Read a model folder (config.json and weights) written by Vitascope, timm or transformers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitascope.errors import UserError
from vitascope.model.config import check_size
from vitascope.weights.building import build_timm
from vitascope.weights.facts import ModelFacts, facts_from
from vitascope.weights.files import read_tensors
from vitascope.weights.known import Known
from vitascope.weights.online import known_of_timm

TRANSFORMERS = ("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn")
# The norm's epsilon where config.json says none; all others' is 1e-12.
EPS_OF: dict[str, float] = dict.fromkeys(("dinov2", "dinov2_with_registers", "vit_msn"), 1e-6)
FILES = ("model.safetensors", "pytorch_model.bin")
Reader = Callable[[dict[str, Any], Path], tuple[ModelFacts | Known, Any]]


@dataclass(frozen=True)
class Found:
    tensors: dict[str, Tensor]
    known: ModelFacts | Known  # ours says everything
    beside: list[str]  # names in the file that are not of the model
    theirs: Any = None  # timm's own network, without these weights, where timm wrote the folder


def read_folder(path: Path, file: Path | None = None) -> Found:
    """`file`: weights that are not the folder's usual ones, such as a run's best."""
    config = path / "config.json"
    if not config.is_file():
        raise UserError(f"{path} has no config.json, so it is not a saved model. Give the path of the weights file.")
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{config} cannot be read ({type(error).__name__}).") from error
    if reading := _reader(said):
        tensors, beside = read_tensors(file or weights_file(path))
        known, theirs = reading(said, path)
        return Found(tensors, known, beside, theirs)
    raise UserError(
        f"{config} was not written by Vitascope, timm or transformers: it has none of the keys {', '.join(READERS)}."
    )


def weights_file(path: Path) -> Path:
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise UserError(f"{path} has no {' or '.join(FILES)}.")


def readable(path: Path) -> bool:
    """Whether the folder has a config.json of Vitascope, timm or transformers."""
    return _reader(config_of_folder(path)) is not None


def config_of_folder(path: Path) -> dict[str, Any]:
    """The contents of config.json; empty if it is missing or cannot be read."""
    try:
        said = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _reader(said: Any) -> Reader | None:
    return next((read for key, read in READERS.items() if isinstance(said, dict) and key in said), None)


def _ours(said: dict[str, Any], path: Path) -> tuple[ModelFacts, None]:
    return facts_from(said, str(path / "config.json")), None


def _timm(said: dict[str, Any], path: Path) -> tuple[Known, Any]:
    theirs = build_timm(said, path, plain=True)
    known, names = known_of_timm(theirs), said.get("label_names")
    return Known(known.settings, _words(names), known.mean, known.std, "timm"), theirs


def _transformers(said: dict[str, Any], path: Path) -> tuple[Known, None]:
    if said["model_type"] not in TRANSFORMERS:
        raise UserError(f"{path} has model_type '{said['model_type']}'. Supported types: {', '.join(TRANSFORMERS)}.")
    if said.get("hidden_act", "gelu") != "gelu" and not said.get("use_swiglu_ffn"):
        raise UserError(f"{path}: hidden_act={said['hidden_act']} is not supported; only gelu is.")
    words = {"image_size": "img_size", "num_attention_heads": "num_heads"}
    settings = {ours: said[theirs] for theirs, ours in words.items() if said.get(theirs) is not None}
    if "img_size" in settings:
        settings["img_size"] = check_size("img_size", settings["img_size"])
    settings["norm_eps"] = said.get("layer_norm_eps", EPS_OF.get(said["model_type"], 1e-12))
    names = said.get("id2label")
    mean, std = _normalisation(path, said.get("num_channels", 3))
    classes = _words([names[key] for key in sorted(names, key=_number)] if isinstance(names, dict) else None)
    return Known(settings, classes, mean, std, "transformers"), None


def _number(key: str) -> int:
    return int(key) if key.isdigit() else -1


def _words(names: Any) -> list[str] | None:
    return [str(name) for name in names] if isinstance(names, list) and names else None


def _normalisation(path: Path, channels: int) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """From preprocessor_config.json, where transformers keeps it."""
    try:
        said = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
        if said.get("do_normalize") is False:
            return (0.0,) * channels, (1.0,) * channels
        return tuple(map(float, said["image_mean"])), tuple(map(float, said["image_std"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, None


# A key that only this library's config.json has -> how to read it.
READERS: dict[str, Reader] = {"preparation": _ours, "architecture": _timm, "model_type": _transformers}
