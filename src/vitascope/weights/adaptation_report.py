"""Report an adaptation of pretrained weights: sizes, costs and changed tensors, or why it is not possible."""

from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from vitascope.model.anatomy import list_stages
from vitascope.model.config import ModelConfig, Size, as_pair, check_and_convert_size
from vitascope.number_format import format_percent
from vitascope.weights.model_info import ModelSettings
from vitascope.weights.pretrained import PretrainedModel

EmptyDict = dict[str, Any]
ADAPTABLE_SETTINGS = ("img_size", "patch_size", "in_chans", "num_classes")


class UpscalingCost(TypedDict):
    """Cost of keeping the weights' image and patch size, and upscaling the images."""

    settings: dict[str, Size]
    grid: list[int]  # rows, columns
    tokens: int
    flops: int  # per image
    times_flops: float  # relative to the adapted model
    converts_channels: bool


@dataclass(frozen=True)
class TensorChange:
    """One changed tensor. `lost`: relative error, the norm of the difference divided by the norm of the original."""

    name: str
    before: list[int]
    after: list[int]
    how: str
    lost: float


@dataclass(frozen=True)
class AdaptationReport:
    """What an adaptation changed, or why it is not possible."""

    weights: str
    library: str
    settings: dict[str, Any]  # requested
    image_before: list[int]  # pixels: rows, columns
    image_after: list[int]
    patch_before: list[int]
    patch_after: list[int]
    grid_before: list[int]  # rows, columns
    grid_after: list[int]
    tokens_before: int
    tokens_after: int
    pixels_seen: float  # fraction of the image's pixels covered by patches
    flops_before: int  # per image
    flops_after: int
    resampled: list[TensorChange] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    kept: int = 0  # unchanged tensors
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alternative: UpscalingCost | EmptyDict = field(default_factory=dict)  # upscaling the images; empty: none
    refused: str | None = None


