"""Read a timm network that is not a plain ViT, such as a CNN. It is not converted to Vitascope's model."""

from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.weights.files import (
    download_hub_repository,
    download_timm_model,
    read_float32_weights_and_extra_names,
)
from vitascope.weights.folders import (
    build_timm_from_config,
    find_weights_file,
    load_weights_into_timm_model,
    read_config_json_or_empty,
)
from vitascope.weights.model_info import (
    JsonObject,
    make_imagenet_or_numeric_class_names,
    match_or_average_channel_values,
)
from vitascope.weights.pretrained import PretrainedModel, convert_and_verify_timm_model, read_pretrained_model


class TimmNetwork(NamedTuple):
    """A network of timm in eval mode."""

    module: nn.Module
    preprocessing: Preprocessing
    classes: list[str]
    has_assumed_classes: bool  # no names are stored
    why_not_converted: str  # why Vitascope's model is not used


def read_pretrained_model_or_timm_network(model_ref: str) -> PretrainedModel | TimmNetwork:
    """Read what `read_pretrained_model` reads. A network of timm that is not a plain ViT is returned unchanged."""
    if model_ref.startswith("timm:"):
        timm_model = download_timm_model(model_ref.removeprefix("timm:"))
        try:
            return convert_and_verify_timm_model(model_ref, timm_model)
        except UserError as error:
            return make_timm_network_in_eval_mode(timm_model, None, str(error))
    try:
        return read_pretrained_model(model_ref)
    except UserError as error:
        is_repository = model_ref.startswith("hf:")
        folder = download_hub_repository(model_ref.removeprefix("hf:")) if is_repository else Path(model_ref)
        config_json = read_config_json_or_empty(folder.expanduser())
        if "architecture" not in config_json:  # timm's key
            raise
        return _read_timm_folder(folder.expanduser(), config_json, str(error))


def _read_timm_folder(folder: Path, config_json: JsonObject, why_not_converted: str) -> TimmNetwork:
    tensors = read_float32_weights_and_extra_names(find_weights_file(folder)).tensors
    timm_model = load_weights_into_timm_model(build_timm_from_config(config_json, folder), tensors, str(folder))
    return make_timm_network_in_eval_mode(timm_model, config_json.get("label_names"), why_not_converted)


def make_timm_network_in_eval_mode(
    timm_model: nn.Module, class_names: list[str] | None, why_not_converted: str
) -> TimmNetwork:
    """Read preprocessing and classes of a timm model. Channels and image size come from the network itself."""
    from timm.data.config import resolve_model_data_config

    data_config: JsonObject = resolve_model_data_config(timm_model)
    size = getattr(getattr(timm_model, "patch_embed", None), "img_size", None) or data_config["input_size"][1:]
    first_conv = next((part for part in timm_model.modules() if isinstance(part, nn.Conv2d)), None)
    channels = first_conv.in_channels if first_conv is not None else data_config["input_size"][0]
    mean, std = (match_or_average_channel_values(data_config[name], channels) for name in ("mean", "std"))
    num_classes = cast(Any, timm_model).num_classes
    if class_names is not None and len(class_names) == num_classes == len(set(class_names)):
        classes, has_assumed_classes = class_names, False
    else:
        classes, has_assumed_classes = make_imagenet_or_numeric_class_names(num_classes), True
    preprocessing = Preprocessing((int(size[0]), int(size[1])), mean, std)
    return TimmNetwork(timm_model.eval(), preprocessing, classes, has_assumed_classes, why_not_converted)
