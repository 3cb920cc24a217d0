"""Read a model folder (config.json and weights) written by Vitascope, timm or transformers."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitascope.errors import UserError
from vitascope.model.config import check_size
from vitascope.weights.files import read_timm_metadata, read_weights_file
from vitascope.weights.model_info import ModelInfo, WeightsMetadata, parse_model_info

TRANSFORMERS_MODEL_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn")
# The norm's epsilon where config.json says none; all others' is 1e-12.
NORM_EPS_BY_MODEL_TYPE: dict[str, float] = dict.fromkeys(("dinov2", "dinov2_with_registers", "vit_msn"), 1e-6)
WEIGHTS_FILE_NAMES = ("model.safetensors", "pytorch_model.bin")
ConfigReader = Callable[[dict[str, Any], Path], tuple[ModelInfo | WeightsMetadata, Any]]


@dataclass(frozen=True)
class ModelFolder:
    tensors: dict[str, Tensor]
    metadata: ModelInfo | WeightsMetadata  # ours says everything
    extra_names: list[str]  # names in the file that are not of the model
    timm_model: Any = None  # timm's own network, without these weights, where timm wrote the folder


def read_model_folder(folder: Path, weights_path: Path | None = None) -> ModelFolder:
    """`file`: weights that are not the folder's usual ones, such as a run's best."""
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(f"{folder} has no config.json, so it is not a saved model. Give the path of the weights file.")
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{config} cannot be read ({type(error).__name__}).") from error
    if reading := _find_config_reader(said):
        tensors, beside = read_weights_file(weights_path or find_weights_file(folder))
        known, theirs = reading(said, folder)
        return ModelFolder(tensors, known, beside, theirs)
    raise UserError(
        f"{config} was not written by Vitascope, timm or transformers: it has none of the keys {', '.join(CONFIG_READERS)}."
    )


def find_weights_file(folder: Path) -> Path:
    for name in WEIGHTS_FILE_NAMES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has no {' or '.join(WEIGHTS_FILE_NAMES)}.")


def is_model_folder(folder: Path) -> bool:
    """Whether the folder has a config.json of Vitascope, timm or transformers."""
    return _find_config_reader(read_config_json(folder)) is not None


def read_config_json(folder: Path) -> dict[str, Any]:
    """The contents of config.json; empty if it is missing or cannot be read."""
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _find_config_reader(config_json: Any) -> ConfigReader | None:
    return next(
        (read for key, read in CONFIG_READERS.items() if isinstance(config_json, dict) and key in config_json), None
    )


def _read_vitascope_config(config_json: dict[str, Any], folder: Path) -> tuple[ModelInfo, None]:
    return parse_model_info(config_json, str(folder / "config.json")), None


def _read_timm_config(config_json: dict[str, Any], folder: Path) -> tuple[WeightsMetadata, Any]:
    theirs = build_timm_from_config(config_json, folder, plain_vit_only=True)
    known, names = read_timm_metadata(theirs), config_json.get("label_names")
    return WeightsMetadata(known.settings, _parse_class_names(names), known.mean, known.std, "timm"), theirs


def _read_transformers_config(config_json: dict[str, Any], folder: Path) -> tuple[WeightsMetadata, None]:
    if config_json["model_type"] not in TRANSFORMERS_MODEL_TYPES:
        raise UserError(
            f"{folder} has model_type '{config_json['model_type']}'. Supported types: {', '.join(TRANSFORMERS_MODEL_TYPES)}."
        )
    if config_json.get("hidden_act", "gelu") != "gelu" and not config_json.get("use_swiglu_ffn"):
        raise UserError(f"{folder}: hidden_act={config_json['hidden_act']} is not supported; only gelu is.")
    words = {"image_size": "img_size", "num_attention_heads": "num_heads"}
    settings = {ours: config_json[theirs] for theirs, ours in words.items() if config_json.get(theirs) is not None}
    if "img_size" in settings:
        settings["img_size"] = check_size("img_size", settings["img_size"])
    settings["norm_eps"] = config_json.get(
        "layer_norm_eps", NORM_EPS_BY_MODEL_TYPE.get(config_json["model_type"], 1e-12)
    )
    names = config_json.get("id2label")
    mean, std = _read_normalisation(folder, config_json.get("num_channels", 3))
    classes = _parse_class_names(
        [names[key] for key in sorted(names, key=_parse_class_index)] if isinstance(names, dict) else None
    )
    return WeightsMetadata(settings, classes, mean, std, "transformers"), None


def _parse_class_index(key: str) -> int:
    return int(key) if key.isdigit() else -1


def _parse_class_names(label_names: Any) -> list[str] | None:
    return [str(name) for name in label_names] if isinstance(label_names, list) and label_names else None


def _read_normalisation(folder: Path, num_channels: int) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """From preprocessor_config.json, where transformers keeps it."""
    try:
        said = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        if said.get("do_normalize") is False:
            return (0.0,) * num_channels, (1.0,) * num_channels
        return tuple(map(float, said["image_mean"])), tuple(map(float, said["image_std"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, None


# A key that only this library's config.json has -> how to read it.
CONFIG_READERS: dict[str, ConfigReader] = {
    "preparation": _read_vitascope_config,
    "architecture": _read_timm_config,
    "model_type": _read_transformers_config,
}


PREPROCESSING_KEYS = ("mean", "std", "input_size")  # of pretrained_cfg: what answering needs
# Parameters of timm's builders that fetch, open or wrap something; a network's own settings are all others.
FORBIDDEN_MODEL_ARGS = (
    "features_only",
    "out_indices",
    "pretrained_custom_load",
    "url",
    "file",
    "hf_hub_id",
    "device",
    "dtype",
)


def build_timm_from_config(config_json: dict[str, Any], folder: Path, *, plain_vit_only: bool = False) -> Any:
    """Build the network with timm. `plain`: accept only settings of timm's VisionTransformer."""
    import timm

    where, name = folder / "config.json", config_json.get("architecture")
    if not isinstance(name, str) or ":" in name or not timm.is_model(name):  # hf-hub:…, local-dir:… open other places
        raise UserError(f"{where}: timm has no architecture '{name}'. Use a name such as vit_tiny_patch16_224.")
    settings = _check_model_args(config_json.get("model_args") or {}, where, plain_vit_only)
    try:
        return timm.create_model(
            name, pretrained=False, pretrained_cfg_overlay=_select_preprocessing_keys(config_json.get("pretrained_cfg") or {}),
            **({"num_classes": config_json.get("num_classes", 1000)} | settings),
        )  # fmt: skip
    except Exception as error:  # a file can say anything
        raise UserError(f"timm cannot build the model in {where} ({type(error).__name__}).") from error