def plan_adaptation_or_explain_refusal(
    pretrained: PretrainedModel,
    *,
    img_size: Size | None = None,
    patch_size: Size | None = None,
    in_chans: int | None = None,
    num_classes: int | None = None,
) -> AdaptationReport:
    """Return the report before the adaptation: sizes and costs, without changed weights. None keeps the old value.

    If the adaptation is not possible, no error is raised: `AdaptationReport.refused` is the reason."""
    old = pretrained.info.model
    requested = _collect_requested_settings(img_size, patch_size, in_chans, num_classes)
    new_settings: ModelSettings = {name: requested.get(name, getattr(old, name)) for name in ADAPTABLE_SETTINGS}
    (height, width), (rows, columns) = as_pair(new_settings["img_size"]), as_pair(new_settings["patch_size"])
    grid = (height // rows, width // columns)
    pixel_coverage = grid[0] * rows * grid[1] * columns / (height * width)
    # If the patches do not fill the image, count the FLOPs of the patches that fit.
    filled = replace(old, **(new_settings | {"img_size": (max(grid[0], 1) * rows, max(grid[1], 1) * columns)}))
    flops, old_flops = count_flops_per_image(filled), count_flops_per_image(old)
    return AdaptationReport(
        weights=pretrained.name,
        library=pretrained.library,
        settings=requested,
        image_before=list(old.image_shape),
        image_after=[height, width],
        patch_before=list(old.patch_shape),
        patch_after=[rows, columns],
        grid_before=list(old.grid),
        grid_after=list(grid),
        tokens_before=old.num_tokens,
        tokens_after=old.num_prefix_tokens + grid[0] * grid[1],
        pixels_seen=pixel_coverage,
        flops_before=old_flops,
        flops_after=flops,
        assumed=pretrained.assumptions,
        notes=pretrained.notes,
        dropped=pretrained.dropped_names,
        alternative=_estimate_cost_of_upscaling_images_instead(old, new_settings, flops),
        refused=_find_refusal_reason(old, new_settings, grid, pixel_coverage),
    )


def _collect_requested_settings(
    img_size: Size | None, patch_size: Size | None, in_chans: int | None, num_classes: int | None
) -> ModelSettings:
    """Return the settings that are not None, sizes checked and converted."""
    sizes = {"img_size": img_size, "patch_size": patch_size}
    counts = {"in_chans": in_chans, "num_classes": num_classes}
    requested: ModelSettings = {
        name: check_and_convert_size(name, size) for name, size in sizes.items() if size is not None
    }
    return requested | {name: count for name, count in counts.items() if count is not None}


def count_flops_per_image(config: ModelConfig) -> int:
    """Return the FLOPs of the forward pass of one image."""
    return sum(stage.flops for stage in list_stages(config))


def _find_refusal_reason(
    old_config: ModelConfig, new_settings: ModelSettings, new_grid: tuple[int, int], pixel_coverage: float
) -> str | None:
    size, patch = new_settings["img_size"], new_settings["patch_size"]
    changed = [name for name in ("patch_size", "in_chans") if new_settings[name] != getattr(old_config, name)]
    if changed and old_config.tokenizer != "patch":
        tokenizer = old_config.tokenizer
        return f"{changed[0]} cannot be changed with tokenizer={tokenizer}. Only tokenizer=patch can be resampled."
    if new_grid[0] * new_grid[1] > 1 and pixel_coverage == 1:
        return None
    reason = f"With img_size={_format_size(size)} and patch_size={_format_size(patch)}, "
    if new_grid[0] * new_grid[1] == 0:
        reason += "the image is smaller than one patch"
    elif new_grid[0] * new_grid[1] == 1:
        covered = f" ({format_percent(pixel_coverage)} of the pixels)" if pixel_coverage < 1 else ""
        reason += f"there is only one patch{covered}, so there is no attention between patches"
    else:
        reason += f"{format_percent(1 - pixel_coverage)} of the pixels would be ignored"
    return f"{reason}. Choose {_format_suggested_sizes(old_config, size)}."


def _format_suggested_sizes(old_config: ModelConfig, img_size: Size) -> str:
    """List settings that work: patch sizes for this image size, or the weights' sizes."""
    height, width = as_pair(img_size)
    sides = [side for side in range(2, min(height, width) // 2 + 1) if height % side == 0 and width % side == 0]
    sides = [side for side in sides if (height // side) * (width // side) <= 4 * max(old_config.num_patches, 64)][:4]
    suggestions = [f"patch_size={side} (grid {height // side}×{width // side})" for side in sides]
    old_patch = f"patch_size={_format_size(old_config.patch_size)}"
    if (height, width) != old_config.image_shape:
        upscales = old_config.image_shape[0] > height or old_config.image_shape[1] > width
        note = " (upscales the images)" if upscales else ""
        suggestions.append(f"img_size={_format_size(old_config.img_size)} with {old_patch}{note}")
    elif old_config.patch_size not in sides:
        suggestions.append(f"{old_patch} (grid {old_config.grid[0]}×{old_config.grid[1]})")
    return ", or ".join(filter(None, (", ".join(suggestions[:-1]), suggestions[-1])))


def _estimate_cost_of_upscaling_images_instead(
    old_config: ModelConfig, new_settings: ModelSettings, adapted_flops: int
) -> UpscalingCost | EmptyDict:
    """Return the cost of keeping the image and patch size and upscaling the images; empty if nothing is upscaled."""
    upscaling = replace(old_config, in_chans=new_settings["in_chans"], num_classes=new_settings["num_classes"])
    (height, width), (rows, columns) = old_config.image_shape, as_pair(new_settings["img_size"])
    if height <= rows and width <= columns:
        return {}
    flops = count_flops_per_image(upscaling)
    return {
        "settings": {"img_size": old_config.img_size, "patch_size": old_config.patch_size},
        "grid": list(old_config.grid),
        "tokens": old_config.num_tokens,
        "flops": flops,
        "times_flops": round(flops / adapted_flops, 2),
        "converts_channels": old_config.in_chans != new_settings["in_chans"],
    }


def _format_size(size: Size) -> str:
    return str(size) if isinstance(size, int) else f"[{size[0]},{size[1]}]"
