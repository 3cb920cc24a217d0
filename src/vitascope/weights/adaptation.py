"""Adapt pretrained weights to other sizes and classes, and report the resampled, dropped and new weights."""

from dataclasses import dataclass, fields, replace
from os import PathLike, fspath
from typing import Any, NamedTuple

import torch

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError, format_count, suggest_choice
from vitascope.model.config import TOKEN_REDUCTION_SETTINGS, ModelConfig, Size
from vitascope.model.positions import resample_position_table
from vitascope.model.vit import VisionTransformer
from vitascope.weights.adaptation_report import (
    ADAPTABLE_SETTINGS,
    AdaptationReport,
    TensorChange,
    plan_adaptation_or_explain_refusal,
)
from vitascope.weights.model_info import (
    ModelInfo,
    ModelSettings,
    Normalisation,
    StateDict,
    has_placeholder_names,
    make_imagenet_or_numeric_class_names,
    match_or_average_channel_values,
)
from vitascope.weights.pretrained import (
    IMAGENET_CLASSES,
    PretrainedModel,
    build_eval_model,
    make_num_heads_override_warning,
    read_pretrained_model,
)
from vitascope.weights.resampling import (
    PatchFilters,
    compute_channel_adaptation_error,
    compute_patch_resampling_error,
    convert_filters_to_grayscale,
    resample_patch_filters,
    sum_or_repeat_filter_channels,
)

CLASSIFIER_WEIGHT_NAMES = ("head.weight", "head.bias")
NUM_LISTED_CLASSES = 2
SETTINGS_WITHOUT_WEIGHTS = tuple(
    item.name
    for item in fields(ModelConfig)
    if item.name.endswith(("drop_rate", "drop_path_rate"))
    or item.name in ("grad_checkpointing", *TOKEN_REDUCTION_SETTINGS)
)


@dataclass(frozen=True)
class AdaptedModel:
    info: ModelInfo
    weights: StateDict
    report: AdaptationReport

    def build_model(self) -> VisionTransformer:
        """Build the model with these weights, in eval mode."""
        return build_eval_model(self.info.model, self.weights)


def adapt(
    weights: PretrainedModel | str | PathLike[str],
    *,
    img_size: Size | None = None,
    patch_size: Size | None = None,
    in_chans: int | None = None,
    num_classes: int | None = None,
    classes: list[str] | None = None,
    keep_classifier: bool = True,
    seed: int = 0,
    **settings: Any,
) -> AdaptedModel:
    """Adapt pretrained weights to another image size, patch size, number of channels or classes.

    `weights`: opened weights, or what `weights=` accepts. `settings`: settings of ModelConfig without weights, such
    as drop rates. A new classifier is drawn from the seed if the number or the names (`classes`) of the classes differ,
    or with `keep_classifier=False`. A UserError is raised if there is only one patch, or if pixels would be ignored."""
    _check_settings_adaptable(settings)
    if not isinstance(weights, PretrainedModel):
        weights = read_pretrained_model(fspath(weights), num_heads=settings.pop("num_heads", None), img_size=img_size)
    count = _check_and_choose_num_classes(classes, num_classes)
    new: ModelSettings = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans, "num_classes": count}
    report = plan_adaptation_or_explain_refusal(weights, **new)
    if report.refused:
        raise UserError(report.refused)
    old_config = weights.info.model
    config = replace(old_config, **{name: value for name, value in new.items() if value is not None}, **settings)
    preprocessing = _make_adapted_preprocessing(weights.info.preparation, config)
    tensors, changes = _resample_weights_and_list_changes(weights, config, preprocessing)
    dropped, notes, reordered = keep_reorder_or_drop_classifier_in_place(
        tensors, weights, config.num_classes, classes, keep_classifier=keep_classifier
    )
    if config.num_heads != old_config.num_heads:
        notes = [*notes, make_num_heads_override_warning(config.num_heads, old_config.num_heads)]
    report = replace(report, dropped=[*weights.dropped_names, *dropped], notes=[*weights.notes, *notes])
    new_names = _add_missing_random_weights_in_place(tensors, config, seed)
    report = _add_changes_to_report(report, tensors, [*changes, *reordered], new_names)
    if dropped:  # the class names belong to the old classifier
        report = replace(report, assumed=[text for text in report.assumed if text != IMAGENET_CLASSES])
    return AdaptedModel(_make_adapted_model_info(weights, config, preprocessing, classes), tensors, report)


