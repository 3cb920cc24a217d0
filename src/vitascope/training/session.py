"""The state of a training run: everything that changes, as one object that can be copied, saved and restored."""

import copy
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.sampling import RandomDraws
from vitascope.data.splits import TrainingData
from vitascope.data.statistics import compute_data_hash
from vitascope.errors import UserError
from vitascope.model.attention_variants import make_lora_merged_state_dict
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.schema import Recipe, find_non_default_settings, hash_values
from vitascope.run.checkpoint import Checkpoint
from vitascope.training.hardware import Hardware, choose_hardware_and_set_threads, set_malloc_to_keep_memory
from vitascope.training.initial_weights import fold_whitening_into_patch_embedding
from vitascope.training.kernel_choice import KernelWorkload, choose_fastest_kernels, set_kernels
from vitascope.training.objectives.build import make_objective
from vitascope.training.objectives.dino import NUM_GLOBAL_CROPS
from vitascope.training.objectives.objective import Batch, Learning, Objective
from vitascope.training.optim.adamw import Optimizer
from vitascope.training.optim.build import make_optimizers, set_train_mode_except_frozen, set_trainable_and_add_lora
from vitascope.training.optim.ema import AveragedModel


@dataclass
class Session:
    """A training run in memory. `epoch` and `step` count completed epochs and steps."""

    recipe: Recipe
    data: TrainingData
    hardware: Hardware
    model: VisionTransformer
    objective: Objective
    optimizers: list[Optimizer]
    ema: AveragedModel[VisionTransformer] | None
    scaler: torch.amp.GradScaler
    prepared_seconds: float = 0.0  # initialising the weights, with whitening
    setup_seconds: float = 0.0  # choosing precision and kernels, moving to the device
    epoch: int = 0
    step: int = 0
    best_accuracy: float = -1.0
    best_epoch: int = 0
    best_weights: dict[str, torch.Tensor] | None = None  # the weights of the best epoch on validation

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of recipe, training images and teacher. A checkpoint can be resumed only with the same."""
        recipe = hash_values(find_non_default_settings(self.recipe))
        data = compute_data_hash(self.data.train.images, self.data.train.labels)
        return {"recipe": recipe, "data": data, "teacher": self.objective.fingerprint}

    @cached_property
    def prepare_batch(self) -> Callable[[UInt8Images, Labels, RandomDraws], Batch]:
        """The objective's augmentation, compiled if the model is: it consists of many small kernels."""
        return self.hardware.compile(self.objective.prepare_batch)

    @property
    def batch_size(self) -> int:
        return min(self.recipe.train.batch_size, len(self.data.train))

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data.train) * self.recipe.data.passes_per_epoch // self.batch_size

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.recipe.train.epochs

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and saved: averaged if averaging is on."""
        return self.ema.model if self.ema else self.model

    def store_best_weights(self, accuracy: float) -> None:
        self.best_accuracy, self.best_epoch = accuracy, self.epoch
        self.best_weights = {
            name: tensor.clone() for name, tensor in make_lora_merged_state_dict(self.eval_model).items()
        }

    def copy_state(self, old_copy: Checkpoint | None = None) -> Checkpoint:
        """Copy everything that changes, on its device. An `old_copy` is overwritten, which is faster."""
        return overwrite_or_deepcopy_state(self._collect_state(), old_copy)

    def _collect_state(self) -> Checkpoint:
        """Return the contents of resume.pt; tensors are not copied."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "best_accuracy": self.best_accuracy,
            "best_epoch": self.best_epoch,
            "best": self.best_weights,
            "hardware": asdict(self.hardware),
            "identity": self.fingerprints,
            "model": self.model.state_dict(),
            "extra": self.objective.extra_module.state_dict(),
            "average": self.ema.model.state_dict() if self.ema else None,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.hardware.device == "cuda" else None,
        }

    def restore_state(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint; raise an error if device, recipe, data or teacher differ."""
        if checkpoint["hardware"]["device"] != self.hardware.device:
            raise UserError(
                f"The run was trained on {checkpoint['hardware']['device']}, but this device is "
                f"{self.hardware.device}, so the result would differ. Resume it there, or start a new run from "
                "its recipe.yaml."
            )
        changed = {
            "recipe": "recipe.yaml has",
            "data": "the training images have",
            "teacher": "the teacher's weights have",
        }
        for name, subject in changed.items():
            if checkpoint["identity"].get(name, "") != self.fingerprints[name]:
                raise UserError(
                    f"The run cannot be resumed: {subject} changed since then. Start a new run from its recipe.yaml."
                )
        self.epoch, self.step = checkpoint["epoch"], checkpoint["step"]
        self.best_accuracy, self.best_epoch, self.best_weights = (
            checkpoint["best_accuracy"],
            checkpoint["best_epoch"],
            checkpoint["best"],
        )
        self.model.load_state_dict(checkpoint["model"])
        self.objective.extra_module.load_state_dict(checkpoint.get("extra", {}))
        if self.ema:
            self.ema.model.load_state_dict(checkpoint["average"])
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(checkpoint["scaler"])
        torch.set_rng_state(checkpoint["rng"])
        if checkpoint["cuda_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint["cuda_rng"])


def _set_chosen_or_reused_kernels(
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
    batch *= NUM_GLOBAL_CROPS if recipe.train.objective == "dino" else 1
    return KernelWorkload(batch, dtype, training=True, compiled=compiled)


def _build_model_with_initial_weights(
    recipe: Recipe, data: TrainingData, initial_weights: dict[str, Tensor] | None
) -> VisionTransformer:
    torch.manual_seed(recipe.train.seed)
    model = VisionTransformer(recipe.model)
    if initial_weights is not None:
        model.load_state_dict(initial_weights)
    if recipe.train.whiten:
        fold_whitening_into_patch_embedding(model.patch_embed, data)  # pyright: ignore[reportArgumentType]
    return model


def build_session(
    recipe: Recipe,
    data: TrainingData,
    reused_hardware: Hardware | None = None,
    initial_weights: dict[str, Tensor] | None = None,
    num_batched_runs: int = 1,
) -> Session:
    """Create the model, objective and optimizers of a run, on its device.

    `earlier_hardware`: the choice of a resumed run. `initial_weights`: None for random weights from the seed.
    `num_batched_runs` affects the choice of compilation."""
    began = time.monotonic()
    model = _build_model_with_initial_weights(recipe, data, initial_weights)
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
        hardware = _set_chosen_or_reused_kernels(hardware, recipe, model, len(data.train), reused_hardware)
    average = AveragedModel(model) if recipe.train.ema else None
    learning = Learning(recipe, data, hardware, model, average)
    objective = make_objective(learning)
    set_up = time.monotonic() - began - prepared
    return Session(
        recipe,
        data,
        hardware,
        model,
        objective,
        make_optimizers(model, recipe.train, objective.extra_module),
        learning.ema,
        torch.amp.GradScaler(hardware.device, enabled=hardware.precision == "float16"),
        prepared,
        set_up,
    )


def overwrite_or_deepcopy_state(state: Checkpoint, old_copy: Checkpoint | None) -> Checkpoint:
    """Copy the state. An old copy of the same structure is overwritten and returned."""
    pairs: list[tuple[Tensor, Tensor]] = []
    try:
        result = _pair_tensors_with_old_copy(state, old_copy, pairs)
    except LookupError:
        return copy.deepcopy(state)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for old, new in pairs:
        groups[new.device, new.dtype].append((old, new))
    for group in groups.values():
        old, new = ([pair[side] for pair in group] for side in (0, 1))
        torch._foreach_copy_(old, new)  # pyright: ignore[reportPrivateImportUsage]
    return result


def _pair_tensors_with_old_copy(state: Any, old_copy: Any, tensor_pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Return `state` with the tensors of `old_copy`; append (old, new) to `tensor_pairs`.

    Raise LookupError if the structures differ."""
    if isinstance(state, Tensor):
        if not isinstance(old_copy, Tensor) or (old_copy.shape, old_copy.dtype, old_copy.device) != (
            state.shape,
            state.dtype,
            state.device,
        ):
            raise LookupError
        tensor_pairs.append((old_copy, state.detach()))
        return old_copy
    if isinstance(state, dict):
        if not isinstance(old_copy, dict) or state.keys() != old_copy.keys():
            raise LookupError
        return {name: _pair_tensors_with_old_copy(value, old_copy[name], tensor_pairs) for name, value in state.items()}
    if isinstance(state, list):
        if not isinstance(old_copy, list) or len(state) != len(old_copy):
            raise LookupError
        return [_pair_tensors_with_old_copy(*both, tensor_pairs) for both in zip(state, old_copy, strict=True)]
    return copy.copy(state)
