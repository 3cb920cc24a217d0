"""python -m tests.training.compiled_steps FOLDER: print eager and compiled losses as JSON.

A separate process, because the tests' shape checks cannot be traced. Steps are traced as on a GPU but run by PyTorch's
own operations, so no compiler is needed. A graph break is an error.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from tests.training.test_runs import build_state_and_run
from tests.training.tiny import tiny_run
from vitascope.training.engines.batched import BatchedTraining

VARIED = {"data.augment.cutmix": 1.0, "data.augment.mixup": 0.4, "data.augment.erase": 0.25, "train.device": "cpu"}
DINO = {"train.objective": "dino", "train.ema": 0, "dino.prototypes": 32, "dino.local_size": 4, "dino.hidden": 32}
OBJECTIVES = {"classify": VARIED, "mae": {"train.objective": "mae", "mae.pictures": 0}, "dino": DINO}
OBJECTIVES["simmim"] = {"train.objective": "simmim", "simmim.pictures": 0}


def train_single_runs(folder: Path, settings: dict, compiled: str) -> list[float]:
    """Return the losses of two seeds, which have different splits, means and deviations."""
    common = settings | {"model.drop_path_rate": 0.2, "train.epochs": 2, "train.compile": compiled}
    runs = [tiny_run(folder / compiled, **common, **{"train.seed": seed}) for seed in (1, 2)]
    return [row["train_loss"] for run in runs for row in run.metrics]


def train_batched(folder: Path, settings: dict, compiled: str) -> list[float]:
    """Return the losses of two batched models, then of three with another batch size."""
    losses = []
    for batch, seeds in ((64, (1, 2)), (32, (1, 2, 3))):
        overrides = settings | {"train.compile": compiled, "train.optimizer": "muon", "train.batch_size": batch}
        batched = BatchedTraining(
            [build_state_and_run(folder / compiled, **overrides, **{"train.seed": seed})[0] for seed in seeds]
        )
        losses += batched.train_epoch(0).loss.tolist()
        batched.close()
    return losses


def main(folder: Path) -> None:
    names: list[str] = []
    compiling = partial(torch.compile, backend="aot_eager", fullgraph=True)

    def compile_and_record_name(part, **options):
        names.append(getattr(part, "__name__", type(part).__name__))
        return compiling(part, **options)

    torch.compile = compile_and_record_name
    results = {}
    variants = {name: (train_single_runs, settings) for name, settings in OBJECTIVES.items()} | {
        "together": (train_batched, VARIED)
    }
    for name, (train, settings) in variants.items():
        plain = train(folder / name, settings, "never")
        names.clear()
        results[name] = {"plain": plain, "compiled": train(folder / name, settings, "always"), "parts": list(names)}
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