class ResampledWeights(NamedTuple):
    """Weights for other sizes, and the tensors that were changed."""

    weights: StateDict
    changes: list[TensorChange]


def _resample_weights_and_list_changes(
    pretrained: PretrainedModel, config: ModelConfig, preprocessing: Preprocessing
) -> ResampledWeights:
    """Return the weights for the sizes of `config`, and the changed tensors."""
    tensors, changes = dict(pretrained.weights), []
    _resample_patch_embedding_in_place(tensors, pretrained.info.model, config, changes)
    _convert_input_channels_in_place(tensors, config, pretrained.info.preparation, preprocessing, changes)
    _resample_positions_in_place(tensors, pretrained.info.model, config, changes)
    return ResampledWeights(tensors, changes)


def _add_changes_to_report(
    report: AdaptationReport, weights: StateDict, changes: list[TensorChange], new_names: list[str]
) -> AdaptationReport:
    num_unchanged = len(weights) - len({change.name for change in changes}) - len(new_names)
    return replace(report, resampled=changes, new=new_names, kept=num_unchanged)


def _check_and_choose_num_classes(class_names: list[str] | None, num_classes: int | None) -> int | None:
    if class_names is not None and num_classes not in (None, len(class_names)):
        raise UserError(f"num_classes={num_classes}, but {len(class_names)} classes are named. Leave num_classes out.")
    return num_classes if class_names is None else len(class_names)


def _check_settings_adaptable(settings: ModelSettings) -> None:
    supported = ("num_heads", *SETTINGS_WITHOUT_WEIGHTS)
    if unsupported := [name for name in settings if name not in supported]:
        hint = suggest_choice(unsupported[0], (*ADAPTABLE_SETTINGS, "classes", *supported))
        raise UserError(f"adapt cannot change {unsupported[0]}: the weights fix it. {hint}")


def _resample_patch_embedding_in_place(
    weights: StateDict, old_config: ModelConfig, new_config: ModelConfig, changes: list[TensorChange]
) -> None:
    if old_config.tokenizer != "patch":
        return  # plan_adaptation_or_explain_refusal refuses other patch sizes for this tokenizer
    name = "patch_embed.proj.weight"
    filters = weights[name]
    resized = resample_patch_filters(filters, new_config.patch_shape)
    if resized is not filters:
        method = "pseudo-inverse resampling (Beyer et al. 2023)"
        error = compute_patch_resampling_error(filters, resized)
        changes.append(TensorChange(name, list(filters.shape), list(resized.shape), method, error))
    weights[name] = resized


def _convert_input_channels_in_place(
    weights: StateDict,
    new_config: ModelConfig,
    old_preprocessing: Preprocessing,
    new_preprocessing: Preprocessing,
    changes: list[TensorChange],
) -> None:
    """Adapt the filters. For one channel, filters and bias absorb the mean and std of each colour channel."""
    old_channels, new_channels = len(old_preprocessing.mean), new_config.in_chans
    if old_channels == new_channels:
        return
    name, bias_name = "patch_embed.proj.weight", "patch_embed.proj.bias"
    filters, bias = weights[name], weights[bias_name]
    if new_channels == 1:
        method = "summed over the colour channels, corrected for mean and std; colour is lost"
        before = Normalisation(old_preprocessing.mean, old_preprocessing.std)
        after = Normalisation(new_preprocessing.mean, new_preprocessing.std)
        adapted = convert_filters_to_grayscale(filters, bias, before, after)
    else:
        method = f"channels repeated in order, scaled by {old_channels}/{new_channels}"
        adapted = PatchFilters(sum_or_repeat_filter_channels(filters, new_channels), bias)
    weights[name] = adapted.weight
    error = compute_channel_adaptation_error(filters, adapted.weight)
    changes.append(TensorChange(name, list(filters.shape), list(adapted.weight.shape), method, error))
    if not torch.equal(adapted.bias, bias):
        weights[bias_name] = adapted.bias
        method = "adjusted for the mean of each colour channel"
        changes.append(TensorChange(bias_name, list(bias.shape), list(bias.shape), method, 0.0))


