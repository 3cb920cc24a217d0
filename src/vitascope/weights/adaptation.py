"""Adapt pretrained weights to other sizes, and report what was resampled, removed and newly initialised."""

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError, did_you_mean, format_count
from vitascope.model.anatomy import anatomy
from vitascope.model.config import FEWER, ModelConfig, Size, as_pair, check_size
from vitascope.model.positions import resample
from vitascope.model.vit import VisionTransformer
from vitascope.weights.classifier import fit_classifier
from vitascope.weights.facts import ModelFacts
from vitascope.weights.known import class_names, for_channels
from vitascope.weights.pretrained import IMAGENET_CLASSES, Pretrained, open_weights, ready
from vitascope.weights.report import Change, Report
from vitascope.weights.resampling import change_channels, channel_error, fold_to_grey, patch_error, resample_patch

WITHOUT_WEIGHTS = tuple(
    item.name
    for item in fields(ModelConfig)
    if item.name.endswith(("drop_rate", "drop_path_rate")) or item.name in ("grad_checkpointing", *FEWER)
)
CHANGEABLE = ("img_size", "patch_size", "in_chans", "num_classes")


@dataclass(frozen=True)
class Adapted:
    facts: ModelFacts
    weights: dict[str, Tensor]
    report: Report

    def model(self) -> VisionTransformer:
        """The model with these weights, in eval mode."""
        return ready(self.facts.model, self.weights)


def adapt(
    weights: Pretrained | str | os.PathLike[str],
    *,
    img_size: Size | None = None,
    patch_size: Size | None = None,
    in_chans: int | None = None,
    num_classes: int | None = None,
    classes: list[str] | None = None,
    keep_classifier: bool = True,
    seed: int = 0,
    **settings: Any,
) -> Adapted:
    """Adapt pretrained weights to another image size, patch size, number of channels or classes.

    `weights`: opened weights, or what `weights=` accepts. `settings`: settings of ModelConfig without weights, such
    as drop rates. A new classifier is drawn from the seed if the number or the names (`classes`) of the classes differ,
    or with `keep_classifier=False`. A UserError is raised if there is only one patch, or if pixels would be ignored."""
    _check_settings(settings)
    found = weights
    if not isinstance(found, Pretrained):
        found = open_weights(os.fspath(found), num_heads=settings.pop("num_heads", None), img_size=img_size)
    count = _number_of(classes, num_classes)
    asked = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans, "num_classes": count}
    report = survey(found, **asked)
    if report.refused:
        raise UserError(report.refused)
    old = found.facts.model
    config = replace(old, **{name: value for name, value in asked.items() if value is not None}, **settings)
    preparation = _preparation(found.facts.preparation, config)
    tensors, changes = dict(found.weights), []
    _patches(tensors, old, config, changes)
    _channels(tensors, config, found.facts.preparation, preparation, changes)
    _positions(tensors, old, config, changes)
    dropped, notes = fit_classifier(tensors, found, config.num_classes, classes, changes, keep=keep_classifier)
    new = _fill(tensors, config, seed)
    kept = len(tensors) - len({change.name for change in changes}) - len(new)
    # Class names belong to the old classifier.
    assumed = [text for text in found.assumed if text != IMAGENET_CLASSES or not dropped]
    told = {"dropped": [*found.dropped, *dropped], "notes": [*found.notes, *notes], "kept": kept}
    report = replace(report, resampled=changes, new=new, assumed=assumed, **told)
    return Adapted(_facts(found, config, preparation, classes), tensors, report)


def _number_of(classes: list[str] | None, told: int | None) -> int | None:
    if classes is not None and told not in (None, len(classes)):
        raise UserError(f"num_classes={told}, but {len(classes)} classes are named. Leave num_classes out.")
    return told if classes is None else len(classes)


def _check_settings(settings: dict[str, Any]) -> None:
    known = ("num_heads", *WITHOUT_WEIGHTS)
    if strange := [name for name in settings if name not in known]:
        near = did_you_mean(strange[0], (*CHANGEABLE, "classes", *known))
        raise UserError(f"adapt cannot change {strange[0]}: the weights fix it. {near}")


