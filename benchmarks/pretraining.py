"""`python -m benchmarks.pretraining`: the benefit of pretraining without labels, with 1, 10 and 100 % of the labels.

One model starts from scratch, after DINO, or after MAE. All three are fine-tuned for equally many steps with each
fraction of the labels; learning rates differ by start. Training from scratch is repeated with the FLOPs of pretraining
and fine-tuning (equal compute). Without `--tune`, all training images are used, and each run is evaluated once on the
test images. Features are also evaluated by k-nearest neighbours and a linear probe. The record is written after each
run. `--go-on` continues records of the same settings.
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
MOST_EPOCHS = 60  # with few images, an epoch has several passes to limit the overhead of validation
SCRATCH, LONGER = "from scratch", "from scratch, as much compute"
AFTER = {"dino": "after DINO", "mae": "after MAE"}


def common(asked: argparse.Namespace) -> dict[str, Any]:
    validation = 0.1 if asked.tune else 0
    return {"data.name": asked.data, "data.validation": validation, "train.device": asked.device}


def pretrain(start: str, seed: int, asked: argparse.Namespace) -> Run:
    """Pretrain without labels, or return an existing run."""
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
    """Evaluate the frozen features on test images (with --tune: validation images)."""
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
    """Training FLOPs of a run: forward and backward (twice forward), for all crops or visible patches."""
    return 3.0 * total_flops(run.recipe.model) * passes(run.recipe) * run.metrics[-1]["images_seen"]


def finetune(arm: str, share: float, seed: int, start: Run | None, more: float, asked: argparse.Namespace) -> dict:
    """Fine-tune one arm; `more`: factor on the usual number of epochs."""
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
    return row | {"flops": 3.0 * row["flops"] * row["passes"] * row["images_seen"]}  # of the whole training


def measure(seed: int, asked: argparse.Namespace, record: GrowingRecord) -> None:
    """Measure one seed: features, and equally long fine-tuning of all arms."""
    starts = {start: pretrain(start, seed, asked) for start in asked.starts}
    for start, run in starts.items():
        if not record.has(arm=AFTER[start], kind="features", seed=seed):
            record.add(features(start, run, asked))
    for share in asked.labels:
        for arm, run in {SCRATCH: None, **{AFTER[start]: run for start, run in starts.items()}}.items():
            if not record.has(arm=arm, labels=share, seed=seed):
                record.add(finetune(arm, share, seed, run, 1.0, asked))


def measure_longer(seed: int, share: float, asked: argparse.Namespace, record: GrowingRecord) -> None:
    """Train from scratch with the compute of both stages of the most expensive arm.

    The compute of pretraining is taken from the record, so its run need not exist."""
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
    parser.add_argument("--data", default="cifar10", help="data set; the recipes are DATA-dino and DATA-mae")
    parser.add_argument("--images", type=int, default=50_000, help="number of training images of the data set")
    parser.add_argument("--starts", nargs="*", choices=STARTS, default=list(STARTS))
    parser.add_argument("--labels", nargs="+", type=float, default=[0.01, 0.1, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dino-epochs", type=int)
    parser.add_argument("--mae-epochs", type=int)
    parser.add_argument("--steps", type=int, default=3000, help="fine-tuning steps with all labels")
    parser.add_argument("--fewer", type=float, default=0.5, help="fraction of those steps with fewer labels")
    parser.add_argument(
        "--longer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train from scratch with equal compute",
    )
    parser.add_argument("--only-longer", action="store_true", help="only that; needs --go-on")
    parser.add_argument("--longest", type=float, default=100.0, help="maximum factor on the usual number of epochs")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--layer-decay", type=float, default=0.8)
    add_run_options(parser, runs="runs-pretraining", out=RESULTS / "pretraining.json")
    parser.add_argument("--draw", type=Path, help="draw this record to --out (.png) instead of training")
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
