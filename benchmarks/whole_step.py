"""Build Vitascope's whole training step: batch, augmentation, forward, backward, optimizer, weight average."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import torch

from vitascope import ModelConfig
from vitascope.data.config import AugmentConfig, resolve_augmentation
from vitascope.data.dataset import DataSource, MemoryDataset
from vitascope.data.open_data import TrainingData
from vitascope.data.preprocessing import Preprocessing
from vitascope.recipe.reading import read_recipe
from vitascope.training.engines.single_run import make_engine
from vitascope.training.prepare import seed_and_build_train_state
from vitascope.training.step import MetricSums

STEPS_PER_EPOCH = 20  # in the synthetic epoch that is repeated


def make_cifar10_config() -> ModelConfig:
    """Return the model of the recipe cifar10 with stochastic depth, as in the first records.

    It has 64 tokens, mean pooling, rotary positions, QK-norm, RMSNorm and squared ReLU."""
    return replace(read_recipe("cifar10", []).model, drop_path_rate=0.1)


def build_training_step(model_config: ModelConfig, args: argparse.Namespace) -> Callable[[], object]:
    """Build a step with CIFAR-10's default augmentation and AdamW. Random images take the same time as real ones."""
    overrides = [
        f"train.batch_size={args.batch}",
        "train.optimizer=adamw",
        f"train.device={args.device}",
        "train.ema=0",
    ]
    overrides += [f"train.precision={args.precision}", f"train.compile={'always' if args.compiled else 'never'}"]
    overrides += [f"train.threads={args.threads or torch.get_num_threads()}"]
    recipe = read_recipe("cifar10", overrides)
    augment = resolve_augmentation(AugmentConfig(), "cifar10")
    recipe = replace(recipe, model=model_config, data=replace(recipe.data, augment=augment))
    state = seed_and_build_train_state(recipe, _make_random_data(model_config, args.batch * STEPS_PER_EPOCH))
    engine, call_indices = make_engine(state, MetricSums.empty(state)), count()
    engine.start_epoch(0)

    def call() -> None:
        step = next(call_indices) % STEPS_PER_EPOCH
        if step == 0:
            engine.reset_step_counters()
        engine.run_next_step()

    return call


def _make_random_data(model_config: ModelConfig, num_images: int) -> TrainingData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (num_images, 3, *model_config.image_shape), generator=generator, dtype=torch.uint8)
    labels = torch.randint(model_config.num_classes, (num_images,), generator=generator)
    classes = [str(index) for index in range(model_config.num_classes)]
    split = MemoryDataset(pixels, labels, classes)
    source = DataSource("noise", classes, lambda part: split, ("train",))
    return TrainingData(source, split, None, Preprocessing(model_config.image_shape, (0.5,) * 3, (0.25,) * 3), "noise")
