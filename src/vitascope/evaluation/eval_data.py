"""Choose the images to evaluate a run on: a split of its own data, or other data with the same classes."""

from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import torch

from vitascope.data.config import DataConfig
from vitascope.data.dataset import Dataset, DataSource, MemoryDataset
from vitascope.data.open_data import make_data_paths_absolute, open_data_by_name_or_path
from vitascope.errors import UserError, suggest_choice
from vitascope.run.directory import ExternalWeightsRun, Run
from vitascope.run.images import check_classes_unchanged, load_run_split_if_any, reset_missing_data_root
from vitascope.weights.model_info import ModelInfo

SPLITS = ("test", "val", "train")


@dataclass(frozen=True)
class EvalData:
    """The images to evaluate: the split `split` of `data`, a name or a resolved path."""

    data_name: str
    split: str
    samples: Dataset
    is_run_data: bool  # the run's own data
    unreadable_files: list[str] = field(default_factory=list)  # files that could not be read
    label_note: str = ""  # how labels without class names are read

    @property
    def is_run_validation(self) -> bool:
        return self.is_run_data and self.split == "val"


def load_eval_data(run: Run, model_info: ModelInfo, split: str | None, data_name: str | None) -> EvalData:
    """Return the images of a split; by default the test split, or all images if other data has no splits."""
    if isinstance(run, ExternalWeightsRun) and data_name is None:
        raise UserError(
            f"{run.model_ref} is not a run, so it has no data. Name the images to evaluate: --data NAME or FOLDER."
        )
    run_config = reset_missing_data_root(run.recipe.data)
    if data_name is not None and (
        isinstance(run, ExternalWeightsRun)
        or make_data_paths_absolute(replace(run_config, name=data_name, labels=None)).name
        != make_data_paths_absolute(replace(run_config, labels=None)).name
    ):
        return _load_eval_data_of_other_dataset(replace(run_config, name=data_name, labels=None), model_info, split)
    if split is not None and split not in SPLITS:
        splits = _list_existing_splits_or_all_names(run_config, model_info)
        raise UserError(f"There is no split '{split}'. {suggest_choice(split, splits)}")
    if split in ("val", "train"):
        samples = load_run_split_if_any(run, model_info, split)
        if samples is None:
            raise UserError("The run has no validation images (data.validation=0). Use --split test or train.")
        return EvalData(run_config.name, split, samples, is_run_data=True)
    source = _open_data_at_stored_image_size(run_config, model_info)
    if "test" not in source.split_names:
        raise UserError(
            f"{run_config.name} has no test images. Add a test/ folder, or use the validation images: --split val."
        )
    check_classes_unchanged(run_config.name, source.classes, model_info)
    return EvalData(
        run_config.name, "test", source.load_split("test"), is_run_data=True, unreadable_files=source.skipped_paths
    )


def _list_existing_splits_or_all_names(config: DataConfig, model_info: ModelInfo) -> list[str]:
    """Return the splits of a run's data that exist, or all split names if the data is not on this machine."""
    try:
        split_names = _open_data_at_stored_image_size(config, model_info).split_names
    except UserError:
        return list(SPLITS)
    return [name for name in SPLITS if name in split_names or (name == "val" and config.validation > 0)]


def has_test_images(run: Run, model_info: ModelInfo) -> bool:
    return "test" in _open_data_at_stored_image_size(reset_missing_data_root(run.recipe.data), model_info).split_names


def _load_eval_data_of_other_dataset(config: DataConfig, model_info: ModelInfo, split: str | None) -> EvalData:
    source = _open_data_at_stored_image_size(config, model_info)
    if source.split_names == ("train",):  # class folders, or one pair of arrays: there is nothing to choose from
        if split is not None:
            raise UserError(f"{config.name} has no splits. Omit --split to evaluate all its images.")
        stored_split, split_name = "train", "all"
    else:
        stored_split = split_name = split or "test"
    if stored_split not in source.split_names:
        raise UserError(
            f"{config.name} has no {stored_split} split. Choose one with --split: {', '.join(source.split_names)}."
        )
    samples = _load_split_with_model_labels(source, Path(config.name).name, stored_split, model_info.classes)
    return EvalData(
        make_data_paths_absolute(config).name,
        split_name,
        samples,
        is_run_data=False,
        unreadable_files=source.skipped_paths,
        label_note="" if source.has_class_names else _describe_label_order(len(source.classes), model_info.classes),
    )


def _open_data_at_stored_image_size(config: DataConfig, model_info: ModelInfo) -> DataSource:
    """Open the data; images in a folder are read at the size of the run's stored images."""
    channels, rows, columns = model_info.stored
    return open_data_by_name_or_path(replace(config, memory=inf), (rows, columns), channels, must_be_trainable=False)


def _describe_label_order(num_labels: int, model_classes: list[str]) -> str:
    """Say which classes labels without names mean; empty if the model's classes have no names either."""
    if _has_no_class_names(model_classes):
        return ""
    labels = "Label 0 is" if num_labels == 1 else f"Labels 0 to {num_labels - 1} are"
    return f"{labels} read as {_join_first_names(model_classes[:num_labels], 10)}."


def _has_no_class_names(classes: list[str]) -> bool:
    return classes == [str(index) for index in range(len(classes))]


def _load_split_with_model_labels(source: DataSource, file_name: str, split: str, model_classes: list[str]) -> Dataset:
    """Match classes by name, or by index if the data has no names. Classes may be missing, but not new."""
    names = source.classes
    if not model_classes:
        raise UserError(
            "The model has no classifier, so it has no accuracy. Fine-tune it: vitascope train RECIPE weights=…"
        )
    if not source.has_class_names:
        if len(names) > len(model_classes):
            indexed = [f"{index} {name}" for index, name in enumerate(model_classes)]
            known = (
                "0 to " + str(len(indexed) - 1)
                if _has_no_class_names(model_classes)
                else _join_first_names(indexed, 10)
            )
            raise UserError(
                f"{file_name} has labels 0 to {len(names) - 1}, but the model has {len(model_classes)} classes "
                f"({known}). Use the model's labels, and leave out images of other classes."
            )
        names = model_classes[: len(names)]
    index_by_name = {_replace_underscores_with_spaces(name): index for index, name in enumerate(model_classes)} | {
        name: index for index, name in enumerate(model_classes)
    }
    model_indices = [
        index_by_name.get(name, index_by_name.get(_replace_underscores_with_spaces(name))) for name in names
    ]
    unknown = [name for name, index in zip(names, model_indices, strict=True) if index is None]
    if unknown:
        raise UserError(
            f"{source.name} has classes unknown to the model: {_join_first_names(unknown, 5)}. "
            f"The model's classes: {_join_first_names(model_classes, 10)}."
        )
    samples = source.load_split(split)
    labels = torch.tensor(model_indices)[samples.labels]
    return MemoryDataset(samples.images, labels, model_classes, samples.files)


def _join_first_names(names: list[str], max_names: int) -> str:
    return ", ".join(names[:max_names]) + (" …" if len(names) > max_names else "")


def _replace_underscores_with_spaces(class_name: str) -> str:
    """Spell African_elephant as African elephant, so that folder names match class lists."""
    return class_name.replace("_", " ").strip()
