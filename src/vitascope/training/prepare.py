"""Prepare a run: open its data, complete its recipe, load its pretrained weights, and build its state on the device."""

import time
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from vitascope.data.open_data import TrainingData, load_train_and_validation_data, make_data_paths_absolute
from vitascope.data.sources.folder import describe_unreadable_files
from vitascope.errors import UserError, format_count
from vitascope.inference.hardware import set_malloc_to_keep_memory
from vitascope.inference.kernel_choice import KernelWorkload, choose_fastest_kernels, set_kernels
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.choices import complete_augmentation_for_objective, load_objective
from vitascope.recipe.schema import Recipe
from vitascope.training.hardware import Hardware, choose_hardware_and_set_threads
from vitascope.training.initial_weights import (
    find_validation_leakage_warning,
    fit_head_by_linear_probe,
    fold_whitening_into_patch_embedding,
    format_adaptation_report,
    load_and_adapt_pretrained_weights,
    make_model_ref_absolute,
)
from vitascope.training.messages import (
    choose_batch_size,
    describe_batch_size_change,
    describe_default_augmentation,
    describe_image_file_conversion,
    describe_image_shape,
)
from vitascope.training.optim.build import set_train_mode_except_frozen, set_trainable_and_add_lora
from vitascope.training.state import TrainState
from vitascope.weights.adaptation import AdaptedModel


class PreparedRun(NamedTuple):
    """The complete recipe of a run, its data, and its pretrained weights (None: random initialisation)."""

    recipe: Recipe
    data: TrainingData
    adapted_model: AdaptedModel | None


def open_data_and_print_notes(recipe: Recipe, console: Console) -> TrainingData:
    """Open the data in the input size of the model. Print which files are skipped or converted."""
    model = recipe.model
    data = load_train_and_validation_data(recipe.data, model.image_shape, model.in_chans, recipe.train.seed)
    for note in data.source.notes:
        console.print(note, highlight=False, soft_wrap=True)
    if skipped := data.source.skipped_paths:
        console.print(f"Skipped: {describe_unreadable_files(skipped)}", highlight=False, soft_wrap=True)
    if data.few_images_note:
        console.print(f"Warning: {data.few_images_note}.", highlight=False, soft_wrap=True)
    if data.train.file_paths and (note := describe_image_file_conversion(Path(data.train.file_paths[0]), model)):
        console.print(note, highlight=False, soft_wrap=True)
    return data


def complete_recipe_and_load_data_and_weights(recipe: Recipe, console: Console) -> PreparedRun:
    """Open the data, complete the recipe and load the pretrained weights, if it has any."""
    data = open_data_and_print_notes(recipe, console)
    recipe = complete_recipe_from_data_and_print_changes(recipe, data, console)
    if recipe.train.distill:
        recipe = replace(recipe, train=replace(recipe.train, distill=make_model_ref_absolute(recipe.train.distill)))
    if not recipe.weights:
        return PreparedRun(recipe, data, None)
    adapted = load_and_adapt_pretrained_weights(recipe, find_class_names(data))
    _print_model_changes(recipe.model, adapted.info.model, console)
    recipe = replace(recipe, model=adapted.info.model, weights=make_model_ref_absolute(recipe.weights))
    data = replace(data, preprocessing=adapted.info.preparation)  # the normalisation that the weights were trained with
    console.print(format_adaptation_report(adapted.report), highlight=False, soft_wrap=True)
    if warning := find_validation_leakage_warning(recipe):
        console.print(warning, highlight=False, soft_wrap=True)
    return PreparedRun(recipe, data, adapted)


def find_class_names(data: TrainingData) -> list[str] | None:
    """Return the class names of the data; None if its classes have only numbers."""
    return data.classes if data.source.has_class_names else None


def complete_recipe_from_data_and_print_changes(recipe: Recipe, data: TrainingData, console: Console) -> Recipe:
    """Complete the recipe: add the data set's augmentation policy, and set num_classes to match the data."""
    stored_shape = data.train.image_shape
    augment = complete_augmentation_for_objective(
        recipe.data.augment, recipe.data.name, stored_shape[0], recipe.train.objective, stored_shape[1:]
    )
    if note := describe_default_augmentation(recipe, augment):
        console.print(note, highlight=False, soft_wrap=True)
    recipe = replace(recipe, data=replace(make_data_paths_absolute(recipe.data), augment=augment))
    if recipe.model.num_classes != len(data.classes):
        console.print(f"model.num_classes: {recipe.model.num_classes} → {len(data.classes)}, as in the data")
        recipe = replace(recipe, model=replace(recipe.model, num_classes=len(data.classes)))
    model_shape = (recipe.model.in_chans, *recipe.model.image_shape)
    if stored_shape[0] != model_shape[0] and {stored_shape[0], model_shape[0]} != {1, 3}:
        raise UserError(
            f"The images have {format_count(stored_shape[0], 'channel')}, but model.in_chans={model_shape[0]}. "
            "Only 1 channel and 3 channels can be converted into each other."
        )
    if note := describe_batch_size_change(recipe, len(data.train)):
        console.print(note, highlight=False, soft_wrap=True)
    batch_size = choose_batch_size(recipe, len(data.train))
    recipe = replace(recipe, train=replace(recipe.train, batch_size=batch_size))
    if stored_shape != model_shape:
        before, after = describe_image_shape(stored_shape), describe_image_shape(model_shape)
        console.print(f"Images are converted from {before} to {after}, the input size of the model.")
    return recipe


