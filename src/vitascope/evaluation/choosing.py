"""A run, a split's name, perhaps other data -> the images to judge it by, with the run's own class numbers."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitascope.data.config import DataConfig
from vitascope.data.opening import open_source
from vitascope.data.source import Source, Split
from vitascope.data.training_data import open_training_data
from vitascope.errors import UserError, did_you_mean
from vitascope.recipe.schema import Recipe
from vitascope.run.weights import ModelFacts

SPLITS = ("test", "val", "train")


@dataclass(frozen=True)
class Choice:
    """Which images: of `data` (a name or a path), the part called `split`."""

    data: str
    split: str
    images: Split


def choose(recipe: Recipe, facts: ModelFacts, split: str | None, data: str | None) -> Choice:
    """Without a split: the test images, or all images where other data has only one part."""
    if split is not None and split not in SPLITS:
        raise UserError(f"--split {split} is unknown. {did_you_mean(split, SPLITS)}")
    if data is not None:
        return _other_data(replace(here(recipe.data), name=data), facts, split)
    own = here(recipe.data)
    if split in ("val", "train"):
        found = watched_or_learnt(recipe, facts, split)
        if found is None:
            raise UserError("data.validation=0 held no images back. Use --split test or train.")
        return Choice(own.name, split, found)
    source = _open(own, facts)
    if "test" not in source.splits:
        raise UserError(f"{own.name} has no test images. Add a test/ folder, or use --split val.")
    if source.classes != facts.classes:
        raise UserError(f"{own.name} has other classes now than the run learnt: {source.classes[:5]} …")
    return Choice(own.name, "test", source.load("test"))


def watched_or_learnt(recipe: Recipe, facts: ModelFacts, split: str) -> Split | None:
    """The run's own validation or training images; None where none were held back."""
    size, channels = facts.model.image_shape, facts.model.in_chans
    data = open_training_data(here(recipe.data), size, channels, recipe.train.seed)
    if data.classes != facts.classes:
        raise UserError(f"{recipe.data.name} has other classes now than the run learnt: {data.classes[:5]} …")
    return data.train if split == "train" else data.validation


def _other_data(config: DataConfig, facts: ModelFacts, split: str | None) -> Choice:
    source = _open(config, facts)
    if split is None and "test" not in source.splits:
        return Choice(config.name, "all", _renumbered(source, "train", facts.classes))
    split = split or "test"
    if split not in source.splits:
        raise UserError(f"{config.name} has no {split} part, only {', '.join(source.splits)}.")
    return Choice(config.name, split, _renumbered(source, split, facts.classes))


def here(config: DataConfig) -> DataConfig:
    """A run that came from another machine: its data root is not here, so look in this machine's."""
    return config if config.root is None or Path(config.root).is_dir() else replace(config, root=None)


def _open(config: DataConfig, facts: ModelFacts) -> Source:
    """A folder's images are read at the size the run's images were stored in."""
    channels, rows, columns = facts.stored
    return open_source(config, (rows, columns), channels)


def _renumbered(source: Source, split: str, classes: list[str]) -> Split:
    """Classes are matched by name; some may be missing, none may be new."""
    new = [name for name in source.classes if name not in classes]
    if new:
        raise UserError(
            f"{source.name} has classes the run never learnt: {', '.join(new[:5])}{' …' if len(new) > 5 else ''}. "
            f"It knows {', '.join(classes[:10])}{' …' if len(classes) > 10 else ''}."
        )
    found = source.load(split)
    numbers = torch.tensor([classes.index(name) for name in source.classes])
    return replace(found, labels=numbers[found.labels])
