"""The rules: facts about images, weights and machine -> settings, one reason per decision, and the expected duration.

The measurements behind the rules: docs/pretrained.md ("From scratch or pretrained?") and docs/experiments.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.schema import find_non_default_settings, flatten_sections, format_value_for_command_line
from vitascope.training.auto.find_weights import WeightsAtHand
from vitascope.training.auto.image_facts import ImageFacts

SCRATCH, LINEAR_PROBE, FINE_TUNING = "from scratch", "linear probe", "fine-tuning"
MIN_STEPS_PER_EPOCH = 10
MIN_BATCH_SIZE, MAX_BATCH_SIZE = 8, 128
MAX_RESIZE_SECONDS = 600.0  # smaller photos are enlarged to the weights' resolution if a short run takes no longer
MIN_RESIZED_PASSES = 5  # of such a short run
MAX_SECONDS = 1800.0  # a run that would take longer gets fewer passes over the images
MIN_PASSES = 3  # of fine-tuning; if even these take too long, only the classifier is trained
MANY_IMAGES = 20_000  # from here on, a small network learns gray images from scratch as well as a pretrained one
TINY_SIDE, MIN_TINY_IMAGES = 16, 500  # of gray images this small, a few hundred are enough (recipe digits)
SMALL_SIDE = 32  # pixels; images up to this size have a recorded recipe for training from scratch
ADAPTED_GRID = 8  # patches per side where the patches of the weights are adapted to small photos
MIN_ADAPTED_SIDE = 28  # pixels; smaller images are enlarged, because smaller patches show too little
MAX_SCRATCH_SIDE = 64  # pixels, from scratch
FEW_IMAGES_FOR_SCRATCH = 5_000  # with fewer, the network is smaller
SMALL_NETWORK = {"embed_dim": 128, "depth": 6}
MAX_SCRATCH_PASSES, MIN_SCRATCH_IMAGES_SEEN = 300, 90_000  # as many as digits' recipe sees
FINE_TUNING_LR, LR_BATCH_SIZE, LR_WIDTH = 5e-4, 128, 192  # learning rate for this batch size and width
FINE_TUNING_PASSES = ((500, 20), (5_000, 15))  # (fewer images than, passes); else the last
MANY_IMAGE_PASSES = 10


@dataclass(frozen=True)
class MachineFacts:
    """The device, and the speed of training on it."""

    device: str
    name: str  # for the user
    flops_per_second: float


@dataclass(frozen=True)
class Choice:
    """The chosen start and settings, a reason for every decision, and the expected duration."""

    start: str  # SCRATCH, LINEAR_PROBE or FINE_TUNING
    settings: Mapping[str, Any]  # key -> value, as in a recipe
    reasons: Mapping[str, str]  # decision -> reason
    seconds: float


def find_reason_for_scratch(images: ImageFacts) -> str | None:
    """Return why pretrained weights are not needed; None if they should be used where there are any."""
    if images.num_channels != 1:
        return None
    if images.short_side <= SMALL_SIDE and images.num_images_after_holdout >= MANY_IMAGES:
        return f"{images.num_images_after_holdout:,} small gray images are enough for a small network"
    if images.short_side <= TINY_SIDE and images.num_images_after_holdout >= MIN_TINY_IMAGES:
        return f"a small network suffices for gray images of {images.short_side} pixels"
    return None


def choose_settings(images: ImageFacts, weights: WeightsAtHand, machine: MachineFacts) -> Choice:
    """Choose start, size, batch size, learning rate, length and augmentation."""
    scratch_reason = find_reason_for_scratch(images) or (None if weights.ref else weights.origin)
    choice = (
        _choose_from_scratch(images, machine, scratch_reason)
        if scratch_reason
        else _choose_pretrained(images, weights, machine)
    )
    data = {"data.name": images.data_name, "data.validation": images.validation}
    return replace(choice, settings=data | dict(choice.settings))


def choose_batch_size(num_images_after_holdout: int) -> int:
    """Return the largest power of two that gives at least ten steps in one pass, within the limits."""
    largest = max(1, num_images_after_holdout // MIN_STEPS_PER_EPOCH)
    return min(num_images_after_holdout, max(MIN_BATCH_SIZE, min(MAX_BATCH_SIZE, 2 ** int(math.log2(largest)))))


def choose_passes_per_epoch(num_images_after_holdout: int, batch_size: int) -> int:
    """Return how many passes over the images give at least ten steps."""
    return max(1, math.ceil(MIN_STEPS_PER_EPOCH * batch_size / num_images_after_holdout))


def estimate_seconds(images: ImageFacts, model: ModelConfig, machine: MachineFacts, passes: float) -> float:
    """Estimate the duration of training: forward and backward of all passes, and one validation per pass."""
    forward_passes = passes * (3 * images.num_images_after_holdout + images.num_validation)
    return forward_passes * count_forward_flops_per_image(model) / machine.flops_per_second


def _choose_pretrained(images: ImageFacts, weights: WeightsAtHand, machine: MachineFacts) -> Choice:
    passes = next(
        (passes for limit, passes in FINE_TUNING_PASSES if images.num_images_after_holdout < limit), MANY_IMAGE_PASSES
    )
    own_model = replace(weights.model, num_classes=images.num_classes, in_chans=images.num_channels)
    model, size_reason, max_seconds = _choose_resolution(images, own_model, machine)
    seconds_per_pass = estimate_seconds(images, model, machine, 1)
    probe_seconds = images.num_images_after_holdout * count_forward_flops_per_image(model) / machine.flops_per_second
    reasons = {"resolution": size_reason}
    affordable = int((max_seconds - probe_seconds) / seconds_per_pass)
    if affordable < MIN_PASSES:
        return _choose_linear_probe(images, weights, model, reasons, probe_seconds)
    if affordable < passes:
        reasons["length"] = f"{affordable} instead of {passes} passes, to end within {max_seconds / 60:.0f} minutes"
        passes = affordable
    batch_size = choose_batch_size(images.num_images_after_holdout)
    passes_per_epoch = choose_passes_per_epoch(images.num_images_after_holdout, batch_size)
    lr = FINE_TUNING_LR * math.sqrt(batch_size / LR_BATCH_SIZE * LR_WIDTH / model.embed_dim)
    settings = _make_weights_settings(weights, model) | {
        "model.drop_path_rate": 0.0 if images.num_images_after_holdout < MANY_IMAGES else 0.1,
        "train.head_init": "linear_probe",
        "train.epochs": max(1, round(passes / passes_per_epoch)),
        "train.batch_size": batch_size,
        "train.lr": float(f"{lr:.2g}"),
        "train.layer_decay": 0.75,
        "data.passes_per_epoch": passes_per_epoch,
        **_choose_augmentation(images),
    }
    start_reason = "pretrained weights are at hand"
    reasons = {
        "start": start_reason,
        **reasons,
        **_explain_batch_and_rate(images, batch_size, passes_per_epoch),
        "classifier": "starts as a linear probe, so that the first steps do not distort the features",
    }
    return Choice(FINE_TUNING, settings, reasons, passes * seconds_per_pass + probe_seconds)


def _choose_linear_probe(
    images: ImageFacts, weights: WeightsAtHand, model: ModelConfig, reasons: dict[str, str], probe_seconds: float
) -> Choice:
    """Train only the classifier: one pass for the linear probe, and one that trains it on augmented images."""
    batch_size = choose_batch_size(images.num_images_after_holdout)
    settings = _make_weights_settings(weights, model) | {
        "train.tune": "head",
        "train.head_init": "linear_probe",
        "train.epochs": 1,
        "train.batch_size": batch_size,
        "train.lr": 1e-4,
        "data.passes_per_epoch": choose_passes_per_epoch(images.num_images_after_holdout, batch_size),
        **_choose_augmentation(images),
    }
    start = f"fine-tuning all weights would take more than {MAX_SECONDS / 60:.0f} minutes on this machine"
    return Choice(LINEAR_PROBE, settings, {"start": start, **reasons}, 2.3 * probe_seconds)


class _Resolution(NamedTuple):
    """The model at the resolution to use, the reason, and the longest run at this resolution."""

    model: ModelConfig
    reason: str
    max_seconds: float = MAX_SECONDS


def _choose_resolution(images: ImageFacts, own_model: ModelConfig, machine: MachineFacts) -> _Resolution:
    """Keep the weights' resolution, unless the photos are smaller and enlarging them would take too long."""
    own_side, side = min(own_model.image_shape), images.short_side
    if side >= own_side:
        return _Resolution(own_model, f"the weights' own; the photos are at least as large ({side} pixels)")
    adapted = adapt_resolution(own_model, max(side, MIN_ADAPTED_SIDE))
    if own_model.tokenizer != "patch" or adapted.num_patches >= own_model.num_patches:
        return _Resolution(own_model, f"the weights' own, because {side} pixels would need as many patches")
    seconds = estimate_seconds(images, own_model, machine, MIN_RESIZED_PASSES)
    if seconds <= MAX_RESIZE_SECONDS:
        reason = f"the weights' own: photos are enlarged from {side} pixels instead of making the patches smaller"
        return _Resolution(own_model, reason, MAX_RESIZE_SECONDS)
    own_sides, limit = "×".join(map(str, own_model.image_shape)), f"limit {MAX_RESIZE_SECONDS / 60:.0f}"
    minutes = f"{MIN_RESIZED_PASSES} passes would take {seconds / 60:.0f} minutes at the speed measured now, {limit}"
    own_settings = " ".join(
        f"model.{name}={format_value_for_command_line(getattr(own_model, name))}" for name in ("img_size", "patch_size")
    )
    return _Resolution(adapted, f"not enlarged to {own_sides}: {minutes}; to enlarge: {own_settings}")


