"""Adapt pretrained weights to other sizes and classes, and report what was resampled, removed and newly initialised."""

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from vitascope.data.preprocessing import Preprocessing
from vitascope.errors import UserError, format_count, suggest_choice
from vitascope.model.anatomy import list_stages
from vitascope.model.config import TOKEN_REDUCTION_SETTINGS, ModelConfig, Size, as_pair, check_size
from vitascope.model.positions import resample_position_table
from vitascope.model.vit import VisionTransformer
from vitascope.weights.model_info import ModelInfo, has_placeholder_names, make_class_names, match_channel_count
from vitascope.weights.pretrained import IMAGENET_CLASSES, PretrainedModel, build_eval_model, open_weights
from vitascope.weights.resampling import (
    AdaptationReport,
    TensorChange,
    adapt_filter_channels,
    compute_channel_error,
    compute_patch_resampling_error,
    convert_filters_to_grayscale,
    resample_patch_filters,
)

SETTINGS_WITHOUT_WEIGHTS = tuple(
    item.name
    for item in fields(ModelConfig)
    if item.name.endswith(("drop_rate", "drop_path_rate"))
    or item.name in ("grad_checkpointing", *TOKEN_REDUCTION_SETTINGS)
)
ADAPTABLE_SETTINGS = ("img_size", "patch_size", "in_chans", "num_classes")


@dataclass(frozen=True)
class AdaptedModel:
    info: ModelInfo
    weights: dict[str, Tensor]
    report: AdaptationReport

    def build_model(self) -> VisionTransformer:
        """The model with these weights, in eval mode."""
        return build_eval_model(self.info.model, self.weights)


def adapt(
    weights: PretrainedModel | str | os.PathLike[str],
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
    _check_adaptable(settings)
    found = weights
    if not isinstance(found, PretrainedModel):
        found = open_weights(os.fspath(found), num_heads=settings.pop("num_heads", None), img_size=img_size)
    count = _resolve_num_classes(classes, num_classes)
    asked = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans, "num_classes": count}
    report = plan_adaptation(found, **asked)
    if report.refused:
        raise UserError(report.refused)
    old = found.info.model
    config = replace(old, **{name: value for name, value in asked.items() if value is not None}, **settings)
    preparation = _adapt_preprocessing(found.info.preparation, config)
    tensors, changes = dict(found.weights), []
    _resample_patch_embedding(tensors, old, config, changes)
    _adapt_input_channels(tensors, config, found.info.preparation, preparation, changes)
    _resample_positions(tensors, old, config, changes)
    dropped, notes = fit_classifier(
        tensors, found, config.num_classes, classes, changes, keep_classifier=keep_classifier
    )
    new = _add_missing_weights(tensors, config, seed)
    kept = len(tensors) - len({change.name for change in changes}) - len(new)
    # Class names belong to the old classifier.
    assumed = [text for text in found.assumptions if text != IMAGENET_CLASSES or not dropped]
    told = {"dropped": [*found.dropped_names, *dropped], "notes": [*found.notes, *notes], "kept": kept}
    report = replace(report, resampled=changes, new=new, assumed=assumed, **told)
    return AdaptedModel(_adapt_model_info(found, config, preparation, classes), tensors, report)


def _resolve_num_classes(class_names: list[str] | None, num_classes: int | None) -> int | None:
    if class_names is not None and num_classes not in (None, len(class_names)):
        raise UserError(f"num_classes={num_classes}, but {len(class_names)} classes are named. Leave num_classes out.")
    return num_classes if class_names is None else len(class_names)


def _check_adaptable(settings: dict[str, Any]) -> None:
    known = ("num_heads", *SETTINGS_WITHOUT_WEIGHTS)
    if strange := [name for name in settings if name not in known]:
        near = suggest_choice(strange[0], (*ADAPTABLE_SETTINGS, "classes", *known))
        raise UserError(f"adapt cannot change {strange[0]}: the weights fix it. {near}")


