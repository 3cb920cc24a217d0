"""Draw the figure of `vitascope data preview`: images and their augmented versions."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vitascope.data.config import AugmentConfig
from vitascope.data.description import PREVIEW_SIZE
from vitascope.data.draws import epoch_draws, one_step
from vitascope.data.policy import resolve
from vitascope.data.preparation import Preparation
from vitascope.data.source import Split
from vitascope.data.training_data import open_training_data
from vitascope.draw.gallery import draw_gallery
from vitascope.draw.look import save
from vitascope.recipe.pretrain import DinoConfig
from vitascope.recipe.reading import read_recipe, recipe_names
from vitascope.training.dino import GLOBALS, view_policies

ROWS, VARIANTS = 6, 8


def draw_preview(name: str, settings: list[str], root: str | None, seed: int, out: Path) -> Path:
    """Draw each image in a row with eight augmented versions, or with its crops for train.objective=dino."""
    base = _base(name, settings)
    recipe = read_recipe(base, settings)
    config = replace(recipe.data, name=name, root=root or recipe.data.root, validation=0.0)
    data = open_training_data(config, *PREVIEW_SIZE, seed)
    policy = resolve(config.augment, name, data.train.images.shape[1], recipe.train.objective)
    height, width = data.train.images.shape[2:]
    prepare = replace(data.preparation, size=(height, width))
    chosen = data.train.evenly(ROWS)
    if recipe.train.objective == "dino":
        versions, titles = _crops(prepare, chosen, policy, recipe.dino, seed)
    else:
        versions, titles = _varied(prepare, chosen, policy, seed)
    columns = [prepare.undone(part) for part in (prepare(chosen.images), *versions)]
    rows = [[column[row].permute(1, 2, 0).numpy() for column in columns] for row in range(len(chosen))]
    names = [data.classes[label] for label in chosen.labels.tolist()]
    kind = "crops for DINO's student" if recipe.train.objective == "dino" else "versions"
    text = f"{data.source.name}: the original image, then {len(versions)} {kind} {_describe(base, settings, policy)}"
    return save(draw_gallery(rows, names, ["original", *titles], text), out)


def _describe(base: str | None, settings: list[str], policy: AugmentConfig) -> str:
    """Describe where the augmentation comes from, its settings, and how images are mixed."""
    changed = ", ".join(word for word in settings if word.startswith("data.augment."))
    which = f"as in recipe {base}" if base else "with the default augmentation of this data"
    which += f", changed by {changed}" if changed else ""
    text = f"{which} ({policy.description or 'no augmentation'})."
    mixes = {
        "mixup": "With mixup, a version is a weighted average of two images.",
        "cutmix": "With CutMix, a rectangle comes from another image.",
    }
    used = [sentence for name, sentence in mixes.items() if policy.mix_prob and getattr(policy, name)]
    return " ".join([text, *used, *(["The labels are mixed in the same proportion."] if used else [])])


def _base(name: str, settings: list[str]) -> str | None:
    """Return the shipped self-supervised recipe for this data if `train.objective` names one: it has the crop sizes."""
    asked = [f"{name}-{word.partition('=')[2]}" for word in settings if word.startswith("train.objective=")]
    return next((found for found in asked if found in recipe_names()), None)


def _varied(prepare: Preparation, chosen: Split, policy: AugmentConfig, seed: int) -> tuple[list[Tensor], list[str]]:
    draws = epoch_draws(policy, VARIANTS, len(chosen), seed, epoch=0)
    found = [
        prepare.varied(chosen.images, chosen.labels, one_step(draws, number), policy)[0] for number in range(VARIANTS)
    ]
    return found, [f"version {number + 1}" for number in range(VARIANTS)]


def _crops(
    prepare: Preparation, chosen: Split, policy: AugmentConfig, dino: DinoConfig, seed: int
) -> tuple[list[Tensor], list[str]]:
    """Return the two global crops, which the teacher gets too, and the local crops."""
    found, small = [], (dino.local_size, dino.local_size)
    for view, own in enumerate(view_policies(policy, dino)):
        draws = one_step(epoch_draws(own, 1, len(chosen), seed, 0, view=view), 0)
        found.append(prepare.view(chosen.images, draws, own, small if view >= GLOBALS else None))
    return found, ["global 1", "global 2", *[f"local {number + 1}" for number in range(dino.local_crops)]]