def adapt_resolution(model: ModelConfig, side: int) -> ModelConfig:
    """Return the model for smaller photos: about 8×8 patches of equal size that cover the photos."""
    patch = math.ceil(side / ADAPTED_GRID)
    return replace(model, img_size=patch * max(2, round(side / patch)), patch_size=patch)


def _make_weights_settings(weights: WeightsAtHand, model: ModelConfig) -> dict[str, Any]:
    """Return the model's sizes. Its architecture comes from the weights."""
    names = ("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads")
    return {"weights": weights.ref} | {f"model.{name}": getattr(model, name) for name in names}


def _choose_augmentation(images: ImageFacts) -> dict[str, Any]:
    """Crop photos at random. Few passes over few images are not mixed. Gray images keep the defaults of their data."""
    mixing = (
        {}
        if images.num_images_after_holdout >= MANY_IMAGES
        else {"data.augment.mixup": 0.0, "data.augment.cutmix": 0.0}
    )
    if images.num_channels == 1 or images.has_default_augmentation:
        return mixing
    return mixing | {"data.augment.flip": 0.5, "data.augment.shift": 0, "data.augment.crop_scale": [0.5, 1.0]}


def _explain_batch_and_rate(images: ImageFacts, batch_size: int, passes_per_epoch: int) -> dict[str, str]:
    steps = images.num_images_after_holdout * passes_per_epoch // batch_size
    return {
        "batch size": f"{steps} steps per epoch (at least {MIN_STEPS_PER_EPOCH})",
        "learning rate": "grows with the square root of the batch size, and is smaller for wider models",
    }


