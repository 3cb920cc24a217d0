"""`python -m benchmarks.pretraining`: when learning without labels pays, with 1, 10 and 100 % of the labels.

Three starts of one model: from scratch, after DINO, after MAE. Every share of the labels is fine-tuned in as many steps
from each (the rates are each start's own); from scratch also for as long as pretraining and fine-tuning take together,
counted in FLOPs (equal compute). Without `--tune` all training images are used and the test images opened once per run;
the features are judged by their neighbours and a linear probe too. What is measured is kept after each run; `--go-on`
takes a record of the same settings and measures what is missing.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from benchmarks.__main__ import RESULTS
from benchmarks.arms import measured
from benchmarks.records import GrowingRecord, add_run_options
from vitascope import load, train
from vitascope.draw.arms import draw_shares
from vitascope.draw.look import save
from vitascope.evaluation.probe import probe
from vitascope.model.anatomy import total_flops
from vitascope.run.directory import Run
from vitascope.run.metrics import whole_seconds
from vitascope.training.hardware import passes

STARTS = ("dino", "mae")
MOST_EPOCHS = 60  # of few images an epoch goes over them often, so that its end does not cost more than its steps
SCRATCH, LONGER = "from scratch", "from scratch, as much compute"
AFTER = {"dino": "after DINO", "mae": "after MAE"}


def common(asked: argparse.Namespace) -> dict[str, Any]:
    validation = 0.1 if asked.tune else 0
    return {"data.name": asked.data, "data.validation": validation, "train.device": asked.device}


def pretrain(start: str, seed: int, asked: argparse.Namespace) -> Run:
    """Fifty thousand images without labels, or a run that is there already."""
    wanted = {"dino": asked.dino_epochs, "mae": asked.mae_epochs}[start]
    for place in sorted((asked.runs / f"{asked.data}-{start}").glob(f"*-seed{seed}/model.safetensors"), reverse=True):
        recipe = Run(place.parent).recipe
        if recipe.data.validation == common(asked)["data.validation"] and wanted in (None, recipe.train.epochs):
            return Run(place.parent)
    chosen: dict[str, Any] = common(asked) | {"train.seed": seed}
    if wanted:
        chosen["train.epochs"] = wanted
    return train(f"{asked.data}-{start}", runs=asked.runs, quiet=False, **chosen)


def features(start: str, run: Run, asked: argparse.Namespace) -> dict[str, Any]:
    """What the frozen features are worth, on test images (or validation's, to tune)."""
    found = probe(load(run, device=asked.device), "val" if asked.tune else "test")
    row = {"arm": AFTER[start], "kind": "features", "seed": run.recipe.train.seed, "knn": round(found.knn, 4)}
    row |= {
        "linear": round(found.linear, 4),
        "spread": round(found.spread, 4),
        "seconds": round(whole_seconds(run.metrics), 1),
    }
    row |= {"epochs": len(run.metrics), "flops": total(run), "images_seen": run.metrics[-1]["images_seen"]}
    print(row, flush=True)
    return row


def total(run: Run) -> float:
    """FLOPs of a run's training: forward, and twice that backward, of all crops or visible patches."""
    return 3.0 * total_flops(run.recipe.model) * passes(run.recipe) * run.metrics[-1]["images_seen"]


def finetune(arm: str, share: float, seed: int, start: Run | None, more: float, asked: argparse.Namespace) -> dict:
    """`more`: how many times the usual epochs."""
    steps = asked.steps if share == 1 else max(1, round(asked.steps * asked.fewer))
    images = asked.images * (0.9 if asked.tune else 1) * share
    passes_over = max(1, round(more * steps * asked.batch / max(images, asked.batch)))
    repeat = max(1, round(passes_over / MOST_EPOCHS))
    epochs = max(1, round(passes_over / repeat))
    chosen = common(asked) | {"data.fraction": share, "train.epochs": epochs, "train.seed": seed}
    chosen |= {"data.passes_per_epoch": repeat}
    chosen |= {"train.batch_size": asked.batch, "train.compile": asked.compile}
    if start is not None:
        chosen |= {"weights": str(start.path.resolve()), "train.layer_decay": asked.layer_decay}
        chosen |= {"train.muon_lr": asked.muon_lr, "train.lr": asked.lr}
    row = {"arm": arm, "kind": "fine-tuned", "labels": share, "seed": seed}
    row |= measured(f"{arm}, {share:.0%} of the labels", asked.data, chosen, asked, runs=asked.runs / "finetuned")
    return row | {"flops": 3.0 * row["flops"] * row["passes"] * row["images_seen"]}  # of its whole training


def measure(seed: int, asked: argparse.Namespace, record: GrowingRecord) -> None:
    """A seed's features, and its labels at equal fine-tuning."""
    starts = {start: pretrain(start, seed, asked) for start in asked.starts}
    for start, run in starts.items():
        if not record.has(arm=AFTER[start], kind="features", seed=seed):
            record.add(features(start, run, asked))
    for share in asked.labels:
        for arm, run in {SCRATCH: None, **{AFTER[start]: run for start, run in starts.items()}}.items():
            if not record.has(arm=arm, labels=share, seed=seed):
                record.add(finetune(arm, share, seed, run, 1.0, asked))


def measure_longer(seed: int, share: float, asked: argparse.Namespace, record: GrowingRecord) -> None:
    """From scratch, for as much compute as the dearest of the other ways takes in both stages; the longest runs, last.

    What pretraining took is in the record: its run need not be there any more."""
    if record.has(arm=LONGER, labels=share, seed=seed):
        return
    if not any(row["kind"] == "features" and row["seed"] == seed for row in record.rows):
        raise SystemExit(f"--only-longer needs --go-on with a record of seed {seed}'s pretraining.")
    usual = next(row for row in record.rows if row["arm"] == SCRATCH and row.get("labels") == share)
    before = [row["flops"] for row in record.rows if row["kind"] == "features" and row["seed"] == seed]
    more = 1 + max(before) / usual["flops"]
    row = finetune(LONGER, share, seed, None, min(more, asked.longest), asked)
    record.add(row | {"times_as_long": min(more, asked.longest), "equal_compute": more <= asked.longest})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", help="DATA-dino and DATA-mae are the recipes")
    parser.add_argument("--images", type=int, default=50_000, help="training images of the data")
    parser.add_argument("--starts", nargs="*", choices=STARTS, default=list(STARTS))
    parser.add_argument("--labels", nargs="+", type=float, default=[0.01, 0.1, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dino-epochs", type=int)
    parser.add_argument("--mae-epochs", type=int)
    parser.add_argument("--steps", type=int, default=3000, help="of fine-tuning with all labels")
    parser.add_argument("--fewer", type=float, default=0.5, help="share of those steps with fewer labels")
    parser.add_argument("--longer", action=argparse.BooleanOptionalAction, default=True, help="scratch, equal compute")
    parser.add_argument("--only-longer", action="store_true", help="nothing but that, with --go-on")
    parser.add_argument("--longest", type=float, default=100.0, help="at most so many times the usual epochs")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--layer-decay", type=float, default=0.8)
    add_run_options(parser, runs="runs-pretraining", out=RESULTS / "pretraining.json")
    parser.add_argument("--draw", type=Path, help="a record: draw it into --out (.png) instead")
    asked = parser.parse_args()
    if asked.draw:
        rows = json.loads(asked.draw.read_text(encoding="utf-8"))["rows"]
        save(draw_shares([row for row in rows if row["kind"] == "fine-tuned"]), asked.out)
        return
    record = GrowingRecord("benchmarks.pretraining", asked)
    for seed in asked.seeds if not asked.only_longer else ():
        measure(seed, asked, record)
    for seed, share in itertools.product(asked.seeds if asked.starts and asked.longer else (), asked.labels):
        measure_longer(seed, share, asked, record)
    record.write()
    print(f"Record: {asked.out}")


if __name__ == "__main__":
    main()
