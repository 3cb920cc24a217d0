"""Choose the images to evaluate a run on: a split of its own data, or other data with the same classes."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vitascope.data.config import DataConfig
from vitascope.data.dataset import DataSource, Split
from vitascope.data.open_data import open_data_source, resolve_data_paths
from vitascope.data.splits import open_training_data
from vitascope.data.statistics import compute_data_hash
from vitascope.errors import UserError, suggest_choice
from vitascope.run.directory import ExternalModel, Run
from vitascope.weights.model_info import ModelInfo

SPLITS = ("test", "val", "train")


@dataclass(frozen=True)
class EvalData:
    """The images to evaluate: the split `split` of `data`, a name or a resolved path."""

    data_name: str
    split: str
    samples: Split
    is_run_data: bool  # the run's own data
    unreadable_files: list[str] = field(default_factory=list)  # files that could not be read


def open_eval_data(run: Run, model_info: ModelInfo, split: str | None, data_name: str | None) -> EvalData:
    """Return the images of a split; by default the test split, or all images if other data has no splits."""
    if split is not None and split not in SPLITS:
        raise UserError(f"There is no split '{split}'. {suggest_choice(split, SPLITS)}")
    if isinstance(run, ExternalModel) and data_name is None:
        raise UserError(
            f"{run.model_ref} is not a run, so it has no data. Name the images to evaluate: --data NAME or FOLDER."
        )
    own = use_local_data_root(run.recipe.data)
    if data_name is not None and (
        isinstance(run, ExternalModel)
        or resolve_data_paths(replace(own, name=data_name)).name != resolve_data_paths(own).name
    ):
        return _open_other_data(replace(own, name=data_name), model_info, split)
    if split in ("val", "train"):
        found = load_run_split(run, model_info, split)
        if found is None:
            raise UserError("The run has no validation images (data.validation=0). Use --split test or train.")
        return EvalData(own.name, split, found, is_run_data=True)
    source = _open_data_source(own, model_info)
    if "test" not in source.split_names:
        raise UserError(
            f"{own.name} has no test images. Add a test/ folder. For validation images: evaluate --split val."
        )
    _check_classes_unchanged(own.name, source.classes, model_info)
    return EvalData(
        own.name, "test", source.load_split("test"), is_run_data=True, unreadable_files=source.skipped_paths
    )


def load_run_split(run: Run, model_info: ModelInfo, split: str) -> Split | None:
    """Return exactly the run's validation or training images; None if it has no validation images."""
    if isinstance(run, ExternalModel):
        raise UserError(f"{run.model_ref} is not a run, so it has no training or validation images.")
    recipe = run.recipe
    if split == "val" and recipe.data.validation == 0:
        return None
    size, channels = model_info.model.image_shape, model_info.model.in_chans
    data = open_training_data(use_local_data_root(recipe.data), size, channels, recipe.train.seed)
    _check_classes_unchanged(recipe.data.name, data.classes, model_info)
    known = run.machine.get("data_hash")
    if known is not None and known != compute_data_hash(data.train.images, data.train.labels):
        raise UserError(
            f"{recipe.data.name} has changed since the run was trained. The run's training and validation images "
            "can no longer be identified."
        )
    return data.train if split == "train" else data.validation


def sample_run_images(run: Run, model_info: ModelInfo, max_images: int) -> tuple[Split, str] | None:
    """Return evenly chosen validation (else training) images and which they are; None if they are not on this machine.

    Test images are never used."""
    for name, words in (("val", "validation"), ("train", "training")):
        try:
            split = load_run_split(run, model_info, name)
        except UserError:
            continue
        if split is not None:
            return split.select_evenly(max_images), words
    return None


def use_local_data_root(config: DataConfig) -> DataConfig:
    """Use this machine's data folder if the run's own does not exist here."""
    return config if config.root is None or Path(config.root).is_dir() else replace(config, root=None)


def _open_other_data(config: DataConfig, model_info: ModelInfo, split: str | None) -> EvalData:
    source = _open_data_source(config, model_info)
    if source.split_names == ("train",):  # class folders, or one pair of arrays: there is nothing to choose from
        if split is not None:
            raise UserError(f"{config.name} has no splits. Omit --split to evaluate all its images.")
        part, name = "train", "all"
    else:
        part = name = split or "test"
    if part not in source.split_names:
        raise UserError(f"{config.name} has no {part} split. Choose one with --split: {', '.join(source.split_names)}.")
    images = _load_with_model_labels(source, part, model_info.classes)
    return EvalData(
        resolve_data_paths(config).name, name, images, is_run_data=False, unreadable_files=source.skipped_paths
    )


def _open_data_source(config: DataConfig, model_info: ModelInfo) -> DataSource:
    """Open the data; images in a folder are read at the size of the run's stored images."""
    channels, rows, columns = model_info.stored
    return open_data_source(config, (rows, columns), channels, for_training=False)


def _check_classes_unchanged(data_name: str, classes: list[str], model_info: ModelInfo) -> None:
    if classes != model_info.classes:
        raise UserError(
            f"The classes of {data_name} have changed since the run was trained. They are now: {', '.join(classes[:5])} …"
        )


def _load_with_model_labels(source: DataSource, split: str, model_classes: list[str]) -> Split:
    """Match classes by name, or by index if the data has no names. Classes may be missing, but not new."""
    names = source.classes
    if not model_classes:
        raise UserError(
            "The model has no classifier, so it has no accuracy. Fine-tune it: vitascope train RECIPE weights=…"
        )
    if not source.has_class_names and len(names) <= len(model_classes):
        names = model_classes[: len(names)]
    numbers = {_normalize_class_name(name): number for number, name in enumerate(model_classes)} | {
        name: number for number, name in enumerate(model_classes)
    }
    known = [numbers.get(name, numbers.get(_normalize_class_name(name))) for name in names]
    new = [name for name, number in zip(names, known, strict=True) if number is None]
    if new:
        raise UserError(
            f"{source.name} has classes unknown to the model: {', '.join(new[:5])}{' …' if len(new) > 5 else ''}. "
            f"The model's classes: {', '.join(model_classes[:10])}{' …' if len(model_classes) > 10 else ''}."
        )
    found = source.load_split(split)
    return replace(found, labels=torch.tensor(known)[found.labels])


def _normalize_class_name(class_name: str) -> str:
    """Spell African_elephant as African elephant, so that folder names match class lists."""
    return class_name.replace("_", " ").strip()
