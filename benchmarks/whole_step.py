"""Our whole training step, as `vitascope train` runs it: batch, augmentation, forward, backward, optimizer, average."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import torch

from vitascope import ModelConfig
from vitascope.data.config import AugmentConfig
from vitascope.data.policy import resolve
from vitascope.data.preparation import Preparation
from vitascope.data.source import Source, Split
from vitascope.data.training_data import TrainingData
from vitascope.recipe.reading import read_recipe
from vitascope.training.feeding import EpochLoader
from vitascope.training.session import start_session
from vitascope.training.step import Tally

STEPS = 20  # in the synthetic epoch that is repeated


def own_network() -> ModelConfig:
    """The model of the recipe cifar10: 64 tokens, mean pooling, rotary positions, QK-norm, RMSNorm, squared ReLU; with
    stochastic depth, as in the first records, so that records stay comparable."""
    return replace(read_recipe("cifar10", []).model, drop_path_rate=0.1)


def whole_step(shape: ModelConfig, asked: argparse.Namespace) -> Callable[[], object]:
    """CIFAR-10's default augmentation and AdamW on random images, which take the same time as real ones."""
    words = [f"train.batch_size={asked.batch}", "train.optimizer=adamw", f"train.device={asked.device}", "train.ema=0"]
    words += [f"train.precision={asked.precision}", f"train.compile={'always' if asked.compiled else 'never'}"]
    words += [f"train.threads={asked.threads or torch.get_num_threads()}"]
    recipe = read_recipe("cifar10", words)
    augment = resolve(AugmentConfig(), "cifar10")
    recipe = replace(recipe, model=shape, data=replace(recipe.data, augment=augment))
    session = start_session(recipe, _noise(shape, asked.batch * STEPS))
    loader, tally = EpochLoader(session), Tally.empty(session)
    step, number = loader.start(0, tally), count()

    def call() -> None:
        at = next(number) % STEPS
        if at == 0:
            loader.rewind()
        step(at)

    return call


def _noise(shape: ModelConfig, images: int) -> TrainingData:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, *shape.image_shape), generator=generator, dtype=torch.uint8)
    labels = torch.randint(shape.num_classes, (images,), generator=generator)
    split = Split(pixels, labels)
    classes = [str(number) for number in range(shape.num_classes)]
    source = Source("noise", classes, lambda part: split, ("train",))
    return TrainingData(source, split, None, Preparation(shape.image_shape, (0.5,) * 3, (0.25,) * 3), "noise")
