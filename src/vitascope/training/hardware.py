"""Choose device, precision and compilation. Each `auto` is decided once and stored in the run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from vitascope.errors import UserError
from vitascope.model.anatomy import total_flops
from vitascope.model.config import FEWER, ModelConfig
from vitascope.model.exact import exact_float32
from vitascope.model.masked import decoder_config
from vitascope.recipe.schema import Recipe
from vitascope.run.format_probe import bf16_speedup

Part = TypeVar("Part", bound=Callable[..., Any])
EAGER_RATE = 1.4e14  # FLOP/s of an uncompiled, recorded step on an H200; only to guess whether compiling pays
CROWD_RATE = 7e13  # and of five models of 256 × 6 at once; of smaller ones less
# Seconds such a step takes at least; MAE's has many kernels, each with little to do.
EAGER_STEP = {"classify": 0.003, "dino": 0.003, "mae": 0.012}
COMPILE_PAYS_AFTER = 60.0  # seconds of that: a guess; compiling takes some 30 and then saves up to half
CLEARLY_FASTER = 1.3
MANY_MODELS = 1024  # of different shapes that one process compiles
ALL_THREADS = torch.get_num_threads()  # before any run changes it
ONE_THREAD_BELOW = 1.0e10  # FLOPs of a step: below, threads wait for each other longer than they work


@dataclass(frozen=True)
class Hardware:
    """Device, precision and execution mode of a run."""

    device: str
    precision: str  # float32, bfloat16, float16
    compiled: bool
    captured: bool  # the whole step recorded as one CUDA graph
    threads: int  # of the CPU
    kernels: dict[str, str] = field(default_factory=dict)  # measured choices; empty: PyTorch's own

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)

    def compile(self, part: Part) -> Part:
        """For the sizes it meets (left open, many models cannot be traced at once); unchanged where nothing is."""
        if not self.compiled:
            return part
        # By itself PyTorch compiles a function for eight models and runs the ninth as it is, with a warning.
        torch._dynamo.config.recompile_limit = MANY_MODELS
        torch._dynamo.config.accumulated_recompile_limit = MANY_MODELS
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        return torch.compile(part, dynamic=False)  # pyright: ignore[reportReturnType]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.precision != "float32")


def choose_hardware(recipe: Recipe, model: nn.Module, images: int, models: int = 1) -> Hardware:
    """`images`: all images of the run, to estimate whether compilation saves time; `models`: number of batched runs."""
    device = choose_device(recipe.train.device)
    flops = training_flops(recipe)
    threads = recipe.train.threads or ALL_THREADS
    if device == "cpu" and not recipe.train.threads and flops * recipe.train.batch_size < ONE_THREAD_BELOW:
        threads = 1
    torch.set_num_threads(threads)
    precision = recipe.train.precision
    if precision == "auto":
        precision = choose_precision(device, model)
    compiled = recipe.train.compile == "always"
    if recipe.train.compile == "auto" and device == "cuda":
        batch, least = recipe.train.batch_size, EAGER_STEP[recipe.train.objective]
        rate = EAGER_RATE if models == 1 else CROWD_RATE
        compiled = images / batch * max(least, flops * batch * models / rate) > COMPILE_PAYS_AFTER
    # Loss scaling asks the host at every step; blocks computed again ask for the generator's state.
    again = recipe.model.grad_checkpointing and recipe.model.has_chance
    can_capture = device == "cuda" and precision != "float16" and not again
    if recipe.train.cuda_graph == "always" and not can_capture:
        without = "no float16" if not again else "no model.grad_checkpointing with dropout"
        raise UserError(
            f"train.cuda_graph=always needs a CUDA device and {without}; this run uses {device} and {precision}."
        )
    captured = can_capture and recipe.train.cuda_graph != "never"
    return Hardware(device, precision, compiled, captured, threads)


def training_flops(recipe: Recipe) -> float:
    """FLOPs per training image: the forward pass, and twice as much for the backward pass."""
    return 3 * total_flops(_learning(recipe)) * passes(recipe)


def _learning(recipe: Recipe) -> ModelConfig:
    """The model config in training: tokens are merged or dropped only at inference."""
    return replace(recipe.model, **dict.fromkeys(FEWER, 0))


def passes(recipe: Recipe) -> float:
    """Forward passes of a full image per training image, without DINO's head."""
    model = _learning(recipe)
    if recipe.train.objective == "dino":  # two large crops, also by the teacher, forward only; and the small ones
        height, width = model.image_shape
        return 2 + 2 / 3 + recipe.dino.local_crops * recipe.dino.local_size**2 / (height * width)
    if recipe.train.objective == "mae":
        mae = recipe.mae
        decoder = decoder_config(model, mae.decoder_dim, mae.decoder_depth, mae.decoder_heads)
        return 1 - mae.mask_ratio + total_flops(decoder) / total_flops(model)
    train = recipe.train
    if train.patch_share_epochs:
        less = total_flops(model, train.seen_patches(model.num_patches))
        return 1 - train.patch_share_epochs / train.epochs * (1 - less / total_flops(model))
    return 1.0


def hardware_of(model: nn.Module) -> Hardware:
    """For evaluation and prediction: the model's device, float32, not compiled."""
    device = next(model.parameters()).device.type
    return Hardware(device, "float32", compiled=False, captured=False, threads=ALL_THREADS)


def exact_products(hardware: Hardware) -> AbstractContextManager[None]:
    """Context that disables TF32 if the precision is float32."""
    return exact_float32() if hardware.precision == "float32" else nullcontext()


def choose_device(asked: str) -> str:
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if asked == "auto":
        return next(name for name, here in present.items() if here)
    if not present.get(asked):
        here = ", ".join(name for name, there in present.items() if there)
        raise UserError(f"The device {asked} is not available. Choose one of auto, {here}.")
    return asked


def choose_precision(device: str, model: nn.Module) -> str:
    """bf16 on CUDA 8.0 and newer, fp16 on older; on a CPU float32 unless a short measurement clearly favours bf16."""
    if device == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    if device != "cpu" or sum(weight.numel() for weight in model.parameters()) < 1_000_000:
        return "float32"  # small models spend their time elsewhere
    return "bfloat16" if bf16_speedup() > CLEARLY_FASTER else "float32"
