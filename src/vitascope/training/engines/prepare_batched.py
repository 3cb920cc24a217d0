"""Prepare several runs for one batched computation: check them, choose the attention kernel, and make their input.

Their training images are stacked, augmented, normalised and mixed per model.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from vitascope.data.augment import MixedLabels, apply_mixup_or_cutmix, make_unmixed_labels
from vitascope.data.dataset import Dataset
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import RandomDraws
from vitascope.errors import UserError
from vitascope.inference.kernel_choice import set_kernels
from vitascope.kernels import HAS_TRITON, MAX_SHORT_TOKENS, SUPPORTED_HEAD_WIDTHS
from vitascope.model.attention import UNFUSED_KERNEL
from vitascope.model.block import Block
from vitascope.recipe.schema import Recipe
from vitascope.shapes import Images
from vitascope.training.state import TrainState

BATCHABLE_OPTIMIZERS = ("adamw", "muon")  # their updates are written for all models at once in batched.py


def check_batchable(recipes: list[Recipe]) -> None:
    """Raise an error unless the runs can be batched. They may differ only in seed, learning rates and weight decay."""
    shared_settings = {repr(_reset_per_run_settings(recipe)) for recipe in recipes}
    if len(shared_settings) > 1:
        raise UserError(
            "Runs can be batched only if they differ in nothing but train.seed, lr, muon_lr and weight_decay."
        )
    train, model = recipes[0].train, recipes[0].model
    if not train.uses_labels or train.distill or train.tune != "full" or train.freeze or recipes[0].weights:
        raise UserError("Batched runs must train from scratch with labels.")
    if model.uses_dropout:
        raise UserError("Batched runs do not support dropout and stochastic depth. Set their rates to 0.")
    if model.token_reduction:
        name, count = next(iter(model.token_reduction.items()))
        raise UserError(f"Batched runs do not support model.{name}={count}. Set it at inference instead.")
    required = {
        "grad_accum_steps": 1,
        "layer_decay": 1.0,
        "final_weight_decay": None,
        "patience": 0,
        "patch_share": 1.0,
    }
    for name, value in required.items():
        if getattr(train, name) != value:
            raise UserError(f"Batched runs do not support train.{name}={getattr(train, name)}.")
    if train.optimizer not in BATCHABLE_OPTIMIZERS:
        raise UserError(f"Batched runs do not support train.optimizer={train.optimizer}. Use adamw or muon.")
    if recipes[0].data.balance != "none" or model.grad_checkpointing or train.precision == "float16":
        raise UserError("Batched runs do not support data.balance, model.grad_checkpointing and float16.")


def _reset_per_run_settings(recipe: Recipe) -> Recipe:
    """Return the recipe with fixed values for the settings in which batched runs may differ."""
    return replace(recipe, train=replace(recipe.train, seed=0, lr=1.0, muon_lr=1.0, weight_decay=0.0))


def set_batchable_attention_kernels(state: TrainState) -> None:
    """Set attention kernels that can be batched over models.

    PyTorch's fused attention is not used: under vmap it does not detect that gradients are needed, and two of its CUDA
    kernels then give wrong gradients (torch 2.11)."""
    kernel = choose_batchable_attention_kernel(state)
    set_kernels(state.model, {"attention": kernel})
    last = state.model.blocks[-1]
    if state.recipe.model.global_pool == "token" and isinstance(last, Block):
        last.attn.kernel = UNFUSED_KERNEL  # only the class token is a query; the `own` kernel needs all tokens


def choose_batchable_attention_kernel(state: TrainState) -> str:
    """Return `own` (the Triton kernel for few tokens, without QK-norm) if it applies, else unfused attention."""
    hardware, model = state.hardware, state.recipe.model
    has_kernel = hardware.device == "cuda" and hardware.precision == "bfloat16" and HAS_TRITON
    is_plain = (
        not model.qk_norm and not model.causal and model.attention == "plain" and not model.num_removed_per_block[0]
    )
    return (
        "own"
        if has_kernel
        and is_plain
        and model.num_tokens <= MAX_SHORT_TOKENS
        and model.head_width in SUPPORTED_HEAD_WIDTHS
        else UNFUSED_KERNEL
    )


class StackedSplit(NamedTuple):
    """The images (model × image × channel × row × column) and labels (model × image) of all models."""

    images: Tensor
    labels: Tensor


class BatchedInputs(NamedTuple):
    """A batch of every model, model × image (…), after augmentation and mixing."""

    images: Tensor
    target_probabilities: Tensor  # per class
    target_labels: Tensor  # the label with the largest weight, for the accuracy


@dataclass(frozen=True)
class BatchedPreprocessing(Preprocessing):
    """Preprocessing of one batch with the images of all models in turn. Each is normalised by the mean and standard
    deviation of its model's training images."""

    model_means: Tensor  # model × 1 × channel × 1 × 1
    model_stds: Tensor

    def normalize(self, pixels: Images) -> Images:
        pixels_by_model = pixels.unflatten(0, (len(self.model_means), -1))
        return ((pixels_by_model - self.model_means) / self.model_stds).flatten(0, 1)


def make_batched_preprocessing(states: list[TrainState], device: str) -> BatchedPreprocessing:
    """Return the preprocessing of all states. They may differ only in mean and standard deviation."""

    def stack_statistic(name: str) -> Tensor:
        rows = [getattr(state.data.preprocessing, name) for state in states]
        return torch.tensor(rows, device=device)[:, None, :, None, None]  # float32, as in a single run

    return BatchedPreprocessing(
        **vars(states[0].data.preprocessing), model_means=stack_statistic("mean"), model_stds=stack_statistic("std")
    )


def stack_splits(splits: list[Dataset], device: str) -> StackedSplit:
    """Stack the splits of all models, which have the same number of images, on the device."""
    images = torch.stack([split.images for split in splits]).to(device)
    return StackedSplit(images, torch.stack([split.labels for split in splits]).to(device))


def mix_batch_of_each_model(
    images: Tensor, labels: Tensor, mix_draws: Tensor, dtype: torch.dtype
) -> tuple[Tensor, MixedLabels]:
    """Apply mixup or CutMix within each model's batch. The mixed labels of all models are flattened into one axis.

    `dtype`: of the mixing weights."""
    mixed_images, own_labels, partner_labels, lam = vmap(_mix_batch_for_vmap)(images, labels, mix_draws)
    return mixed_images, MixedLabels(own_labels.flatten(), partner_labels.flatten(), lam.flatten().to(dtype))


def make_unmixed_targets(labels: Tensor) -> MixedLabels:
    """Return the labels of all models, flattened into one axis, without mixing."""
    return make_unmixed_labels(labels.flatten())


def _mix_batch_for_vmap(images: Tensor, labels: Tensor, mix_draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mix one model's batch. The fields of MixedLabels are returned one by one, because vmap accepts only tensors."""
    mixed_images, target = apply_mixup_or_cutmix(images, labels, mix_draws)
    return mixed_images, target.labels, target.partner_labels, target.lam


def flatten_draws_of_all_models(draws: RandomDraws) -> RandomDraws:
    """Return the draws of single images with model and image in one axis, without those for mixing."""
    return {name: draw.flatten(0, 1) for name, draw in draws.items() if name != "mix"}