def _print_model_changes(requested_config: ModelConfig, weights_config: ModelConfig, console: Console) -> None:
    """Print the model settings that the pretrained weights change."""
    values = {
        item.name: (getattr(requested_config, item.name), getattr(weights_config, item.name))
        for item in fields(ModelConfig)
    }
    changes = [f"model.{name}: {old} → {new}" for name, (old, new) in values.items() if old != new]
    if changes:
        console.print(f"Changed to match the weights: {', '.join(changes)}", highlight=False, soft_wrap=True)


def make_console(quiet: bool) -> Console:
    """A console that prints nothing if `quiet`."""
    return Console(quiet=quiet)


def _enable_tf32_and_choose_or_reuse_cuda_kernels(
    hardware: Hardware, recipe: Recipe, model: VisionTransformer, num_images: int, reused_hardware: Hardware | None
) -> Hardware:
    """On CUDA: measure the fastest kernels for the model's shapes, or use an earlier choice."""
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # a harmless warning of the backward thread
    torch.backends.cuda.matmul.allow_tf32 = True
    workload = make_training_workload(recipe, num_images, hardware.dtype, hardware.compiled)
    hardware = replace(
        hardware, kernels=reused_hardware.kernels if reused_hardware else choose_fastest_kernels(model, workload)
    )
    set_kernels(model, hardware.kernels)
    return hardware


def make_training_workload(recipe: Recipe, num_images: int, dtype: torch.dtype, compiled: bool) -> KernelWorkload:
    """Return the workload that the kernels of a training run are chosen for."""
    batch = min(recipe.train.batch_size, num_images) // recipe.train.grad_accum_steps
    batch *= load_objective(recipe.train.objective).num_whole_views
    return KernelWorkload(batch, dtype, training=True, compiled=compiled)


def _seed_and_build_model_with_initial_weights(
    recipe: Recipe, data: TrainingData, initial_weights: dict[str, Tensor] | None
) -> VisionTransformer:
    torch.manual_seed(recipe.train.seed)
    model = VisionTransformer(recipe.model)
    if initial_weights is not None:
        model.load_state_dict(initial_weights)
    if recipe.train.whiten:
        fold_whitening_into_patch_embedding(model.patch_embed, data)  # pyright: ignore[reportArgumentType]
    return model


def seed_and_build_train_state(
    recipe: Recipe,
    data: TrainingData,
    reused_hardware: Hardware | None = None,
    initial_weights: dict[str, Tensor] | None = None,
    num_batched_runs: int = 1,
) -> TrainState:
    """Create the model, objective and optimizers of a run, on its device.

    `reused_hardware`: the choice of a resumed run. `initial_weights`: None for random weights from the seed.
    `num_batched_runs` affects the choice of compilation."""
    began = time.monotonic()
    model = _seed_and_build_model_with_initial_weights(recipe, data, initial_weights)
    prepared = time.monotonic() - began
    set_trainable_and_add_lora(model, recipe.train)
    images = recipe.train.epochs * recipe.data.passes_per_epoch * len(data.train)
    hardware = reused_hardware or choose_hardware_and_set_threads(recipe, model, images, num_batched_runs)
    torch.set_num_threads(hardware.threads)
    if hardware.device == "cpu":
        set_malloc_to_keep_memory()
    model = model.to(hardware.device)
    set_train_mode_except_frozen(model)
    if hardware.device == "cuda":
        hardware = _enable_tf32_and_choose_or_reuse_cuda_kernels(
            hardware, recipe, model, len(data.train), reused_hardware
        )
    if initial_weights is not None and recipe.train.head_init == "linear_probe":
        probe_began = time.monotonic()
        fit_head_by_linear_probe(model, data, hardware)
        set_train_mode_except_frozen(model)
        prepared += time.monotonic() - probe_began
    state = TrainState(recipe, data, hardware, model, prepared_seconds=prepared)
    state.setup_seconds = time.monotonic() - began - prepared
    return state