def survey(found: Pretrained, **asked: Any) -> Report:
    """The report before the adaptation. `refused` is the reason if the adaptation is not possible."""
    old = found.facts.model
    for name in ("img_size", "patch_size"):
        if asked.get(name) is not None:
            asked[name] = check_size(name, asked[name])
    wanted: dict[str, Any] = {
        name: getattr(old, name) if asked.get(name) is None else asked[name] for name in CHANGEABLE
    }
    (height, width), (rows, columns) = as_pair(wanted["img_size"]), as_pair(wanted["patch_size"])
    grid = (height // rows, width // columns)
    seen = grid[0] * rows * grid[1] * columns / (height * width)
    tokens = old.num_prefix_tokens + grid[0] * grid[1]
    refused = _refusal(old, wanted, grid, seen)
    # If the patches do not fill the image, count the FLOPs of the patches that fit.
    whole = replace(old, **(wanted | {"img_size": (max(grid[0], 1) * rows, max(grid[1], 1) * columns)}))
    flops, before = flops_of(whole), flops_of(old)
    return Report(
        weights=found.name,
        library=found.library,
        settings={name: value for name, value in asked.items() if value is not None},
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
        assumed=found.assumed,
        notes=found.notes,
        dropped=found.dropped,
        alternative=_resized_up(old, wanted, flops),
        refused=refused,
    )


def flops_of(config: ModelConfig) -> int:
    """FLOPs of the forward pass of one image."""
    return sum(stage.flops for stage in anatomy(config))


def _refusal(old: ModelConfig, wanted: dict[str, Any], grid: tuple[int, int], seen: float) -> str | None:
    size, patch = wanted["img_size"], wanted["patch_size"]
    moved = [name for name in ("patch_size", "in_chans") if wanted[name] != getattr(old, name)]
    if moved and old.tokenizer != "patch":
        return f"{moved[0]} cannot be changed with tokenizer={old.tokenizer}. Only tokenizer=patch can be resampled."
    if grid[0] * grid[1] > 1 and seen == 1:
        return None
    what = f"With img_size={_words(size)} and patch_size={_words(patch)}, "
    if grid[0] * grid[1] == 0:
        what += "the image is smaller than one patch"
    elif grid[0] * grid[1] == 1:
        covered = f" ({seen:.1%} of the pixels)" if seen < 1 else ""
        what += f"there is only one patch{covered}, so attention has no effect"
    else:
        what += f"{1 - seen:.1%} of the pixels would be ignored"
    return f"{what}. Choose {_choices(old, size)}."


def _choices(old: ModelConfig, size: Size) -> str:
    """Settings that work: patch sizes for this image size, or the weights' own sizes."""
    height, width = as_pair(size)
    good = [side for side in range(2, min(height, width) // 2 + 1) if height % side == 0 and width % side == 0]
    good = [side for side in good if (height // side) * (width // side) <= 4 * max(old.num_patches, 64)]
    found = [f"patch_size={side} (grid {height // side}×{width // side})" for side in good[:4]]
    own = f"patch_size={_words(old.patch_size)}"
    if (height, width) != old.image_shape:
        larger = old.image_shape[0] > height or old.image_shape[1] > width
        up = " (upscales the images)" if larger else ""
        found.append(f"img_size={_words(old.img_size)} with {own}{up}")
    elif old.patch_size not in good[:4]:
        found.append(f"{own} (grid {old.grid[0]}×{old.grid[1]})")
    return ", or ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def _resized_up(old: ModelConfig, wanted: dict[str, Any], flops: int) -> dict[str, Any]:
    """Cost of the alternative: keep the model's image and patch size, and upscale the images."""
    kept = replace(old, in_chans=wanted["in_chans"], num_classes=wanted["num_classes"])
    (height, width), (rows, columns) = old.image_shape, as_pair(wanted["img_size"])
    if height <= rows and width <= columns:
        return {}
    up = flops_of(kept)
    return {
        "settings": {"img_size": old.img_size, "patch_size": old.patch_size},
        "grid": list(old.grid),
        "tokens": old.num_tokens,
        "flops": up,
        "times_flops": round(up / flops, 2),
        "converts_channels": old.in_chans != wanted["in_chans"],
    }


def _patches(weights: dict[str, Tensor], old: ModelConfig, new: ModelConfig, changes: list[Change]) -> None:
    if old.tokenizer != "patch":
        return  # `_refusal` ensures that nothing changes
    name = "patch_embed.proj.weight"
    filters = weights[name]
    resized = resample_patch(filters, new.patch_shape)
    if resized is not filters:
        how = "pseudo-inverse resampling (Beyer et al. 2023)"
        changes.append(Change(name, list(filters.shape), list(resized.shape), how, patch_error(filters, resized)))
    weights[name] = resized


def _channels(
    weights: dict[str, Tensor], new: ModelConfig, given: Preparation, wanted: Preparation, changes: list[Change]
) -> None:
    """For one channel, filters and bias absorb the mean and standard deviation of each colour channel."""
    old = len(given.mean)
    if old == new.in_chans:
        return
    name, beside = "patch_embed.proj.weight", "patch_embed.proj.bias"
    filters, bias = weights[name], weights[beside]
    if new.in_chans == 1:
        how = "summed over the colour channels, corrected for mean and std; colour is lost"
        changed, moved = fold_to_grey(filters, bias, (given.mean, given.std), (wanted.mean[0], wanted.std[0]))
    else:
        how = f"channels repeated in order, scaled by {old}/{new.in_chans}"
        changed, moved = change_channels(filters, new.in_chans), bias
    weights[name] = changed
    changes.append(Change(name, list(filters.shape), list(changed.shape), how, channel_error(filters, changed)))
    if not torch.equal(moved, bias):
        weights[beside] = moved
        changes.append(
            Change(beside, list(bias.shape), list(bias.shape), "adjusted for the mean of each colour channel", 0.0)
        )


def _positions(weights: dict[str, Tensor], old: ModelConfig, new: ModelConfig, changes: list[Change]) -> None:
    """Resample learned positions. The model computes fixed and rotary positions for the new grid itself."""
    table = weights.get("pos_embed")
    if table is None or old.grid == new.grid:
        return
    prefix = 0 if old.no_embed_class else old.num_prefix_tokens
    moved = resample(table, old.grid, new.grid, prefix)
    back = resample(moved, new.grid, old.grid, prefix)[:, prefix:]
    lost = ((back - table[:, prefix:]).norm() / table[:, prefix:].norm()).item()
    how = "bicubic, antialiased" + (f"; {format_count(prefix, 'prefix token')} unchanged" if prefix else "")
    changes.append(Change("pos_embed", list(table.shape), list(moved.shape), how, lost))
    weights["pos_embed"] = moved


def _fill(weights: dict[str, Tensor], config: ModelConfig, seed: int) -> list[str]:
    """Add missing weights, drawn from the seed: a new classifier, and parts that `settings` add."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = VisionTransformer(config).state_dict()
    added = [name for name in fresh if name not in weights]
    weights.update({name: fresh[name] for name in added})
    return added


def _preparation(before: Preparation, config: ModelConfig) -> Preparation:
    """The same normalisation; if the number of channels changes, its mean over the channels."""
    mean, std = (for_channels(values, config.in_chans) for values in (before.mean, before.std))
    return Preparation(config.image_shape, mean, std)


def _facts(found: Pretrained, config: ModelConfig, preparation: Preparation, classes: list[str] | None) -> ModelFacts:
    before = found.facts.classes
    if classes is None:
        classes = before if config.num_classes == len(before) else class_names(config.num_classes)
    return ModelFacts(config, classes, preparation, (config.in_chans, *config.image_shape), found.facts.probe)


def _words(size: Size) -> str:
    return str(size) if isinstance(size, int) else f"[{size[0]},{size[1]}]"
