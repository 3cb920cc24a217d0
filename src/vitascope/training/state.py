"""The state of a training run: everything that changes, as one object that can be copied, saved and restored."""

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vitascope.data.dataset import Labels, UInt8Images
from vitascope.data.open_data import TrainingData
from vitascope.data.preprocessing import DevicePreprocessing
from vitascope.data.sampling import RandomDraws
from vitascope.errors import UserError
from vitascope.model.attention_variants import make_lora_merged_state_dict
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.choices import load_objective
from vitascope.recipe.schema import Recipe, find_non_default_settings, hash_values
from vitascope.run.checkpoint import Checkpoint
from vitascope.training.hardware import Hardware
from vitascope.training.objectives.objective import Batch, Objective, StepMetrics
from vitascope.training.optim.build import make_optimizers
from vitascope.training.optim.optimizer import Optimizer
from vitascope.training.optim.schedule import AveragedModel


@dataclass(frozen=True)
class World:
    """The processes that train one run together."""

    rank: int = 0
    size: int = 1


@dataclass
class MetricSums:
    """Sums of the step metrics over an epoch, on the device, and the first step with a NaN or infinite loss."""

    sums: dict[str, Tensor]
    first_nonfinite_step: Tensor  # −1: none

    @classmethod
    def empty(cls, state: "TrainState") -> "MetricSums":
        device = state.hardware.device
        names = state.objective.metric_names
        return cls({name: torch.zeros((), device=device) for name in names}, torch.full((), -1, device=device))

    @property
    def loss(self) -> Tensor:
        return next(iter(self.sums.values()))

    def add_and_record_nonfinite_step(self, metrics: StepMetrics, step: int | Tensor) -> None:
        for name, total in self.sums.items():
            total += metrics[name]
        loss = next(iter(metrics.values()))
        self.first_nonfinite_step.copy_(
            torch.where((self.first_nonfinite_step < 0) & ~loss.isfinite(), step, self.first_nonfinite_step)
        )

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "first_nonfinite_step": self.first_nonfinite_step}

    def load_in_place(self, saved: dict[str, Any]) -> None:
        self.first_nonfinite_step.copy_(saved["first_nonfinite_step"])
        for name, total in self.sums.items():
            total.copy_(saved["sums"][name])

    def reset(self) -> None:
        for total in self.sums.values():
            total.zero_()
        self.first_nonfinite_step.fill_(-1)