def find_base_recipe(images: ImageFacts) -> str:
    """Return the built-in recipe whose network and training are used from scratch: of the same or of similar data."""
    if images.data_name in list_recipe_names():
        return images.data_name
    if images.num_channels == 1:
        return "digits" if images.short_side <= 16 else "mnist"
    return "cifar10"


def _choose_from_scratch(images: ImageFacts, machine: MachineFacts, reason: str) -> Choice:
    """Use the network and the training of a recorded recipe, for the images' size and number."""
    base_name = find_base_recipe(images)
    base = read_recipe(base_name)
    model = _resize_base_model(base.model, images)
    passes = max(base.train.epochs, min(MAX_SCRATCH_PASSES, MIN_SCRATCH_IMAGES_SEEN // images.num_images_after_holdout))
    affordable = max(MIN_PASSES, int(MAX_SECONDS / estimate_seconds(images, model, machine, 1)))
    reasons = {"start": reason, "network": f"as in the recipe {base_name}, whose result is recorded"}
    if affordable < passes:
        reasons["length"] = f"{affordable} instead of {passes} passes, to end within {MAX_SECONDS / 60:.0f} minutes"
        passes = affordable
    batch_size = base.train.batch_size
    if images.num_images_after_holdout // batch_size < MIN_STEPS_PER_EPOCH:
        batch_size = choose_batch_size(images.num_images_after_holdout)
    passes_per_epoch = choose_passes_per_epoch(images.num_images_after_holdout, batch_size)
    reasons |= _explain_batch_and_rate(images, batch_size, passes_per_epoch)
    lr_scale = math.sqrt(batch_size / base.train.batch_size)
    changes = {name: value for name, value in vars(model).items() if value != getattr(base.model, name)}
    settings = flatten_sections(find_non_default_settings(base)) | {
        **{f"model.{name}": value for name, value in changes.items()},
        "train.epochs": max(1, round(passes / passes_per_epoch)),
        "train.batch_size": batch_size,
        "train.lr": float(f"{lr_scale * base.train.lr:.2g}"),
        "train.muon_lr": float(f"{lr_scale * base.train.muon_lr:.2g}"),
        "data.passes_per_epoch": passes_per_epoch,
    }
    settings = {key: value for key, value in settings.items() if key != "name" and not _is_base_data(key, images)}
    return Choice(SCRATCH, settings, reasons, estimate_seconds(images, model, machine, passes))


def _resize_base_model(base_model: ModelConfig, images: ImageFacts) -> ModelConfig:
    """Return a recipe's network for the size of the images. Few images get a smaller network."""
    side = min(images.short_side, MAX_SCRATCH_SIDE)
    model = base_model if side == min(base_model.image_shape) else adapt_resolution(base_model, side)
    if images.num_images_after_holdout < FEW_IMAGES_FOR_SCRATCH and model.embed_dim > SMALL_NETWORK["embed_dim"]:
        model = replace(model, **SMALL_NETWORK)
    return replace(model, num_classes=images.num_classes, in_chans=images.num_channels)


def _is_base_data(key: str, images: ImageFacts) -> bool:
    """Return whether a setting of the base recipe belongs to its own data: it does not fit other images."""
    is_same_data = images.has_default_augmentation
    return key == "data.name" or (key.startswith("data.augment.") and not is_same_data)
