"""Draw the figure of `vitascope data preview`: images and their augmented versions."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from vitascope.cli.console import reject_settings_without_effect
from vitascope.data.config import AugmentConfig, resolve_augmentation
from vitascope.data.dataset import Dataset
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import draw_epoch_augmentation_parameters, select_step_draws
from vitascope.data.splits import load_train_and_validation_data
from vitascope.data.statistics import PREVIEW_SIZE
from vitascope.draw.images import draw_gallery
from vitascope.draw.style import save_figure
from vitascope.recipe.reading import list_recipe_names, read_recipe
from vitascope.recipe.train import DinoConfig
from vitascope.training.objectives.dino import NUM_GLOBAL_CROPS, make_augment_config_per_view

NUM_IMAGES, NUM_VERSIONS = 6, 8
USED_SETTINGS = ("data.", "dino.", "train.objective")


class TitledVersions(NamedTuple):
    images: list[Tensor]  # one batch per version
    titles: list[str]


def draw_and_save_augmentation_preview(
    data_name: str, overrides: list[str], data_root: str | None, seed: int, figure_path: Path
) -> Path:
    """Draw each image in a row with eight augmented versions, or with its crops for train.objective=dino."""
    base_recipe = _find_self_supervised_recipe(data_name, overrides)
    recipe = read_recipe(base_recipe, overrides)
    reject_settings_without_effect(overrides, USED_SETTINGS, "on the augmentation. Use settings of data.augment")
    config = replace(recipe.data, name=data_name, root=data_root or recipe.data.root, validation=0.0)
    data = load_train_and_validation_data(config, *PREVIEW_SIZE, seed)
    policy = resolve_augmentation(config.augment, data_name, data.train.image_shape[0], recipe.train.objective)
    height, width = data.train.images.shape[2:]
    preprocessing = replace(data.preprocessing, size=(height, width))
    samples = data.train.select_evenly(NUM_IMAGES)
    is_dino = recipe.train.objective == "dino"
    if is_dino:
        versions, titles = _make_dino_crops(preprocessing, samples, policy, recipe.dino, seed)
    else:
        versions, titles = _make_augmented_versions(preprocessing, samples, policy, seed)
    columns = [preprocessing.denormalize(images) for images in (preprocessing(samples.images), *versions)]
    rows = [[column[row].permute(1, 2, 0).numpy() for column in columns] for row in range(len(samples))]
    class_names = [data.classes[label] for label in samples.labels.tolist()]
    kind = "crops for DINO's student" if is_dino else "versions"
    augmentation = describe_augmentation(base_recipe, overrides, policy)
    is_resized = (height, width) == PREVIEW_SIZE[0] and not data_name.endswith(".npz")  # images of a folder
    original = f"the image resized to {height}×{width} pixels" if is_resized else "the original image"
    text = f"{data.source.name}: {original}, then {len(versions)} {kind} {augmentation}"
    return save_figure(draw_gallery(rows, class_names, ["original", *titles], text), figure_path)


def describe_augmentation(base_recipe: str | None, overrides: list[str], policy: AugmentConfig) -> str:
    """Describe where the augmentation comes from, its settings, and how images are mixed."""
    changed = ", ".join(override for override in overrides if override.startswith("data.augment."))
    source = f"as in recipe {base_recipe}" if base_recipe else "with the default augmentation of this data"
    source += f", changed by {changed}" if changed else ""
    text = f"{source} ({policy.description or 'no augmentation'})."
    mixes = {
        "mixup": "With mixup, a version is a weighted average of two images.",
        "cutmix": "With CutMix, a rectangle comes from another image.",
    }
    used = [sentence for name, sentence in mixes.items() if policy.mix_prob and getattr(policy, name)]
    return " ".join([text, *used, *(["The labels are mixed in the same proportion."] if used else [])])


def _find_self_supervised_recipe(data_name: str, overrides: list[str]) -> str | None:
    """Return the shipped self-supervised recipe for this data if `train.objective` names one: it has the crop sizes."""
    objectives = [text.partition("=")[2] for text in overrides if text.startswith("train.objective=")]
    names = [f"{data_name}-{objective}" for objective in objectives]
    return next((name for name in names if name in list_recipe_names()), None)


def _make_augmented_versions(
    preprocessing: Preprocessing, samples: Dataset, policy: AugmentConfig, seed: int
) -> TitledVersions:
    draws = draw_epoch_augmentation_parameters(policy, NUM_VERSIONS, len(samples), seed, epoch=0)
    versions = [
        preprocessing.augment_and_mix(samples.images, samples.labels, select_step_draws(draws, step), policy)[0]
        for step in range(NUM_VERSIONS)
    ]
    return TitledVersions(versions, [f"version {step + 1}" for step in range(NUM_VERSIONS)])


def _make_dino_crops(
    preprocessing: Preprocessing, samples: Dataset, policy: AugmentConfig, dino_config: DinoConfig, seed: int
) -> TitledVersions:
    """Return the two global crops, which the teacher gets too, and the local crops."""
    crops, local_size = [], (dino_config.local_size, dino_config.local_size)
    for view_index, view_policy in enumerate(make_augment_config_per_view(policy, dino_config)):
        draws = draw_epoch_augmentation_parameters(view_policy, 1, len(samples), seed, 0, view_index=view_index)
        size = local_size if view_index >= NUM_GLOBAL_CROPS else None
        crops.append(preprocessing.augment(samples.images, select_step_draws(draws, 0), view_policy, size))
    local_titles = [f"local {index + 1}" for index in range(dino_config.local_crops)]
    return TitledVersions(crops, ["global 1", "global 2", *local_titles])
