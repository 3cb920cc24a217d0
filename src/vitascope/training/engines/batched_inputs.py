"""Prepare the training images of several batched runs: stack, augment, normalise and mix them per model."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from vitascope.data.augment import MixedLabels, apply_mixup_or_cutmix, make_unmixed_labels
from vitascope.data.dataset import Dataset
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import RandomDraws
from vitascope.shapes import Images
from vitascope.training.state import TrainState


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


def flatten_draws(draws: RandomDraws) -> RandomDraws:
    """Return the draws of single images with model and image in one axis, without those for mixing."""
    return {name: draw.flatten(0, 1) for name, draw in draws.items() if name != "mix"}
