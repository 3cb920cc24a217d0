"""A run so small that tests can make dozens: 8×8 digits, one thin block."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import vitascope
from vitascope.run.directory import Run

TINY = {
    "model.embed_dim": 16,
    "model.depth": 2,
    "model.num_heads": 2,
    "train.epochs": 3,
    "train.batch_size": 64,
    "train.device": "cpu",
    "train.precision": "float32",
    "train.save_seconds": 0,
}
EVERYTHING = TINY | {
    "train.optimizer": "muon",
    "train.ema": 0.9,
    "train.layer_decay": 0.8,
    "model.drop_path_rate": 0.2,
    "model.proj_drop_rate": 0.1,
    "data.augment.cutmix": 1.0,
    "data.augment.mixup": 0.4,
    "data.augment.erase": 0.25,
}
TIMES = ("seconds", "train_seconds", "images_per_second", "prepared_seconds")


def tiny_run(folder: Path, **settings) -> Run:
    return vitascope.train("digits", runs=folder, quiet=True, **(TINY | settings))


def shared_run(folder: Path, **settings) -> Run:
    """A copy of the run that these settings give: trained once in the test process, for tests that only read it."""
    trained = _train_once(tuple(sorted(settings.items())))
    place = folder / "digits" / trained.path.name
    shutil.copytree(trained.path, place)
    return Run(place)


@cache
def _train_once(settings: tuple[tuple[str, object], ...]) -> Run:
    return tiny_run(Path(_KEPT.name) / str(len(list(Path(_KEPT.name).iterdir()))), **dict(settings))


_KEPT = TemporaryDirectory(prefix="vitascope-tests-")
atexit.register(_KEPT.cleanup)


def untimed(run: Run) -> list[dict]:
    """The metrics without what a clock says."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in run.metrics]
