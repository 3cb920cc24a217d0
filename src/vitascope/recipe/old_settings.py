"""Settings of older versions: reject them with the new name, or convert them for the recipe of an old run."""

from collections.abc import Iterable
from typing import Any

from vitascope.errors import UserError
from vitascope.model.config import OLD_INITIALIZERS
from vitascope.recipe.schema import NameAndText

RENAMED = {
    "data.augment.flip_by": "data.augment.flip_mode",
    "data.augment.crop": "data.augment.crop_scale",
    "data.augment.crop_most": "data.augment.crop_scale",
    "data.augment.grey": "data.augment.grayscale",
    "data.augment.mix_share": "data.augment.mix_prob",
    "data.repeat": "data.passes_per_epoch",
    "train.accumulate": "train.grad_accum_steps",
    "train.capture": "train.cuda_graph",
    "train.keep": "train.weight_snapshots",
    "train.watch": "train.probe_every",
    "train.distill_how": "train.distill_type",
    "train.distill_share": "train.distill_alpha",
    "train.small_share": "train.patch_share_until",
    "dino.global_area": "dino.global_crops_scale",
    "dino.local_area": "dino.local_crops_scale",
    "dino.centre_momentum": "dino.center_momentum",
    "mae.mask": "mae.mask_ratio",
    "mae.normalise": "mae.norm_pix_loss",
}
REMOVED = ("train.small_size", "data.augment.mix_until")
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "data.augment.flip_mode": {"chance": "random", "turns": "alternating"},
    "model.initialize": {"local": "conv_like"},
}
REMOVED_VALUES = {"model.initialize": ("silent",)}
RENAME_NOTES = {
    "data.augment.flip_by": " Its values are random and alternating.",
    "data.augment.crop": " It is a range such as [0.2,1.0].",
    "data.augment.crop_most": " It is a range such as [0.2,1.0].",
}


def reject_outdated_settings(settings: Iterable[NameAndText]) -> None:
    """Reject names and values of older versions and give the new ones."""
    for name, value in settings:
        if name in RENAMED:
            raise UserError(f"{name} was renamed to {RENAMED[name]}.{RENAME_NOTES.get(name, '')}")
        if name in REMOVED:
            raise UserError(f"{name} was removed. Leave it out.")
        if value in RENAMED_VALUES.get(name, {}):
            raise UserError(f"{name}={value} was renamed to {name}={RENAMED_VALUES[name][value]}.")
        if value in REMOVED_VALUES.get(name, ()):
            raise UserError(f"{name}={value} was removed. Leave it out.")


def has_renamed_settings(setting_names: Iterable[str]) -> bool:
    """Return whether a complete recipe has names that only older versions wrote."""
    return any(name in RENAMED or name in REMOVED for name in setting_names)


def convert_old_settings(old_settings: dict[str, Any]) -> dict[str, Any]:
    """Convert `section.setting` -> value to the names of this version, without removed settings."""
    new = {RENAMED.get(name, name): value for name, value in old_settings.items() if name not in REMOVED}
    for name, values in RENAMED_VALUES.items():
        if name in new:
            new[name] = values.get(new[name], new[name])
    if new.get("model.initialize") in OLD_INITIALIZERS:
        new["model.initialize"] = OLD_INITIALIZERS[new["model.initialize"]]
    low, high = old_settings.get("data.augment.crop"), old_settings.get("data.augment.crop_most")
    if low is not None or high is not None:
        new["data.augment.crop_scale"] = [low, 1.0 if high is None else high] if low else [1.0, 1.0]
    return new
