"""Read a model folder (config.json and weights) written by Vitascope, timm or transformers."""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from vitascope.errors import JSON_ERRORS, UserError
from vitascope.model.config import check_and_convert_size
from vitascope.model.limits import MAX_SIDE
from vitascope.weights.files import read_float32_weights_and_extra_names, read_plain_timm_vit_metadata
from vitascope.weights.model_info import (
    JsonObject,
    ModelInfo,
    ModelSettings,
    Normalisation,
    StateDict,
    WeightsMetadata,
    parse_model_info,
)

TRANSFORMERS_MODEL_TYPES = ("vit", "deit", "dinov2", "dinov2_with_registers", "vit_mae", "vit_msn")
# Default norm_eps if config.json has none; for all other types it is 1e-12.
NORM_EPS_BY_MODEL_TYPE: dict[str, float] = dict.fromkeys(("dinov2", "dinov2_with_registers", "vit_msn"), 1e-6)
WEIGHTS_FILE_NAMES = ("model.safetensors", "pytorch_model.bin")


class FolderConfig(NamedTuple):
    metadata: ModelInfo | WeightsMetadata
    timm_model: nn.Module | None = None  # without the folder's weights; None if timm did not write the folder


ConfigReader = Callable[[JsonObject, Path], FolderConfig]


@dataclass(frozen=True)
class ModelFolder:
    tensors: StateDict
    metadata: ModelInfo | WeightsMetadata  # ModelInfo if Vitascope wrote the folder
    extra_names: list[str]  # tensors in the file that do not belong to the model
    timm_model: nn.Module | None = None  # without these weights; None if timm did not write the folder


def read_model_folder(folder: Path, weights_path: Path | None = None) -> ModelFolder:
    """Read config.json and the weights. `weights_path`: another weights file, such as a run's best.safetensors."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise UserError(f"{folder} has no config.json, so it is not a saved model. Give the path of the weights file.")
    try:
        config_json = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, *JSON_ERRORS) as error:
        raise UserError(f"{config_path} cannot be read ({type(error).__name__}).") from error
    if read_config := _find_config_reader(config_json):
        tensors, extra_names = read_float32_weights_and_extra_names(weights_path or get_weights_file(folder))
        metadata, timm_model = read_config(config_json, folder)
        return ModelFolder(tensors, metadata, extra_names, timm_model)
    raise UserError(
        f"{config_path} was not written by Vitascope, timm or transformers: it has none of the keys "
        f"{', '.join(CONFIG_READERS)}."
    )


def get_weights_file(folder: Path) -> Path:
    for name in WEIGHTS_FILE_NAMES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has no {' or '.join(WEIGHTS_FILE_NAMES)}.")


def is_model_folder(folder: Path) -> bool:
    """Return whether the folder has a config.json of Vitascope, timm or transformers."""
    return _find_config_reader(read_config_json_or_empty(folder)) is not None


def read_config_json_or_empty(folder: Path) -> JsonObject:
    """Return the contents of config.json; empty if it is missing or cannot be read."""
    try:
        config_json = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, *JSON_ERRORS):
        return {}
    return config_json if isinstance(config_json, dict) else {}


def _find_config_reader(config_json: Any) -> ConfigReader | None:
    return next(
        (read for key, read in CONFIG_READERS.items() if isinstance(config_json, dict) and key in config_json), None
    )


def _read_vitascope_config(config_json: JsonObject, folder: Path) -> FolderConfig:
    return FolderConfig(parse_model_info(config_json, str(folder / "config.json")))


def _read_config_and_build_timm(config_json: JsonObject, folder: Path) -> FolderConfig:
    timm_model = build_timm_from_config(config_json, folder, plain_vit_only=True)
    class_names = _parse_class_names(config_json.get("label_names"))
    metadata = replace(
        read_plain_timm_vit_metadata(timm_model), classes=class_names, stored=_parse_stored_shape(config_json)
    )
    return FolderConfig(metadata, timm_model)


def _read_transformers_config(config_json: JsonObject, folder: Path) -> FolderConfig:
    if config_json["model_type"] not in TRANSFORMERS_MODEL_TYPES:
        raise UserError(
            f"{folder} has model_type '{config_json['model_type']}'. Supported types: "
            f"{', '.join(TRANSFORMERS_MODEL_TYPES)}."
        )
    if config_json.get("hidden_act", "gelu") != "gelu" and not config_json.get("use_swiglu_ffn"):
        raise UserError(f"{folder}: hidden_act={config_json['hidden_act']} is not supported; only gelu is.")
    names = {"image_size": "img_size", "num_attention_heads": "num_heads"}
    settings: ModelSettings = {
        name: config_json[key] for key, name in names.items() if config_json.get(key) is not None
    }
    if "img_size" in settings:
        settings["img_size"] = check_and_convert_size("img_size", settings["img_size"])
    settings["norm_eps"] = config_json.get(
        "layer_norm_eps", NORM_EPS_BY_MODEL_TYPE.get(config_json["model_type"], 1e-12)
    )
    labels = config_json.get("id2label")
    class_names = _parse_class_names(
        [labels[key] for key in sorted(labels, key=_parse_class_index)] if isinstance(labels, dict) else None
    )
    normalisation = _try_to_read_normalisation(folder, config_json.get("num_channels", 3))
    mean, std = normalisation or (None, None)
    stored = _parse_stored_shape(config_json)
    return FolderConfig(WeightsMetadata(settings, class_names, mean, std, "transformers", stored))


def _parse_class_index(key: str) -> int:
    return int(key) if key.isdigit() else -1


def _parse_class_names(label_names: Any) -> list[str] | None:
    return [str(name) for name in label_names] if isinstance(label_names, list) and label_names else None


def _parse_stored_shape(config_json: JsonObject) -> tuple[int, int, int] | None:
    """Return channels, rows and columns of the training images, which Vitascope writes for other libraries' folders."""
    section = config_json.get("vitascope")
    shape = section.get("stored") if isinstance(section, dict) else None
    if not isinstance(shape, list) or len(shape) != 3 or not all(isinstance(side, int) and side > 0 for side in shape):
        return None
    return (shape[0], shape[1], shape[2])


