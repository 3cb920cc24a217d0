"""One small trained run, copied for each test that writes into it."""

import shutil
from pathlib import Path

import pytest

from tests.training.tiny import tiny_run
from vitascope.run.directory import Run

GOOD = {"train.epochs": 20, "train.optimizer": "muon", "train.ema": 0.9, "data.augment.mixup": 0, "model.embed_dim": 32}


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("made"), **GOOD)


@pytest.fixture
def run(made_once: Run, tmp_path: Path) -> Run:
    """A run of one's own."""
    place = tmp_path / "runs" / "digits" / made_once.path.name
    shutil.copytree(made_once.path, place)
    return Run(place)
