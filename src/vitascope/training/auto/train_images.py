"""Train on images without a recipe: choose the settings, print the choice, store it as a recipe, train, and report."""

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from torch.nn import functional as F

from vitascope.data.config import DataConfig
from vitascope.data.open_data import make_data_paths_absolute
from vitascope.errors import UserError
from vitascope.inference.hardware import choose_or_check_device
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.reading import DATA_PREFIX, list_recipe_names, read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run, is_run_folder
from vitascope.run.files import write_atomically
from vitascope.run.machine import get_device_names_by_type, get_device_or_cpu_name
from vitascope.training.auto.choose_settings import (
    Choice,
    MachineFacts,
    choose_settings,
    find_base_recipe,
    find_reason_for_scratch,
)
from vitascope.training.auto.find_weights import WeightsAtHand, find_weights
from vitascope.training.auto.image_facts import collect_image_facts
from vitascope.training.auto.messages import CHOSEN_FILE, describe_choice, describe_result
from vitascope.training.train import train_recipe

SETTINGS_BY_DECISION = {  # the keys in `Choice.reasons` and the settings that they explain
    "resolution": ("model.img_size", "model.patch_size"),
    "batch size": ("train.batch_size", "data.passes_per_epoch"),
    "learning rate": ("train.lr",),
    "length": ("train.epochs", "data.passes_per_epoch"),
    "classifier": ("train.head_init",),
}
SPEED_STEPS, SPEED_BATCH_SIZES, SPEED_DEPTH = 3, {"cpu": 8, "cuda": 64}, 2


def choose_settings_and_train(data_ref: str, overrides: Sequence[str], runs_folder: Path, console: Console) -> Run:
    """Choose the settings for these images, print and store the choice, train, and print the result.

    `overrides` (key=value) replace chosen settings."""
    data_name, given = _get_data_name(data_ref), _split_overrides(overrides)
    recipe_of_user = _read_user_settings(data_name, overrides)
    images = collect_image_facts(recipe_of_user.data, is_validation_given="data.validation" in given)
    scratch_reason = None if "weights" in given else find_reason_for_scratch(images)
    weights = WeightsAtHand(origin=scratch_reason) if scratch_reason else _find_weights(given, recipe_of_user.data)
    machine = measure_machine(
        recipe_of_user, weights.model if weights.ref else read_recipe(find_base_recipe(images)).model
    )
    choice = remove_reasons_of_given_settings(choose_settings(images, weights, machine), given)
    text = format_chosen_recipe(data_ref, recipe_of_user, choice, overrides)
    recipe = _read_recipe_text(text)
    for line in describe_choice(images, weights, machine, choice, recipe):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    run = train_recipe(recipe, runs_folder, console, [ChosenRecipeWriter(text)], suggest_evaluation=False)
    console.print(describe_result(run, images), highlight=False, soft_wrap=True, markup=False)
    return run


def remove_reasons_of_given_settings(choice: Choice, given: Mapping[str, str]) -> Choice:
    """Return the choice without the reasons of decisions that the user's settings replace."""
    replaced = {decision for decision, keys in SETTINGS_BY_DECISION.items() if any(key in given for key in keys)}
    return replace(choice, reasons={name: text for name, text in choice.reasons.items() if name not in replaced})


class ChosenRecipeWriter:
    """Write the chosen recipe to the run folder when the run begins."""

    def __init__(self, text: str) -> None:
        self.text = text

    def begin_run(self, run: Run) -> None:
        write_atomically(run.get_path(CHOSEN_FILE), self.text)

    def log_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Nothing is logged."""

    def close(self) -> None:
        """Nothing is open."""


def _get_data_name(data_ref: str) -> str:
    """Return data.name. A run instead of images is rejected."""
    name = data_ref.removeprefix(DATA_PREFIX)
    if not name:
        raise UserError("data: names no data set. Write data:NAME, such as data:cifar10, or data:FOLDER.")
    path = Path(name)
    if is_run_folder(path) or (path.is_dir() and next(path.glob("*/recipe.yaml"), None)):
        raise UserError(
            f"{data_ref} contains a run, not images. To resume it: vitascope resume {data_ref}. To train with the same "
            "settings again, give its recipe.yaml."
        )
    return name


def _split_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Return key -> text of the user's settings. data.name is rejected, because the images are already given."""
    given = {key: text for key, _, text in (override.partition("=") for override in overrides)}
    if "data.name" in given:
        raise UserError("data.name is given twice: the images come first, before the settings. Leave data.name out.")
    return given


