"""Open any trained classifier: Vitascope's models and every network of timm, including convolutional ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitascope.data.preparation import Preparation
from vitascope.weights.building import build_timm, fill_timm
from vitascope.weights.files import read_tensors
from vitascope.weights.folders import config_of_folder, weights_file
from vitascope.weights.known import for_channels
from vitascope.weights.online import fetch_repository, fetch_timm
from vitascope.weights.pretrained import open_weights


@dataclass(frozen=True)
class AnyModel:
    """In eval mode. `classes`: their names, None where only their number is known."""

    module: nn.Module
    preparation: Preparation
    num_classes: int
    classes: list[str] | None


def open_any(word: str) -> AnyModel:
    """`timm:NAME` and folders that timm saved go through timm; everything else is what `weights=` takes."""
    if word.startswith("timm:"):
        return of_timm(fetch_timm(word.removeprefix("timm:")), None)
    path = fetch_repository(word.removeprefix("hf:")) if word.startswith("hf:") else Path(word).expanduser()
    said = config_of_folder(path)  # `open_weights` reports what is wrong with it
    if "architecture" in said:
        model = fill_timm(build_timm(said, path), read_tensors(weights_file(path))[0], str(path))
        return of_timm(model, said.get("label_names"))
    found = open_weights(word)
    return AnyModel(found.model(), found.facts.preparation, found.facts.model.num_classes, found.facts.classes)


def of_timm(model: Any, classes: list[str] | None) -> AnyModel:
    """Read preparation and classes of a timm model. Channels and image size come from the network itself."""
    from timm.data.config import resolve_model_data_config

    said: dict[str, Any] = resolve_model_data_config(model)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or said["input_size"][1:]
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    channels = first.in_channels if first is not None else said["input_size"][0]
    mean, std = (for_channels(said[name], channels) for name in ("mean", "std"))
    usable = classes is not None and len(classes) == model.num_classes == len(set(classes))
    preparation = Preparation((int(size[0]), int(size[1])), mean, std)
    return AnyModel(model.eval(), preparation, model.num_classes, classes if usable else None)
