"""Load the images that a run was trained and validated on, and check that they are unchanged."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from vitascope.data.config import DataConfig
from vitascope.data.dataset import Dataset, has_fingerprint
from vitascope.data.open_data import load_train_and_validation_data
from vitascope.errors import UserError
from vitascope.run.directory import ExternalWeightsRun, Run
from vitascope.weights.model_info import ModelInfo


def load_run_split_if_any(run: Run, model_info: ModelInfo, split: str, error_hint: str = "") -> Dataset | None:
    """Return exactly the run's validation or training images; None if it has no validation images.

    `error_hint` ends the error message for a model that is not a run."""
    if isinstance(run, ExternalWeightsRun):
        raise UserError(
            f"{run.model_ref} is not a run, so it has no training or validation images. {error_hint}".rstrip()
        )
    recipe = run.recipe
    if split == "val" and recipe.data.validation == 0:
        return None
    size, channels = model_info.model.image_shape, model_info.model.in_chans
    data_config = replace(reset_missing_data_root(recipe.data), memory=inf)
    data = load_train_and_validation_data(data_config, size, channels, recipe.train.seed)
    check_classes_unchanged(recipe.data.name, data.classes, model_info)
    data_hash = run.machine.get("data_hash")
    if data_hash is not None and not has_fingerprint(data.train, data_hash):
        raise UserError(
            f"{recipe.data.name} has changed since the run was trained. The run's training and validation images "
            "can no longer be identified."
        )
    return data.train if split == "train" else data.validation


class RunSample(NamedTuple):
    """Some of a run's images, with their labels and a description: "validation" or "training"."""

    samples: Dataset
    description: str


def try_to_sample_run_images(run: Run, model_info: ModelInfo, max_images: int) -> RunSample | None:
    """Return evenly chosen validation (else training) images; None if they are not on this machine.

    Test images are never used."""
    for split, description in (("val", "validation"), ("train", "training")):
        try:
            samples = load_run_split_if_any(run, model_info, split)
        except UserError:
            continue
        if samples is not None:
            return RunSample(samples.select_evenly(max_images), description)
    return None


def reset_missing_data_root(config: DataConfig) -> DataConfig:
    """Use this machine's data folder if the run's own does not exist here."""
    return config if config.root is None or Path(config.root).is_dir() else replace(config, root=None)


def check_classes_unchanged(data_name: str, classes: list[str], model_info: ModelInfo) -> None:
    if classes != model_info.classes:
        raise UserError(
            f"The classes of {data_name} have changed since the run was trained. "
            f"They are now: {', '.join(classes[:5])} …"
        )