def _try_to_read_normalisation(folder: Path, num_channels: int) -> Normalisation | None:
    """Read preprocessor_config.json of transformers; None if it is missing or incomplete."""
    try:
        processor_json = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        if processor_json.get("do_normalize") is False:
            return Normalisation((0.0,) * num_channels, (1.0,) * num_channels)
        mean, std = (tuple(map(float, processor_json[key])) for key in ("image_mean", "image_std"))
        return Normalisation(mean, std)
    except (OSError, *JSON_ERRORS, KeyError, TypeError, AttributeError):
        return None


# By a key that only this library's config.json has.
CONFIG_READERS: dict[str, ConfigReader] = {
    "preparation": _read_vitascope_config,
    "architecture": _read_config_and_build_timm,
    "model_type": _read_transformers_config,
}


PREPROCESSING_KEYS = ("mean", "std", "input_size")  # of pretrained_cfg, needed for predictions
# Parameters of timm's builders that download, open or wrap something; all others are settings of the network.
FORBIDDEN_MODEL_ARGS = (
    *("features_only", "out_indices", "pretrained_custom_load", "url", "file", "hf_hub_id", "device", "dtype"),
)


def build_timm_from_config(config_json: JsonObject, folder: Path, *, plain_vit_only: bool = False) -> nn.Module:
    """Build the network with timm. `plain_vit_only`: accept only settings of timm's VisionTransformer."""
    import timm

    config_path, name = folder / "config.json", config_json.get("architecture")
    if (
        not isinstance(name, str) or ":" in name or not timm.is_model(name)
    ):  # hf-hub:… and local-dir:… load other models
        raise UserError(f"{config_path}: timm has no architecture '{name}'. Use a name such as vit_tiny_patch16_224.")
    settings = _check_and_return_timm_model_args(config_json.get("model_args") or {}, config_path, plain_vit_only)
    try:
        preprocessing = _select_preprocessing_keys(config_json.get("pretrained_cfg") or {})
        settings = {"num_classes": config_json.get("num_classes", 1000)} | settings
        return timm.create_model(name, pretrained=False, pretrained_cfg_overlay=preprocessing, **settings)
    except Exception as error:  # the file can contain anything
        raise UserError(f"timm cannot build the model in {config_path} ({type(error).__name__}).") from error


def load_weights_into_timm_model(timm_model: nn.Module, tensors: StateDict, source_name: str) -> nn.Module:
    """Load the weights into the network, and return it in eval mode."""
    try:
        timm_model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(
            f"{source_name}: the weights do not fit {cast(Any, timm_model).pretrained_cfg['architecture']}."
        ) from error
    return timm_model.eval()


def _check_and_return_timm_model_args(model_args: Any, config_path: Path, plain_vit_only: bool) -> ModelSettings:
    from timm.models._builder import build_model_with_cfg
    from timm.models._factory import create_model
    from timm.models.vision_transformer import VisionTransformer

    builders = (create_model, build_model_with_cfg)
    forbidden = {name for builder in builders for name in inspect.signature(builder).parameters}
    forbidden |= set(FORBIDDEN_MODEL_ARGS)
    vit_settings = set(inspect.signature(VisionTransformer).parameters)
    if not isinstance(model_args, dict):
        raise UserError(f"{config_path}: model_args must map names to values.")
    for name, value in model_args.items():
        if name in forbidden or (plain_vit_only and name not in vit_settings) or not _is_plain_json_value(value):
            raise UserError(
                f"{config_path}: model_args may contain only plain settings of the network; {name} is not one."
            )
    return model_args


def _is_plain_json_value(value: Any) -> bool:
    """Return whether this is a setting of a network. Numbers that no network has would exhaust time or memory."""
    parts = value if isinstance(value, list) else [value]
    is_plain = all(part is None or isinstance(part, str | int | float) for part in parts)
    return is_plain and all(abs(part) <= MAX_SIDE for part in parts if isinstance(part, int | float))


def _select_preprocessing_keys(pretrained_cfg: JsonObject) -> JsonObject:
    return {name: tuple(pretrained_cfg[name]) for name in PREPROCESSING_KEYS if pretrained_cfg.get(name)}
