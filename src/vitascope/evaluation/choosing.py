"""Choose the images to evaluate a run on: a split of its own data, or other data with the same classes."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vitascope.data.config import DataConfig
from vitascope.data.opening import open_source, settled
from vitascope.data.source import Source, Split
from vitascope.data.statistics import data_hash
from vitascope.data.training_data import open_training_data
from vitascope.errors import UserError, did_you_mean
from vitascope.run.directory import Outside, Run
from vitascope.weights.facts import ModelFacts

SPLITS = ("test", "val", "train")


@dataclass(frozen=True)
class Choice:
    """The images to evaluate: the split `split` of `data`, a name or a resolved path."""

    data: str
    split: str
    images: Split
    own: bool  # the run's own data
    skipped: list[str] = field(default_factory=list)  # files that could not be read


def choose(run: Run, facts: ModelFacts, split: str | None, data: str | None) -> Choice:
    """Return the images of a split; by default the test split, or all images if other data has no splits."""
    if split is not None and split not in SPLITS:
        raise UserError(f"There is no split '{split}'. {did_you_mean(split, SPLITS)}")
    if isinstance(run, Outside) and data is None:
        raise UserError(
            f"{run.word} is not a run, so it has no data. Name the images to evaluate: --data NAME or FOLDER."
        )
    own = here(run.recipe.data)
    if data is not None and (isinstance(run, Outside) or settled(replace(own, name=data)).name != settled(own).name):
        return _other_data(replace(own, name=data), facts, split)
    if split in ("val", "train"):
        found = own_images(run, facts, split)
        if found is None:
            raise UserError("The run has no validation images (data.validation=0). Use --split test or train.")
        return Choice(own.name, split, found, own=True)
    source = _open(own, facts)
    if "test" not in source.splits:
        raise UserError(
            f"{own.name} has no test images. Add a test/ folder. For validation images: evaluate --split val."
        )
    _check_classes(own.name, source.classes, facts)
    return Choice(own.name, "test", source.load("test"), own=True, skipped=source.skipped)


def own_images(run: Run, facts: ModelFacts, split: str) -> Split | None:
    """Return exactly the run's validation or training images; None if it has no validation images."""
    if isinstance(run, Outside):
        raise UserError(f"{run.word} is not a run, so it has no training or validation images.")
    recipe = run.recipe
    if split == "val" and recipe.data.validation == 0:
        return None
    size, channels = facts.model.image_shape, facts.model.in_chans
    data = open_training_data(here(recipe.data), size, channels, recipe.train.seed)
    _check_classes(recipe.data.name, data.classes, facts)
    known = run.machine.get("data_hash")
    if known is not None and known != data_hash(data.train.images, data.train.labels):
        raise UserError(
            f"{recipe.data.name} has changed since the run was trained. The run's training and validation images "
            "can no longer be identified."
        )
    return data.train if split == "train" else data.validation


def some_own_images(run: Run, facts: ModelFacts, most: int) -> tuple[Split, str] | None:
    """Return evenly chosen validation (else training) images and which they are; None if they are not on this machine.

    Test images are never used."""
    for name, words in (("val", "validation"), ("train", "training")):
        try:
            split = own_images(run, facts, name)
        except UserError:
            continue
        if split is not None:
            return split.evenly(most), words
    return None


def here(config: DataConfig) -> DataConfig:
    """Use this machine's data folder if the run's own does not exist here."""
    return config if config.root is None or Path(config.root).is_dir() else replace(config, root=None)


def _other_data(config: DataConfig, facts: ModelFacts, split: str | None) -> Choice:
    source = _open(config, facts)
    if source.splits == ("train",):  # class folders, or one pair of arrays: there is nothing to choose from
        if split is not None:
            raise UserError(f"{config.name} has no splits. Omit --split to evaluate all its images.")
        part, name = "train", "all"
    else:
        part = name = split or "test"
    if part not in source.splits:
        raise UserError(f"{config.name} has no {part} split. Choose one with --split: {', '.join(source.splits)}.")
    images = _renumbered(source, part, facts.classes)
    return Choice(settled(config).name, name, images, own=False, skipped=source.skipped)


def _open(config: DataConfig, facts: ModelFacts) -> Source:
    """Open the data; images in a folder are read at the size of the run's stored images."""
    channels, rows, columns = facts.stored
    return open_source(config, (rows, columns), channels, to_train=False)


def _check_classes(name: str, classes: list[str], facts: ModelFacts) -> None:
    if classes != facts.classes:
        raise UserError(
            f"The classes of {name} have changed since the run was trained. They are now: {', '.join(classes[:5])} …"
        )


def _renumbered(source: Source, split: str, classes: list[str]) -> Split:
    """Match classes by name, or by index if the data has no names. Classes may be missing, but not new."""
    names = source.classes
    if not classes:
        raise UserError(
            "The model has no classifier, so it has no accuracy. Fine-tune it: vitascope train RECIPE weights=…"
        )
    if not source.named and len(names) <= len(classes):
        names = classes[: len(names)]
    numbers = {_spelt(name): number for number, name in enumerate(classes)} | {
        name: number for number, name in enumerate(classes)
    }
    known = [numbers.get(name, numbers.get(_spelt(name))) for name in names]
    new = [name for name, number in zip(names, known, strict=True) if number is None]
    if new:
        raise UserError(
            f"{source.name} has classes unknown to the model: {', '.join(new[:5])}{' …' if len(new) > 5 else ''}. "
            f"The model's classes: {', '.join(classes[:10])}{' …' if len(classes) > 10 else ''}."
        )
    found = source.load(split)
    return replace(found, labels=torch.tensor(known)[found.labels])


def _spelt(name: str) -> str:
    """Spell African_elephant as African elephant, so that folder names match class lists."""
    return name.replace("_", " ").strip()
