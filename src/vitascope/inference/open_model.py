"""Open a trained model by its name: a run, a weights file, a folder, timm:NAME, hf:REPO or bundled:NAME.

A timm network that is not a plain ViT, such as a CNN, is opened too. It is not converted to Vitascope's model.
"""

import os
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError
from vitascope.inference.classifier import Classifier
from vitascope.inference.fast import choose_fast_or_float32_inference
from vitascope.inference.hardware import choose_or_check_device
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.run.checkpoint import (
    check_run_weights_are_large_enough,
    load_run_weights_into_model,
    read_model_info,
)
from vitascope.run.directory import make_run_for_external_weights, open_run_or_newest
from vitascope.weights.files import (
    WEIGHTS_SUFFIXES,
    download_hub_repository,
    download_timm_model,
    read_float32_weights_and_extra_names,
)
from vitascope.weights.folders import (
    build_timm_from_config,
    get_weights_file,
    load_weights_into_timm_model,
    read_config_json_or_empty,
)
from vitascope.weights.model_info import (
    JsonObject,
    make_imagenet_or_numeric_class_names,
    match_or_average_channel_values,
)
from vitascope.weights.pretrained import (
    ACCEPTED_WEIGHTS_HELP,
    IMAGENET_CLASSES,
    MODEL_PREFIXES,
    PretrainedModel,
    convert_and_verify_timm_model,
    read_pretrained_model,
)

_OPEN_LOCK = Lock()  # building a model draws from PyTorch's global generator, which is restored


class TimmNetwork(NamedTuple):
    """A network of timm in eval mode."""

    module: nn.Module
    preprocessing: Preprocessing
    classes: list[str]
    has_assumed_classes: bool  # no names are stored
    why_not_converted: str  # why Vitascope's model is not used


def open_model(
    name: str | os.PathLike[str],
    *,
    best: bool = False,
    device: str = "cpu",
    fast: bool = False,
    merge_tokens: int | None = None,
    drop_tokens: int | None = None,
) -> Classifier:
    """Open a trained model: a run, timm:NAME, hf:REPO, bundled:NAME, a weights file, or a folder with config.json.

    `best`: a run's best epoch on validation images instead of the last.
    `fast`: on a GPU compiled, in bfloat16, with CUDA graphs; the first predictions take a while. On a CPU int8 or
    bfloat16, if measured to be faster with an accuracy loss of at most 0.2 percentage points.
    `classifier.fast.description` says which.
    `merge_tokens`, `drop_tokens`: tokens to merge or drop in each block, instead of the run's own setting.
    """
    device = choose_or_check_device(device)
    model_ref = os.fspath(name)
    with _OPEN_LOCK, torch.random.fork_rng(devices=[]):
        open_any = _open_external_weights if refers_to_external_weights(model_ref) else _open_run
        classifier = open_any(model_ref, best)
        if merge_tokens is not None or drop_tokens is not None:
            classifier = classifier.with_token_reduction(merge_tokens=merge_tokens, drop_tokens=drop_tokens)
            _check_num_removed_tokens(classifier)
        classifier.model.to(device)
        return _add_fast_inference(classifier) if fast else classifier


load = from_pretrained = open_model


def refers_to_external_weights(model_ref: str) -> bool:
    """Whether this names external weights (a name, a file, or a folder that is not a run)."""
    path = Path(model_ref).expanduser()
    return (
        model_ref.startswith(MODEL_PREFIXES)
        or path.suffix in WEIGHTS_SUFFIXES
        or ((path / "config.json").is_file() and not (path / "recipe.yaml").exists())
    )


def _open_run(path: str, best: bool) -> Classifier:
    if not Path(path).exists():
        raise UserError(f"There is no run {path}, and no weights of this name. {ACCEPTED_WEIGHTS_HELP}")
    run = open_run_or_newest(path)
    info = read_model_info(run)
    check_run_weights_are_large_enough(run, info.model, use_best_epoch=best)
    model = VisionTransformer(info.model)
    load_run_weights_into_model(model, run, use_best_epoch=best)
    return Classifier(
        _set_eval_mode_and_freeze(model),
        run,
        info.classes,
        info.preparation,
        info.stored,
        weights_label="best" if best else "last",
        is_linear_probe=info.probe,
    )


def _open_external_weights(model_ref: str, best: bool) -> Classifier:
    if best:
        raise UserError(f"{model_ref} has only one set of weights. Omit --best, which works only for runs.")
    model = read_pretrained_model_or_timm_network(model_ref)
    return (
        _make_classifier_from_timm_network(model_ref, model)
        if isinstance(model, TimmNetwork)
        else _make_classifier_from_pretrained(model_ref, model)
    )


def _make_classifier_from_pretrained(model_ref: str, pretrained: PretrainedModel) -> Classifier:
    info, notes = pretrained.info, pretrained.user_messages
    if pretrained.library != "vitascope" and not info.is_resized_again:  # else the folder says how
        size = "×".join(str(side) for side in dict.fromkeys(info.preparation.size))
        crop_note = f"assumed crop_pct=1.0 (images resized to {size} and centre-cropped)"
        notes.insert(len(pretrained.assumptions), crop_note)
    return Classifier(
        _set_eval_mode_and_freeze(pretrained.build_model()),
        make_run_for_external_weights(model_ref, info.model),
        info.classes,
        info.preparation,
        info.stored,
        notes=tuple(notes),
        is_linear_probe=info.probe,
        has_assumed_classes=IMAGENET_CLASSES in pretrained.assumptions,
    )


def _make_classifier_from_timm_network(model_ref: str, network: TimmNetwork) -> Classifier:
    preprocessing = network.preprocessing
    return Classifier(
        _set_eval_mode_and_freeze(network.module),
        make_run_for_external_weights(model_ref, ModelConfig()),
        network.classes,
        preprocessing,
        (len(preprocessing.mean), *preprocessing.size),
        notes=(f"timm's own network is used: {network.why_not_converted}",),
        has_assumed_classes=network.has_assumed_classes,
    )


def _set_eval_mode_and_freeze(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def _add_fast_inference(classifier: Classifier) -> Classifier:
    fast = choose_fast_or_float32_inference(classifier.vision_transformer, classifier.run, classifier.info)
    return replace(classifier, fast=fast)


def _check_num_removed_tokens(classifier: Classifier) -> None:
    """Raise a UserError if a block cannot merge or drop so many tokens."""
    if not classifier.token_reduction_description:
        return
    config = classifier.config
    for name, count in config.token_reduction.items():
        if count > (max_count := config.num_removed_per_block[0]):
            verb = "merge" if name == "merge_tokens" else "drop"
            raise UserError(
                f"{name}={count} is too large: the model has {config.num_patches} patches, and a block can {verb} at "
                f"most {max_count} of them."
            )


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
    tensors = read_float32_weights_and_extra_names(get_weights_file(folder)).tensors
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