def _resample_positions_in_place(
    weights: StateDict, old_config: ModelConfig, new_config: ModelConfig, changes: list[TensorChange]
) -> None:
    """Resample learned positions. The model computes fixed and rotary positions for the new grid itself."""
    table = weights.get("pos_embed")
    if table is None or old_config.grid == new_config.grid:
        return
    prefix = 0 if old_config.no_embed_class else old_config.num_prefix_tokens
    resampled = resample_position_table(table, old_config.grid, new_config.grid, prefix)
    restored = resample_position_table(resampled, new_config.grid, old_config.grid, prefix)[:, prefix:]
    error = ((restored - table[:, prefix:]).norm() / table[:, prefix:].norm()).item()
    method = "bicubic, antialiased" + (f"; {format_count(prefix, 'prefix token')} unchanged" if prefix else "")
    changes.append(TensorChange("pos_embed", list(table.shape), list(resampled.shape), method, error))
    weights["pos_embed"] = resampled


def _add_missing_random_weights_in_place(weights: StateDict, config: ModelConfig, seed: int) -> list[str]:
    """Add missing weights, drawn from the seed (a new classifier, parts that settings add); return their names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initial_weights = VisionTransformer(config).state_dict()
    added_names = [name for name in initial_weights if name not in weights]
    weights.update({name: initial_weights[name] for name in added_names})
    return added_names


def _make_adapted_preprocessing(preprocessing: Preprocessing, config: ModelConfig) -> Preprocessing:
    """Keep the normalisation. If the number of channels changes, use its mean over the channels."""
    mean, std = (
        match_or_average_channel_values(values, config.in_chans) for values in (preprocessing.mean, preprocessing.std)
    )
    return Preprocessing(config.image_shape, mean, std)


def _make_adapted_model_info(
    pretrained: PretrainedModel, config: ModelConfig, preprocessing: Preprocessing, class_names: list[str] | None
) -> ModelInfo:
    old_names = pretrained.info.classes
    if class_names is None:
        class_names = (
            old_names
            if config.num_classes == len(old_names)
            else make_imagenet_or_numeric_class_names(config.num_classes)
        )
    return ModelInfo(config, class_names, preprocessing, (config.in_chans, *config.image_shape), pretrained.info.probe)


class ClassifierChange(NamedTuple):
    """What happened to the classifier; all empty if it is unchanged."""

    dropped_names: list[str]  # removed from the weights
    notes: list[str]  # for the user
    changes: list[TensorChange]  # reordered weights


def keep_reorder_or_drop_classifier_in_place(
    weights: StateDict,
    pretrained: PretrainedModel,
    num_classes: int,
    class_names: list[str] | None,
    *,
    keep_classifier: bool = True,
) -> ClassifierChange:
    """Drop the classifier from `weights` if it does not fit the classes, or reorder its rows, in place.

    `class_names`: the data's class names, None if they are unknown."""
    old_names, old_num_classes = pretrained.info.classes, pretrained.info.model.num_classes
    if not keep_classifier:
        reason = "it is a linear probe" if pretrained.info.probe else "keep_classifier=False"
        return _drop_classifier_in_place(weights, reason)
    if old_num_classes != num_classes:
        verb = "replaced" if num_classes else "removed"
        return _drop_classifier_in_place(
            weights, f"the weights have {old_num_classes} classes, not {num_classes}", verb
        )
    if not old_num_classes or class_names is None:
        return ClassifierChange([], [], [])
    if pretrained.library != "vitascope" and has_placeholder_names(old_names):
        note = "the classifier was kept; its classes have no names, so the order of the data's classes is assumed"
        return ClassifierChange([], [note], [])
    if set(old_names) != set(class_names):
        return _drop_classifier_in_place(
            weights,
            f"the weights' classes are {_join_first_names(old_names)}; the data's are {_join_first_names(class_names)}",
        )
    changes: list[TensorChange] = []
    if old_names != class_names:
        row_order = [old_names.index(name) for name in class_names]
        for name in CLASSIFIER_WEIGHT_NAMES:
            shape = list(weights[name].shape)
            changes.append(TensorChange(name, shape, shape, "rows reordered to match the data's classes", 0.0))
            weights[name] = weights[name][row_order]
    return ClassifierChange([], [], changes)


def _drop_classifier_in_place(weights: StateDict, reason: str, verb: str = "replaced") -> ClassifierChange:
    names = [name for name in CLASSIFIER_WEIGHT_NAMES if weights.pop(name, None) is not None]
    return ClassifierChange(names, [f"head {verb}: {reason}"] if names else [], [])


def _join_first_names(class_names: list[str]) -> str:
    return ", ".join(class_names[:NUM_LISTED_CLASSES]) + (", …" if len(class_names) > NUM_LISTED_CLASSES else "")