def plan_adaptation(pretrained: PretrainedModel, **requested: Any) -> AdaptationReport:
    """The report before the adaptation. `refused` is the reason if the adaptation is not possible."""
    old = pretrained.info.model
    for name in ("img_size", "patch_size"):
        if requested.get(name) is not None:
            requested[name] = check_size(name, requested[name])
    wanted: dict[str, Any] = {
        name: getattr(old, name) if requested.get(name) is None else requested[name] for name in ADAPTABLE_SETTINGS
    }
    (height, width), (rows, columns) = as_pair(wanted["img_size"]), as_pair(wanted["patch_size"])
    grid = (height // rows, width // columns)
    seen = grid[0] * rows * grid[1] * columns / (height * width)
    tokens = old.num_prefix_tokens + grid[0] * grid[1]
    refused = _find_refusal_reason(old, wanted, grid, seen)
    # If the patches do not fill the image, count the FLOPs of the patches that fit.
    whole = replace(old, **(wanted | {"img_size": (max(grid[0], 1) * rows, max(grid[1], 1) * columns)}))
    flops, before = count_flops_per_image(whole), count_flops_per_image(old)
    return AdaptationReport(
        weights=pretrained.name,
        library=pretrained.library,
        settings={name: value for name, value in requested.items() if value is not None},
        image_before=list(old.image_shape),
        image_after=[height, width],
        patch_before=list(old.patch_shape),
        patch_after=[rows, columns],
        grid_before=list(old.grid),
        grid_after=list(grid),
        tokens_before=old.num_tokens,
        tokens_after=tokens,
        pixels_seen=seen,
        flops_before=before,
        flops_after=flops,
        assumed=pretrained.assumptions,
        notes=pretrained.notes,
        dropped=pretrained.dropped_names,
        alternative=_estimate_upscaling_cost(old, wanted, flops),
        refused=refused,
    )


def count_flops_per_image(config: ModelConfig) -> int:
    """FLOPs of the forward pass of one image."""
    return sum(stage.flops for stage in list_stages(config))


def _find_refusal_reason(
    old_config: ModelConfig, new_settings: dict[str, Any], new_grid: tuple[int, int], pixel_coverage: float
) -> str | None:
    size, patch = new_settings["img_size"], new_settings["patch_size"]
    moved = [name for name in ("patch_size", "in_chans") if new_settings[name] != getattr(old_config, name)]
    if moved and old_config.tokenizer != "patch":
        return f"{moved[0]} cannot be changed with tokenizer={old_config.tokenizer}. Only tokenizer=patch can be resampled."
    if new_grid[0] * new_grid[1] > 1 and pixel_coverage == 1:
        return None
    what = f"With img_size={_format_size(size)} and patch_size={_format_size(patch)}, "
    if new_grid[0] * new_grid[1] == 0:
        what += "the image is smaller than one patch"
    elif new_grid[0] * new_grid[1] == 1:
        covered = f" ({pixel_coverage:.1%} of the pixels)" if pixel_coverage < 1 else ""
        what += f"there is only one patch{covered}, so attention has no effect"
    else:
        what += f"{1 - pixel_coverage:.1%} of the pixels would be ignored"
    return f"{what}. Choose {_choices(old_config, size)}."


def _choices(old: ModelConfig, size: Size) -> str:
    """Settings that work: patch sizes for this image size, or the weights' own sizes."""
    height, width = as_pair(size)
    good = [side for side in range(2, min(height, width) // 2 + 1) if height % side == 0 and width % side == 0]
    good = [side for side in good if (height // side) * (width // side) <= 4 * max(old.num_patches, 64)]
    found = [f"patch_size={side} (grid {height // side}×{width // side})" for side in good[:4]]
    own = f"patch_size={_format_size(old.patch_size)}"
    if (height, width) != old.image_shape:
        larger = old.image_shape[0] > height or old.image_shape[1] > width
        up = " (upscales the images)" if larger else ""
        found.append(f"img_size={_format_size(old.img_size)} with {own}{up}")
    elif old.patch_size not in good[:4]:
        found.append(f"{own} (grid {old.grid[0]}×{old.grid[1]})")
    return ", or ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def _estimate_upscaling_cost(
    old_config: ModelConfig, new_settings: dict[str, Any], adapted_flops: int
) -> dict[str, Any]:
    """Cost of the alternative: keep the model's image and patch size, and upscale the images."""
    kept = replace(old_config, in_chans=new_settings["in_chans"], num_classes=new_settings["num_classes"])
    (height, width), (rows, columns) = old_config.image_shape, as_pair(new_settings["img_size"])
    if height <= rows and width <= columns:
        return {}
    up = count_flops_per_image(kept)
    return {
        "settings": {"img_size": old_config.img_size, "patch_size": old_config.patch_size},
        "grid": list(old_config.grid),
        "tokens": old_config.num_tokens,
        "flops": up,
        "times_flops": round(up / adapted_flops, 2),
        "converts_channels": old_config.in_chans != new_settings["in_chans"],
    }


def _resample_patch_embedding(
    weights: dict[str, Tensor], old_config: ModelConfig, new_config: ModelConfig, changes: list[TensorChange]
) -> None:
    if old_config.tokenizer != "patch":
        return  # `_refusal` ensures that nothing changes
    name = "patch_embed.proj.weight"
    filters = weights[name]
    resized = resample_patch_filters(filters, new_config.patch_shape)
    if resized is not filters:
        how = "pseudo-inverse resampling (Beyer et al. 2023)"
        changes.append(
            TensorChange(
                name, list(filters.shape), list(resized.shape), how, compute_patch_resampling_error(filters, resized)
            )
        )
    weights[name] = resized


def _adapt_input_channels(
    weights: dict[str, Tensor],
    new_config: ModelConfig,
    old_preprocessing: Preprocessing,
    new_preprocessing: Preprocessing,
    changes: list[TensorChange],
) -> None:
    """For one channel, filters and bias absorb the mean and standard deviation of each colour channel."""
    old = len(old_preprocessing.mean)
    if old == new_config.in_chans:
        return
    name, beside = "patch_embed.proj.weight", "patch_embed.proj.bias"
    filters, bias = weights[name], weights[beside]
    if new_config.in_chans == 1:
        how = "summed over the colour channels, corrected for mean and std; colour is lost"
        changed, moved = convert_filters_to_grayscale(
            filters,
            bias,
            (old_preprocessing.mean, old_preprocessing.std),
            (new_preprocessing.mean[0], new_preprocessing.std[0]),
        )
    else:
        how = f"channels repeated in order, scaled by {old}/{new_config.in_chans}"
        changed, moved = adapt_filter_channels(filters, new_config.in_chans), bias
    weights[name] = changed
    changes.append(
        TensorChange(name, list(filters.shape), list(changed.shape), how, compute_channel_error(filters, changed))
    )
    if not torch.equal(moved, bias):
        weights[beside] = moved
        changes.append(
            TensorChange(
                beside, list(bias.shape), list(bias.shape), "adjusted for the mean of each colour channel", 0.0
            )
        )


def _resample_positions(
    weights: dict[str, Tensor], old_config: ModelConfig, new_config: ModelConfig, changes: list[TensorChange]
) -> None:
    """Resample learned positions. The model computes fixed and rotary positions for the new grid itself."""
    table = weights.get("pos_embed")
    if table is None or old_config.grid == new_config.grid:
        return
    prefix = 0 if old_config.no_embed_class else old_config.num_prefix_tokens
    moved = resample_position_table(table, old_config.grid, new_config.grid, prefix)
    back = resample_position_table(moved, new_config.grid, old_config.grid, prefix)[:, prefix:]
    lost = ((back - table[:, prefix:]).norm() / table[:, prefix:].norm()).item()
    how = "bicubic, antialiased" + (f"; {format_count(prefix, 'prefix token')} unchanged" if prefix else "")
    changes.append(TensorChange("pos_embed", list(table.shape), list(moved.shape), how, lost))
    weights["pos_embed"] = moved


def _add_missing_weights(weights: dict[str, Tensor], config: ModelConfig, seed: int) -> list[str]:
    """Add missing weights, drawn from the seed: a new classifier, and parts that `settings` add."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = VisionTransformer(config).state_dict()
    added = [name for name in fresh if name not in weights]
    weights.update({name: fresh[name] for name in added})
    return added


def _adapt_preprocessing(preprocessing: Preprocessing, config: ModelConfig) -> Preprocessing:
    """The same normalisation; if the number of channels changes, its mean over the channels."""
    mean, std = (match_channel_count(values, config.in_chans) for values in (preprocessing.mean, preprocessing.std))
    return Preprocessing(config.image_shape, mean, std)


def _adapt_model_info(
    pretrained: PretrainedModel, config: ModelConfig, preprocessing: Preprocessing, class_names: list[str] | None
) -> ModelInfo:
    before = pretrained.info.classes
    if class_names is None:
        class_names = before if config.num_classes == len(before) else make_class_names(config.num_classes)
    return ModelInfo(config, class_names, preprocessing, (config.in_chans, *config.image_shape), pretrained.info.probe)


def _format_size(size: Size) -> str:
    return str(size) if isinstance(size, int) else f"[{size[0]},{size[1]}]"


CLASSIFIER_WEIGHT_NAMES = ("head.weight", "head.bias")


def fit_classifier(
    weights: dict[str, Tensor],
    pretrained: PretrainedModel,
    num_classes: int,
    class_names: list[str] | None,
    changes: list[TensorChange],
    *,
    keep_classifier: bool = True,
) -> tuple[list[str], list[str]]:
    """Return the names removed from `weights`, and notes. `classes`: the data's class names, if it has any."""
    own, old = pretrained.info.classes, pretrained.info.model.num_classes
    if not keep_classifier:
        return _drop_classifier(weights, "from a linear probe" if pretrained.info.probe else "not kept"), []
    if old != num_classes:
        return _drop_classifier(weights, f"for {old} classes"), []
    if not old or class_names is None:
        return [], []
    if pretrained.library != "vitascope" and has_placeholder_names(own):
        note = "the classifier was kept; its classes have no names, so the order of the data's classes is assumed"
        return [], [note]
    if set(own) != set(class_names):
        other = next((name for name in own if name not in class_names), own[0])
        return _drop_classifier(weights, f"its classes are not the data's, for example {other}"), []
    if own != class_names:
        order = [own.index(name) for name in class_names]
        for name in CLASSIFIER_WEIGHT_NAMES:
            shape = list(weights[name].shape)
            changes.append(TensorChange(name, shape, shape, "rows reordered to match the data's classes", 0.0))
            weights[name] = weights[name][order]
    return [], []


def _drop_classifier(weights: dict[str, Tensor], reason: str) -> list[str]:
    return [f"{name} ({reason})" for name in CLASSIFIER_WEIGHT_NAMES if weights.pop(name, None) is not None]
