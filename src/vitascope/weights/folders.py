"""A folder with config.json and weights, as Vitascope, timm or transformers write it -> tensors and what is known."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitascope.errors import UserError
from vitascope.weights.facts import ModelFacts, facts_from
from vitascope.weights.files import read_tensors
from vitascope.weights.known import Known
from vitascope.weights.online import known_of_timm

TRANSFORMERS = ("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn")
FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Found:
    tensors: dict[str, Tensor]
    known: ModelFacts | Known  # ours says everything


def read_folder(path: Path) -> Found:
    config = path / "config.json"
    if not config.is_file():
        raise UserError(f"{path} has no config.json, so it is no saved model. Name the weights file itself.")
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{config} cannot be read ({type(error).__name__}).") from error
    tensors = read_tensors(weights_file(path))
    for key, reading in READERS.items():
        if isinstance(said, dict) and key in said:
            return Found(tensors, reading(said, path))
    raise UserError(f"{config} is neither Vitascope's nor timm's nor transformers': it has no {', '.join(READERS)}.")


def weights_file(path: Path) -> Path:
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise UserError(f"{path} has no {' or '.join(FILES)}.")


def _ours(said: dict[str, Any], path: Path) -> ModelFacts:
    return facts_from(said, str(path / "config.json"))


def _timm(said: dict[str, Any], path: Path) -> Known:
    known = known_of_timm(build_timm(said, path))
    return Known(known.settings, said.get("label_names"), known.mean, known.std, "timm")


def build_timm(said: dict[str, Any], path: Path) -> Any:
    """timm builds the network that the config names, so that it says its sizes itself; its weights are random."""
    import timm

    told = said.get("pretrained_cfg", {})
    kept = ("mean", "std", "input_size")
    try:
        return timm.create_model(
            said["architecture"], pretrained=False, num_classes=said.get("num_classes", 1000),
            pretrained_cfg_overlay={name: told[name] for name in kept if name in told},
            **said.get("model_args", {}),
        )  # fmt: skip
    except Exception as error:  # a file can say anything
        raise UserError(f"timm cannot build what {path / 'config.json'} says ({type(error).__name__}).") from error


def _transformers(said: dict[str, Any], path: Path) -> Known:
    if said["model_type"] not in TRANSFORMERS:
        raise UserError(f"{path} holds a '{said['model_type']}'. Plain ViTs can be read: {', '.join(TRANSFORMERS)}.")
    if said.get("hidden_act", "gelu") != "gelu" and not said.get("use_swiglu_ffn"):
        raise UserError(f"{path}: hidden_act={said['hidden_act']}; ours is gelu.")
    size = said.get("image_size", 224)
    settings = {
        "img_size": size if isinstance(size, int) else tuple(size),
        "num_heads": said.get("num_attention_heads", 12),
        "norm_eps": said.get("layer_norm_eps", 1e-12),
    }
    names = said.get("id2label") or {}
    classes = [str(names[key]) for key in sorted(names, key=int)] if names else None
    mean, std = _normalisation(path)
    return Known(settings, classes, mean, std, "transformers")


def _normalisation(path: Path) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """From preprocessor_config.json, where transformers keeps it."""
    try:
        said = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
        return tuple(map(float, said["image_mean"])), tuple(map(float, said["image_std"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


# A key that only this library's config.json has -> how to read it.
READERS = {"preparation": _ours, "architecture": _timm, "model_type": _transformers}
