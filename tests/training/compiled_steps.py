"""python -m tests.training.compiled_steps FOLDER: plain and compiled losses of objectives and of many models, as JSON.

A process of its own: the tests' shape checks cannot be traced. Steps are traced as on a GPU but run by PyTorch's own
operations, so no compiler is needed; a part that cannot be traced whole is an error.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from tests.training.test_runs import session_of
from tests.training.tiny import tiny_run
from vitascope.training.engines.batched import BatchedTraining

VARIED = {"data.augment.cutmix": 1.0, "data.augment.mixup": 0.4, "data.augment.erase": 0.25, "train.device": "cpu"}
DINO = {"train.objective": "dino", "train.ema": 0, "dino.prototypes": 32, "dino.local_size": 4, "dino.hidden": 32}
OBJECTIVES = {"classify": VARIED, "mae": {"train.objective": "mae", "mae.pictures": 0}, "dino": DINO}


def alone(folder: Path, settings: dict, compiled: str) -> list[float]:
    """Two seeds: another seed is another split, with another mean and deviation."""
    common = settings | {"train.epochs": 2, "train.compile": compiled}
    runs = [tiny_run(folder / compiled, **common, **{"train.seed": seed}) for seed in (1, 2)]
    return [row["train_loss"] for run in runs for row in run.metrics]


def together(folder: Path, settings: dict, compiled: str) -> list[float]:
    """Of two models, then of three with other batches."""
    losses = []
    for batch, seeds in ((64, (1, 2)), (32, (1, 2, 3))):
        own = settings | {"train.compile": compiled, "train.optimizer": "muon", "train.batch_size": batch}
        crowd = BatchedTraining([session_of(folder / compiled, **own, **{"train.seed": seed})[0] for seed in seeds])
        losses += crowd.train_epoch(0)[0].tolist()
        crowd.close()
    return losses


def main(folder: Path) -> None:
    names: list[str] = []
    compiling = partial(torch.compile, backend="aot_eager", fullgraph=True)

    def compile_and_tell(part, **how):
        names.append(getattr(part, "__name__", type(part).__name__))
        return compiling(part, **how)

    torch.compile = compile_and_tell
    found = {}
    ways = {name: (alone, settings) for name, settings in OBJECTIVES.items()} | {"together": (together, VARIED)}
    for name, (way, settings) in ways.items():
        plain = way(folder / name, settings, "never")
        names.clear()
        found[name] = {"plain": plain, "compiled": way(folder / name, settings, "always"), "parts": list(names)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