def load_timm_weights(timm_model: Any, tensors: dict[str, Any], source_name: str) -> Any:
    """Load the weights into the network."""
    try:
        timm_model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(
            f"{source_name}: the weights do not fit {timm_model.pretrained_cfg['architecture']}."
        ) from error
    return timm_model.eval()


def _check_model_args(model_args: Any, config_path: Path, plain_vit_only: bool) -> dict[str, Any]:
    from timm.models._builder import build_model_with_cfg
    from timm.models._factory import create_model
    from timm.models.vision_transformer import VisionTransformer

    own = {name for maker in (create_model, build_model_with_cfg) for name in inspect.signature(maker).parameters}
    own |= set(FORBIDDEN_MODEL_ARGS)
    known = set(inspect.signature(VisionTransformer).parameters)
    if not isinstance(model_args, dict):
        raise UserError(f"{config_path}: model_args must map names to values.")
    for name, value in model_args.items():
        if name in own or (plain_vit_only and name not in known) or not _is_plain_value(value):
            raise UserError(
                f"{config_path}: model_args may contain only plain settings of the network; {name} is not one."
            )
    return model_args


def _is_plain_value(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, str | int | float) for part in parts)


def _select_preprocessing_keys(pretrained_cfg: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(pretrained_cfg[name]) for name in PREPROCESSING_KEYS if pretrained_cfg.get(name)}
