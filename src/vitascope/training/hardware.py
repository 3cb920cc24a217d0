"""Choose device, precision and compilation. Each `auto` is decided once and stored in the run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from vitascope.errors import UserError
from vitascope.inference.hardware import InferenceHardware, choose_or_check_device
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.model.config import TOKEN_REDUCTION_SETTINGS
from vitascope.recipe.choices import load_objective, load_optimizer
from vitascope.recipe.schema import Recipe
from vitascope.run.machine import measure_bf16_training_speedup

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
# FLOP/s of an uncompiled CUDA graph step on an H200, to estimate whether compilation saves time.
EAGER_FLOPS_PER_SECOND = 1.4e14
BATCHED_FLOPS_PER_SECOND = 7e13  # for five batched models of 256 × 6; lower for smaller models
MIN_SECONDS_TO_COMPILE = 60.0  # estimated training time; compilation takes about 30 s and saves up to half of it
MIN_BF16_SPEEDUP = 1.3
RECOMPILE_LIMIT = 1024  # shapes that one process compiles
DEFAULT_NUM_THREADS = torch.get_num_threads()  # before any run changes it
MIN_FLOPS_FOR_THREADS = 1.0e10  # of a step; below, several threads are slower than one


@dataclass(frozen=True)
class Hardware(InferenceHardware):
    """Device, precision and execution mode of a run."""

    compiled: bool
    captured: bool  # the whole step recorded as one CUDA graph
    threads: int  # of the CPU
    kernels: dict[str, str] = field(default_factory=dict)  # measured choices; empty: PyTorch's own

    def compile(self, module_or_function: CallableT) -> CallableT:
        """Return the compiled module or function, for fixed shapes; unchanged if compilation is off."""
        if not self.compiled:
            return module_or_function
        # The default limit is eight shapes: further shapes run uncompiled, with a warning.
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        torch._dynamo.config.accumulated_recompile_limit = RECOMPILE_LIMIT
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        return torch.compile(module_or_function, dynamic=False)  # pyright: ignore[reportReturnType]


def choose_hardware_and_set_threads(
    recipe: Recipe, model: nn.Module, num_images_in_run: int, num_batched_runs: int = 1
) -> Hardware:
    """Choose device, precision, compilation and threads, and set the number of threads.

    `num_images_in_run`: images of all epochs, to estimate whether compilation saves time."""
    device = choose_or_check_device(recipe.train.device)
    flops = count_train_flops_per_image(recipe)
    threads = recipe.train.threads or DEFAULT_NUM_THREADS
    if device == "cpu" and not recipe.train.threads and flops * recipe.train.batch_size < MIN_FLOPS_FOR_THREADS:
        threads = 1
    torch.set_num_threads(threads)
    precision = recipe.train.precision
    if precision == "auto":
        precision = choose_precision(device, model)
    compiled = recipe.train.compile == "always"
    if recipe.train.compile == "auto" and device == "cuda":
        batch, min_seconds = recipe.train.batch_size, load_objective(recipe.train.objective).min_eager_step_seconds
        rate = EAGER_FLOPS_PER_SECOND if num_batched_runs == 1 else BATCHED_FLOPS_PER_SECOND
        compiled = (
            num_images_in_run / batch * max(min_seconds, flops * batch * num_batched_runs / rate)
            > MIN_SECONDS_TO_COMPILE
        )
    # Loss scaling needs the host at every step; gradient checkpointing with dropout reads the generator's state.
    recomputes_dropout = recipe.model.grad_checkpointing and recipe.model.uses_dropout
    excluded = "no model.grad_checkpointing with dropout" if recomputes_dropout else "no float16"
    is_capturable = load_optimizer(recipe.train.optimizer).is_capturable
    excluded = excluded if is_capturable else f"no train.optimizer={recipe.train.optimizer}"
    can_capture = device == "cuda" and precision != "float16" and not recomputes_dropout and is_capturable
    if recipe.train.cuda_graph == "always" and not can_capture:
        raise UserError(
            f"train.cuda_graph=always needs a CUDA device and {excluded}; this run uses {device} and {precision}."
        )
    captured = can_capture and recipe.train.cuda_graph != "never"
    return Hardware(device, precision, compiled, captured, threads)


def count_train_flops_per_image(recipe: Recipe) -> float:
    """Return the FLOPs per training image: the forward pass, and twice as much for the backward pass."""
    model = _disable_token_reduction(recipe).model
    return 3 * count_forward_flops_per_image(model) * count_equivalent_forward_passes(recipe)


def count_equivalent_forward_passes(recipe: Recipe) -> float:
    """Return the number of forward passes of a whole image per training image."""
    return load_objective(recipe.train.objective).count_equivalent_forward_passes(_disable_token_reduction(recipe))


def _disable_token_reduction(recipe: Recipe) -> Recipe:
    """Return the recipe as in training: tokens are merged or dropped only at inference."""
    return replace(recipe, model=replace(recipe.model, **dict.fromkeys(TOKEN_REDUCTION_SETTINGS, 0)))


def choose_precision(device: str, model: nn.Module) -> str:
    """Return bfloat16 on CUDA 8.0 and newer, float16 on older; on a CPU float32 unless bfloat16 is clearly faster."""
    if device == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    if device != "cpu" or sum(weight.numel() for weight in model.parameters()) < 1_000_000:
        return "float32"  # small models are not limited by matrix products
    return "bfloat16" if measure_bf16_training_speedup() > MIN_BF16_SPEEDUP else "float32"