@dataclass
class TrainState:
    """A training run in memory. `epoch` and `step` count completed epochs and steps.

    The objective, its modules and the optimizers are built for the model; each is stored here only."""

    recipe: Recipe
    data: TrainingData
    hardware: Hardware
    model: VisionTransformer
    world: World = World()
    prepared_seconds: float = 0.0  # initialising the weights, with whitening
    setup_seconds: float = 0.0  # choosing precision and kernels, moving to the device
    epoch: int = 0
    step: int = 0
    epoch_seconds: float = 0.0  # of the current epoch, until its last checkpoint
    best_accuracy: float = -1.0
    best_epoch: int = 0
    best_weights: dict[str, Tensor] | None = None  # the weights of the best epoch on validation
    ema: AveragedModel[VisionTransformer] | None = field(init=False)
    preprocessing: DevicePreprocessing = field(init=False)
    objective: Objective = field(init=False)
    optimizers: list[Optimizer] = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    metric_sums: MetricSums = field(init=False)  # of the current epoch

    def __post_init__(self) -> None:
        train, device = self.recipe.train, self.hardware.device
        objective_type = load_objective(train.objective)
        self.ema = AveragedModel(self.model) if train.ema or objective_type.needs_ema else None
        self.preprocessing = DevicePreprocessing.from_preprocessing(self.data.preprocessing, device)
        self.objective = objective_type(self)
        self.optimizers = make_optimizers(self.model, train, self.objective.extra_module)
        self.scaler = torch.amp.GradScaler(device, enabled=self.hardware.precision == "float16")
        self.metric_sums = MetricSums.empty(self)

    @cached_property
    def input_fingerprints(self) -> dict[str, str]:
        """Hashes of recipe, training images and teacher. A checkpoint can be resumed only with the same."""
        recipe = hash_values(find_non_default_settings(_reset_memory_limit(self.recipe)))
        return {"recipe": recipe, "data": self.data.train.fingerprint(), "teacher": self.objective.fingerprint}

    @cached_property
    def augment_batch(self) -> Callable[[UInt8Images, Labels, RandomDraws], Batch]:
        """The objective's augmentation, compiled if the model is: it consists of many small kernels."""
        return self.hardware.compile(self.objective.augment_batch)

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
    def num_steps_of_current_epoch_done(self) -> int:
        """0 between two epochs; more if the run is resumed from a checkpoint within an epoch."""
        return self.step - self.epoch * self.steps_per_epoch

    @property
    def eval_model(self) -> VisionTransformer:
        """The model that is evaluated and saved: averaged if averaging is on."""
        return self.ema.model if self.ema else self.model

    def store_current_weights_as_best(self, accuracy: float) -> None:
        self.best_accuracy, self.best_epoch = accuracy, self.epoch
        self.best_weights = {
            name: tensor.clone() for name, tensor in make_lora_merged_state_dict(self.eval_model).items()
        }

    def state_dict(self) -> Checkpoint:
        """Return the contents of resume.pt; tensors are not copied."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "epoch_seconds": self.epoch_seconds,
            "metric_sums": self.metric_sums.state_dict(),
            "best_accuracy": self.best_accuracy,
            "best_epoch": self.best_epoch,
            "best": self.best_weights,
            "hardware": asdict(self.hardware),
            "identity": self.input_fingerprints,
            "model": self.model.state_dict(),
            "extra": self.objective.extra_module.state_dict(),
            "average": self.ema.model.state_dict() if self.ema else None,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.hardware.device == "cuda" else None,
        }

    def copy_state(self, old_copy: Checkpoint | None = None) -> Checkpoint:
        """Copy everything that changes, on its device. An `old_copy` is overwritten, which is faster."""
        return overwrite_or_deepcopy_state(self.state_dict(), old_copy)

    def load_state_dict(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint of this run: see `check_resumable_from`."""
        self.epoch, self.step = checkpoint["epoch"], checkpoint["step"]
        self.epoch_seconds = checkpoint.get("epoch_seconds", 0.0)
        self.best_accuracy, self.best_epoch = checkpoint["best_accuracy"], checkpoint["best_epoch"]
        self.best_weights = checkpoint["best"]
        self._load_modules_and_generators(checkpoint)
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(checkpoint["scaler"])

    def load_state_in_place(self, checkpoint: Checkpoint) -> None:
        """Undo training steps without replacing a tensor, because a CUDA graph uses the tensors' addresses."""
        self._load_modules_and_generators(checkpoint)
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            for index, weight in enumerate(weights):
                for name, tensor in optimizer.state[weight].items():
                    old = saved["state"].get(index, {}).get(name)
                    tensor.zero_() if old is None else tensor.copy_(old)

    def _load_modules_and_generators(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint["model"])
        self.objective.extra_module.load_state_dict(checkpoint["extra"])
        if self.ema:
            self.ema.model.load_state_dict(checkpoint["average"])
        if "metric_sums" in checkpoint:  # older versions saved only between epochs
            self.metric_sums.load_in_place(checkpoint["metric_sums"])
        torch.set_rng_state(checkpoint["rng"])
        if checkpoint["cuda_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint["cuda_rng"])

    def check_resumable_from(self, checkpoint: Checkpoint) -> None:
        """Raise an error if device, recipe, data or teacher of the checkpoint differ."""
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
            if checkpoint["identity"].get(name, "") != self.input_fingerprints[name]:
                raise UserError(
                    f"The run cannot be resumed: {subject} changed since then. Start a new run from its recipe.yaml."
                )


def _reset_memory_limit(recipe: Recipe) -> Recipe:
    """Return the recipe without data.memory: it does not change the result, so a run can be resumed with another."""
    return replace(recipe, data=replace(recipe.data, memory=None))


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
