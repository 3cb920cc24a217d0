"""Stochastic depth in training: drawn per image with the other draws of an epoch, not from torch's generator."""

from pathlib import Path

import pytest
import torch

from tests.training.test_captured import train_epochs
from tests.training.test_dino import DINO
from tests.training.test_mae import MAE
from tests.training.test_runs import build_state_and_run
from tests.training.tiny import tiny_run
from vitascope.data.sampling import select_step_draws
from vitascope.training.engines.single_run import make_engine
from vitascope.training.loader import make_epoch_plan
from vitascope.training.step import MetricSums

DEPTH = {"model.drop_path_rate": 0.4, "train.epochs": 2}
OBJECTIVES = {
    "classify": {"data.augment.cutmix": 1.0},
    "patches": {"train.patch_share": 0.5, "train.patch_share_until": 0.5},  # each phase for one epoch
    "mae": MAE | {"mae.pictures": 0},
    "dino": DINO | {"dino.batch_norm": False, "train.epochs": 2},
    "dino without local crops": DINO | {"dino.batch_norm": False, "dino.local_crops": 0, "train.epochs": 2},
    "checkpointing": {"model.grad_checkpointing": "true"},
}
of_every_objective = pytest.mark.parametrize("settings", OBJECTIVES.values(), ids=OBJECTIVES)


def train_losses(folder: Path, **settings) -> list[float]:
    return [row["train_loss"] for row in tiny_run(folder, **settings).metrics]


@of_every_objective
def test_accumulating_drops_the_same_branches(tmp_path, settings) -> None:
    """Rounding grows with the steps and their size."""
    settings = DEPTH | {"train.lr": 1e-4} | settings
    whole, parts = (train_losses(tmp_path, **settings, **{"train.grad_accum_steps": count}) for count in (1, 2))
    assert parts == pytest.approx(whole, rel=1e-5)


@of_every_objective
def test_training_takes_no_draw_from_torchs_generator_and_drops_branches(tmp_path, settings) -> None:
    losses = {}
    for rate in (0.0, 0.4):
        state, _ = build_state_and_run(tmp_path, **(DEPTH | settings | {"model.drop_path_rate": rate}))
        engine = make_engine(state, MetricSums.empty(state))
        before = torch.get_rng_state()
        losses[rate] = train_epochs(state, engine, 2)
        assert torch.equal(torch.get_rng_state(), before)
    assert losses[0.0] != pytest.approx(losses[0.4], rel=1e-4)


def test_every_view_has_its_own_noise_for_two_branches_per_block(tmp_path) -> None:
    state, _ = build_state_and_run(tmp_path, **(DINO | DEPTH))
    draws = make_epoch_plan(state, epoch=1).draws
    images, labels = state.data.train.images[:64], state.data.train.labels[:64]
    batch = state.objective.augment_batch(images, labels, select_step_draws(draws, 3))
    noise = batch[4:]  # after the crops of four views
    assert [tuple(view.shape) for view in noise] == [(64, 2 * 2)] * 4
    assert all(torch.equal(view, draws[f"{index}/depth"][3]) for index, view in enumerate(noise))
    assert len({view.sum().item() for view in noise}) == 4


def test_without_stochastic_depth_nothing_is_drawn(tmp_path) -> None:
    for settings in ({}, MAE, DINO):
        state, _ = build_state_and_run(tmp_path, **settings)
        assert not any("depth" in name for name in make_epoch_plan(state, epoch=0).draws)
