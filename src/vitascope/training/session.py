"""Recipe and data -> everything that changes while learning, as one thing that can be copied, saved and restored."""

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.data.statistics import data_hash
from vitascope.data.training_data import TrainingData
from vitascope.errors import UserError
from vitascope.model.lora import plain_state
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import chosen_settings, short_name
from vitascope.training.adamw import Optimizer
from vitascope.training.allocator import keep_freed_memory
from vitascope.training.averaging import Average
from vitascope.training.copying import copied
from vitascope.training.dino import GLOBALS
from vitascope.training.hardware import Hardware, choose_hardware
from vitascope.training.kernels import Use, choose_kernels, use_kernels
from vitascope.training.objective import Inputs, Learning, Objective
from vitascope.training.objectives import make_objective
from vitascope.training.optimizers import make_optimizers
from vitascope.training.tuning import set_learning, train_mode
from vitascope.training.whitening import whiten


@dataclass
class Session:
    """A training under way. `epoch` and `step` count what is done."""

    recipe: Recipe
    data: TrainingData
    hardware: Hardware
    model: VisionTransformer
    objective: Objective
    optimizers: list[Optimizer]
    average: Average[VisionTransformer] | None
    scaler: torch.amp.GradScaler
    prepared_seconds: float = 0.0  # making the weights, and learning from the images before the first step
    set_up_seconds: float = 0.0  # choosing precision and kernels, moving to the device
    epoch: int = 0
    step: int = 0
    best_accuracy: float = -1.0
    best_epoch: int = 0
    best: dict[str, torch.Tensor] | None = None  # the weights of the best epoch on validation

    @cached_property
    def identity(self) -> dict[str, str]:
        """Short names for the recipe and the training images: a checkpoint fits no others."""
        recipe = short_name(chosen_settings(self.recipe))
        data = data_hash(self.data.train.images, self.data.train.labels)
        return {"recipe": recipe, "data": data, "teacher": self.objective.fingerprint}

    @cached_property
    def prepare(self) -> Callable[..., Inputs]:
        """The objective's: dozens to hundreds of small kernels a step, so compiled where the model is."""
        return self.hardware.compile(self.objective.prepare)

    @property
    def batch(self) -> int:
        return min(self.recipe.train.batch_size, len(self.data.train))

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data.train) * self.recipe.data.passes_per_epoch // self.batch

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.recipe.train.epochs

    @property
    def answering(self) -> nn.Module:
        """The model that is evaluated and saved: averaged if averaging is on."""
        return self.average.model if self.average else self.model

    def keep_best(self, accuracy: float) -> None:
        self.best_accuracy, self.best_epoch = accuracy, self.epoch
        self.best = {name: tensor.clone() for name, tensor in plain_state(self.answering).items()}

    def snapshot(self, old: dict[str, Any] | None = None) -> dict[str, Any]:
        """A copy of everything that changes, on the device it is on; in the place of an old one, which is faster."""
        return copied(self._changing(), old)

    def _changing(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "best_accuracy": self.best_accuracy,
            "best_epoch": self.best_epoch,
            "best": self.best,
            "hardware": asdict(self.hardware),
            "identity": self.identity,
            "model": self.model.state_dict(),
            "extra": self.objective.extra.state_dict(),
            "average": self.average.model.state_dict() if self.average else None,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.hardware.device == "cuda" else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["hardware"]["device"] != self.hardware.device:
            raise UserError(
                f"The run was trained on {state['hardware']['device']}, but this device is {self.hardware.device}, so "
                "the result would differ. Resume it there, or start a new run from its recipe.yaml."
            )
        changed = {
            "recipe": "recipe.yaml has",
            "data": "the training images have",
            "teacher": "the teacher's weights have",
        }
        for what, words in changed.items():
            if state["identity"].get(what, "") != self.identity[what]:
                raise UserError(
                    f"The run cannot be resumed: {words} changed since then. Start a new run from its recipe.yaml."
                )
        self.epoch, self.step = state["epoch"], state["step"]
        self.best_accuracy, self.best_epoch, self.best = state["best_accuracy"], state["best_epoch"], state["best"]
        self.model.load_state_dict(state["model"])
        self.objective.extra.load_state_dict(state.get("extra", {}))
        if self.average:
            self.average.model.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])


def _with_kernels(
    hardware: Hardware, recipe: Recipe, model: VisionTransformer, images: int, decided: Hardware | None
) -> Hardware:
    """On CUDA: measure the fastest kernels for the model's shapes, or use an earlier choice."""
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # the backward thread says so, once
    torch.backends.cuda.matmul.allow_tf32 = True
    use = training_use(recipe, images, hardware.dtype, hardware.compiled)
    hardware = replace(hardware, kernels=decided.kernels if decided else choose_kernels(model, use))
    use_kernels(model, hardware.kernels)
    return hardware


def training_use(recipe: Recipe, images: int, dtype: torch.dtype, compiled: bool) -> Use:
    """What the kernels of a training with so many images are chosen for."""
    batch = min(recipe.train.batch_size, images) // recipe.train.grad_accum_steps
    batch *= GLOBALS if recipe.train.objective == "dino" else 1
    return Use(batch, dtype, training=True, compiled=compiled)


def _with_weights(recipe: Recipe, data: TrainingData, weights: dict[str, Tensor] | None) -> VisionTransformer:
    torch.manual_seed(recipe.train.seed)
    model = VisionTransformer(recipe.model)
    if weights is not None:
        model.load_state_dict(weights)
    if recipe.train.whiten:
        whiten(model.patch_embed, data)  # pyright: ignore[reportArgumentType]
    return model


def start_session(
    recipe: Recipe,
    data: TrainingData,
    decided: Hardware | None = None,
    weights: dict[str, Tensor] | None = None,
    models: int = 1,
) -> Session:
    """Initialise the weights from the seed, or use the given ones. `decided`: an earlier choice of device, precision
    and compilation. `models`: number of batched runs, which affects that choice."""
    began = time.monotonic()
    model = _with_weights(recipe, data, weights)
    prepared = time.monotonic() - began
    set_learning(model, recipe.train)
    images = recipe.train.epochs * recipe.data.passes_per_epoch * len(data.train)
    hardware = decided or choose_hardware(recipe, model, images, models)
    torch.set_num_threads(hardware.threads)
    if hardware.device == "cpu":
        keep_freed_memory()
    model = model.to(hardware.device)
    train_mode(model)
    if hardware.device == "cuda":
        hardware = _with_kernels(hardware, recipe, model, len(data.train), decided)
    average = Average(model) if recipe.train.ema else None
    learning = Learning(recipe, data, hardware, model, average)
    objective = make_objective(learning)
    set_up = time.monotonic() - began - prepared
    return Session(
        recipe,
        data,
        hardware,
        model,
        objective,
        make_optimizers(model, recipe.train, objective.extra),
        learning.average,
        torch.amp.GradScaler(hardware.device, enabled=hardware.precision == "float16"),
        prepared,
        set_up,
    )
