"""Build the state of a run: weights, precision, kernels, device."""

import time
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from vitascope.data.splits import TrainingData
from vitascope.inference.hardware import set_malloc_to_keep_memory
from vitascope.inference.kernel_choice import KernelWorkload, choose_fastest_kernels, set_kernels
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.choices import load_objective
from vitascope.recipe.schema import Recipe
from vitascope.training.hardware import Hardware, choose_hardware_and_set_threads
from vitascope.training.initial_weights import fold_whitening_into_patch_embedding
from vitascope.training.optim.build import set_train_mode_except_frozen, set_trainable_and_add_lora
from vitascope.training.state import TrainState


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
    state = TrainState(recipe, data, hardware, model, prepared_seconds=prepared)
    state.setup_seconds = time.monotonic() - began - prepared
    return state
