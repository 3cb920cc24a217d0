"""Pretrained weights and other sizes -> weights for those, and a report of what was resampled, dropped and new."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitascope.data.preparation import Preparation
from vitascope.errors import UserError
from vitascope.model.anatomy import anatomy
from vitascope.model.config import ModelConfig, Size, as_pair
from vitascope.model.positions import resample
from vitascope.model.vit import VisionTransformer
from vitascope.weights.facts import ModelFacts
from vitascope.weights.known import class_names
from vitascope.weights.pretrained import Pretrained, open_weights
from vitascope.weights.resampling import change_channels, patch_error, resample_patch

CHANGEABLE = ("img_size", "patch_size", "in_chans", "num_classes")


@dataclass(frozen=True)
class Change:
    """One tensor that is not as it was. `lost` is a share: what cannot be had back from the new one."""

    name: str
    before: list[int]
    after: list[int]
    how: str
    lost: float


@dataclass(frozen=True)
class Report:
    """What an adaptation did, or why it was refused."""

    weights: str
    library: str
    settings: dict[str, Any]  # asked for
    grid_before: list[int]  # rows, columns
    grid_after: list[int]
    tokens_before: int
    tokens_after: int
    pixels_seen: float  # share of the image's pixels that reach a patch
    flops_before: int  # an image
    flops_after: int
    resampled: list[Change] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    kept: int = 0  # tensors taken over as they are
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alternative: dict[str, Any] = field(default_factory=dict)  # resizing images up instead
    refused: str | None = None


@dataclass(frozen=True)
class Adapted:
    facts: ModelFacts
    weights: dict[str, Tensor]
    report: Report

    def model(self) -> VisionTransformer:
        built = VisionTransformer(self.facts.model)
        built.load_state_dict(self.weights)
        return built.eval()


def adapt(
    weights: Pretrained | str,
    *,
    img_size: Size | None = None,
    patch_size: Size | None = None,
    in_chans: int | None = None,
    num_classes: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Adapted:
    """`weights`: opened, or the word for them. `settings` are of ModelConfig, without weights of their own (drop rates
    and the like). A new classifier is drawn from the seed. Refused where the model would see one patch only, or not all
    of the image: `survey` says it first."""
    found = open_weights(weights) if isinstance(weights, str) else weights
    asked = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans, "num_classes": num_classes}
    report = survey(found, **asked)
    if report.refused:
        raise UserError(report.refused)
    old = found.facts.model
    config = replace(old, **{name: value for name, value in asked.items() if value is not None}, **settings)
    tensors, changes = dict(found.weights), []
    _patches(tensors, old, config, changes)
    _positions(tensors, old, config, changes)
    dropped, new = _classifier(tensors, old, config, seed)
    report = replace(
        report,
        resampled=changes,
        dropped=[*found.dropped, *dropped],
        new=new,
        kept=len(tensors) - len({change.name for change in changes}) - len(new),
    )
    return Adapted(_facts(found, config), tensors, report)


def survey(found: Pretrained, **asked: Size | None) -> Report:
    """The report's numbers before anything is done, and `refused` where it should not be done."""
    old = found.facts.model
    wanted: dict[str, Any] = {
        name: getattr(old, name) if asked.get(name) is None else asked[name] for name in CHANGEABLE
    }
    (height, width), (rows, columns) = as_pair(wanted["img_size"]), as_pair(wanted["patch_size"])
    grid = (height // rows, width // columns)
    seen = grid[0] * rows * grid[1] * columns / (height * width)
    tokens = old.num_prefix_tokens + grid[0] * grid[1]
    refused = _refusal(old, wanted, grid, seen)
    # A grid that timm would round down to costs what the whole grid costs.
    whole = replace(old, **(wanted | {"img_size": (max(grid[0], 1) * rows, max(grid[1], 1) * columns)}))
    flops, before = flops_of(whole), flops_of(old)
    return Report(
        weights=found.name,
        library=found.library,
        settings={name: value for name, value in asked.items() if value is not None},
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
    """Of one image."""
    return sum(stage.flops for stage in anatomy(config))


def _refusal(old: ModelConfig, wanted: dict[str, Any], grid: tuple[int, int], seen: float) -> str | None:
    size, patch = wanted["img_size"], wanted["patch_size"]
    moved = [name for name in ("patch_size", "in_chans") if wanted[name] != getattr(old, name)]
    if moved and old.tokenizer != "patch":
        return f"{moved[0]} cannot change: its filters are not plain patches' (tokenizer={old.tokenizer})."
    if grid[0] * grid[1] > 1 and seen == 1:
        return None
    what = f"With img_size={_words(size)} and patch_size={_words(patch)} "
    if grid[0] * grid[1] == 0:
        what += "the image is smaller than one patch"
    elif grid[0] * grid[1] == 1:
        what += "there is one patch, which has no other to look at" + (
            f" and sees {seen:.1%} of the pixels" if seen < 1 else ""
        )
    else:
        what += f"{1 - seen:.1%} of the pixels would not be seen"
    height, width = as_pair(size)
    good = [side for side in range(2, min(height, width) // 2 + 1) if height % side == 0 and width % side == 0]
    good = [side for side in good if (height // side) * (width // side) <= 4 * max(old.num_patches, 64)]
    patches = ", ".join(f"patch_size={side} (grid {height // side}×{width // side})" for side in good[:4])
    back = f"img_size={_words(old.img_size)} (images resized up)"
    return f"{what}. What works: {f'{patches}, or ' if patches else ''}{back}."


def _resized_up(old: ModelConfig, wanted: dict[str, Any], flops: int) -> dict[str, Any]:
    """Leave the model's size and patch as they are and enlarge the images: what that costs."""
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
    }


def _patches(weights: dict[str, Tensor], old: ModelConfig, new: ModelConfig, changes: list[Change]) -> None:
    if old.tokenizer != "patch":
        return  # `_refusal` saw to it that nothing changes
    name = "patch_embed.proj.weight"
    filters = weights[name]
    resized = resample_patch(filters, new.patch_shape)
    if resized is not filters:
        how = "pseudo-inverse resampling (Beyer et al. 2023)"
        changes.append(Change(name, list(filters.shape), list(resized.shape), how, patch_error(filters, resized)))
    fewer = change_channels(resized, new.in_chans)
    if fewer is not resized:
        shared = resized.mean(1, keepdim=True).expand_as(resized)
        lost = ((resized - shared).norm() / resized.norm()).item() if new.in_chans == 1 else 0.0
        how = (
            "summed to grey (what is lost is colour)"
            if new.in_chans == 1
            else f"repeated and scaled by {old.in_chans}/{new.in_chans}"
        )
        changes.append(Change(name, list(resized.shape), list(fewer.shape), how, lost))
    weights[name] = fewer


def _positions(weights: dict[str, Tensor], old: ModelConfig, new: ModelConfig, changes: list[Change]) -> None:
    """Fixed and rotary positions are computed for the new grid by the model itself."""
    table = weights.get("pos_embed")
    if table is None or old.grid == new.grid:
        return
    prefix = 0 if old.no_embed_class else old.num_prefix_tokens
    moved = resample(table, old.grid, new.grid, prefix)
    back = resample(moved, new.grid, old.grid, prefix)[:, prefix:]
    lost = ((back - table[:, prefix:]).norm() / table[:, prefix:].norm()).item()
    how = "bicubic, antialiased" + (f"; {prefix} token(s) in front kept" if prefix else "")
    changes.append(Change("pos_embed", list(table.shape), list(moved.shape), how, lost))
    weights["pos_embed"] = moved


def _classifier(
    weights: dict[str, Tensor], old: ModelConfig, new: ModelConfig, seed: int
) -> tuple[list[str], list[str]]:
    """Another number of classes: the old classifier means nothing for them. Also parts that `settings` ask for."""
    names = ("head.weight", "head.bias")
    dropped = [name for name in names if old.num_classes != new.num_classes and weights.pop(name, None) is not None]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = VisionTransformer(new).state_dict()
    added = [name for name in fresh if name not in weights]
    weights.update({name: fresh[name] for name in added})
    return [f"{name} ({old.num_classes} classes)" for name in dropped], added


def _facts(found: Pretrained, config: ModelConfig) -> ModelFacts:
    before = found.facts
    mean, std = before.preparation.mean, before.preparation.std
    if len(mean) != config.in_chans:
        mean, std = ((sum(values) / len(values),) * config.in_chans for values in (mean, std))
    classes = before.classes if config.num_classes == len(before.classes) else class_names(config.num_classes)
    stored = (config.in_chans, *config.image_shape)
    return ModelFacts(config, classes, Preparation(config.image_shape, mean, std), stored)


def _words(size: Size) -> str:
    return str(size) if isinstance(size, int) else f"[{size[0]},{size[1]}]"