def _read_user_settings(data_name: str, overrides: Sequence[str]) -> Recipe:
    """Read the user's settings without the model's, which may depend on the choice; reject unknown ones."""
    needs_weights = [f"weights={data_name}"]  # train.tune is accepted only with weights; they are not opened here
    checked = [override for override in overrides if not override.startswith(("model.", "weights="))]
    recipe = read_recipe(None, [*needs_weights, *checked])
    return replace(recipe, data=replace(recipe.data, name=data_name))


def _find_weights(given: Mapping[str, str], data: DataConfig) -> WeightsAtHand:
    return find_weights(given.get("weights"), data.root, may_download=data.download)


def measure_machine(recipe: Recipe, model: ModelConfig) -> MachineFacts:
    """Measure the speed of training on the device, with two blocks of the model, in about a second."""
    device = choose_or_check_device(recipe.train.device)
    name = get_device_or_cpu_name(get_device_names_by_type(), device)
    return MachineFacts(device, name, measure_training_flops_per_second(device, model, recipe.train.threads))


def measure_training_flops_per_second(device: str, model: ModelConfig, num_threads: int = 0) -> float:
    """Time forward and backward passes of random images, after one that is not counted. The fastest counts."""
    config = replace(model, depth=min(SPEED_DEPTH, model.depth), drop_path_rate=0.0)
    batch_size, threads = SPEED_BATCH_SIZES.get(device, SPEED_BATCH_SIZES["cpu"]), torch.get_num_threads()
    torch.set_num_threads(num_threads or threads)
    times = []
    with torch.random.fork_rng(devices=[]):
        network = VisionTransformer(config).to(device)
        images = torch.randn(batch_size, config.in_chans, *config.image_shape).to(device)
        labels = torch.zeros(batch_size, dtype=torch.long, device=device)
        for _ in range(1 + SPEED_STEPS):
            start = time.perf_counter()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(network(images).float(), labels)
            loss.backward()
            loss.item()  # waits for the device
            next(network.parameters()).grad.flatten()[0].item()  # pyright: ignore[reportOptionalMemberAccess]
            times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 3 * count_forward_flops_per_image(config) * batch_size / min(times[1:])


def format_chosen_recipe(data_ref: str, user: Recipe, choice: Choice, overrides: Sequence[str]) -> str:
    """Return the choice as a recipe with comments. Paths are absolute, so that it works in every folder."""
    data = make_data_paths_absolute(user.data)
    settings = {"name": make_recipe_name(data.name)} | dict(choice.settings) | {"data.name": data.name}
    if data.root:
        settings["data.root"] = data.root
    config = OmegaConf.create()
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    config = OmegaConf.merge(config, OmegaConf.from_dotlist([text for text in overrides if text != "weights="]))
    lines = [
        f"# {choice.start[0].upper()}{choice.start[1:]}, chosen by: vitascope train {' '.join([data_ref, *overrides])}"
    ]
    lines += [f"#   {decision}: {reason}" for decision, reason in choice.reasons.items()]
    lines += ["# To train with the same settings again: vitascope train RUN/chosen.yaml"]
    return "\n".join(" ".join(line.split("\n")) for line in lines) + "\n" + OmegaConf.to_yaml(config)


def make_recipe_name(data_name: str) -> str:
    """Return the name of the runs' folder: that of the images. A recipe's name gets an ending."""
    path = Path(data_name)
    stem = {".npz": path.stem, ".csv": path.parent.name}.get(path.suffix, path.name)
    name = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "images"
    return f"{name}-auto" if name in list_recipe_names() else name


def _read_recipe_text(text: str) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CHOSEN_FILE
        path.write_text(text, encoding="utf-8")
        return read_recipe(str(path))
