"""`python -m benchmarks.pretraining`: the benefit of pretraining without labels, with 1, 10 and 100 % of the labels.

One model starts from scratch, or after DINO, MAE or SimMIM. All are fine-tuned for equally many steps with each
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

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.arms import train_and_measure
from benchmarks.figures import draw_accuracy_by_label_fraction
from benchmarks.records import GrowingRecord, add_run_options
from vitascope import open_model, train
from vitascope.draw.style import save_figure
from vitascope.evaluation.probe import evaluate_knn_and_linear_probe
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.number_format import format_percent
from vitascope.run.directory import Run
from vitascope.run.metrics import sum_epoch_seconds
from vitascope.training.hardware import count_equivalent_forward_passes

MAX_EPOCHS = 60  # with few images, an epoch has several passes to limit the overhead of validation
SCRATCH_ARM, EQUAL_COMPUTE_ARM = "from scratch", "from scratch, as much compute"
ARM_BY_METHOD = {"dino": "after DINO", "mae": "after MAE", "simmim": "after SimMIM"}


def make_common_settings(args: argparse.Namespace) -> dict[str, Any]:
    validation = 0.1 if args.tune else 0
    return {"data.name": args.data, "data.validation": validation, "train.device": args.device}


def pretrain_or_find_run(pretraining_method: str, seed: int, args: argparse.Namespace) -> Run:
    """Pretrain without labels, or return an existing run."""
    epochs = getattr(args, f"{pretraining_method}_epochs")
    folder = args.runs / f"{args.data}-{pretraining_method}"
    for path in sorted(folder.glob(f"*-seed{seed}/model.safetensors"), reverse=True):
        recipe = Run(path.parent).recipe
        has_same_data = recipe.data.validation == make_common_settings(args)["data.validation"]
        if has_same_data and epochs in (None, recipe.train.epochs):
            return Run(path.parent)
    settings: dict[str, Any] = make_common_settings(args) | {"train.seed": seed}
    if epochs:
        settings["train.epochs"] = epochs
    return train(f"{args.data}-{pretraining_method}", runs=args.runs, quiet=False, **settings)


def evaluate_features(pretraining_method: str, run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the frozen features on test images (with --tune: validation images)."""
    result = evaluate_knn_and_linear_probe(open_model(run, device=args.device), "val" if args.tune else "test")
    row = {
        "arm": ARM_BY_METHOD[pretraining_method],
        "kind": "features",
        "seed": run.recipe.train.seed,
        "knn": round(result.knn, 4),
    }
    row |= {
        "linear": round(result.linear, 4),
        "spread": round(result.spread, 4),
        "seconds": round(sum_epoch_seconds(run.metrics), 1),
    }
    row |= {
        "epochs": len(run.metrics),
        "flops": count_training_flops(run),
        "images_seen": run.metrics[-1]["images_seen"],
    }
    print(row, flush=True)
    return row


def count_training_flops(run: Run) -> float:
    """Return the training FLOPs of a run: forward and backward (twice forward), for all crops or visible patches."""
    return (
        3.0
        * count_forward_flops_per_image(run.recipe.model)
        * count_equivalent_forward_passes(run.recipe)
        * run.metrics[-1]["images_seen"]
    )


def finetune_and_measure(
    arm_name: str,
    label_fraction: float,
    seed: int,
    pretrained_run: Run | None,
    epoch_factor: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Fine-tune one arm; `epoch_factor`: factor on the usual number of epochs."""
    steps = args.steps if label_fraction == 1 else max(1, round(args.steps * args.fewer))
    images = args.images * (0.9 if args.tune else 1) * label_fraction
    num_passes = max(1, round(epoch_factor * steps * args.batch / max(images, args.batch)))
    passes_per_epoch = max(1, round(num_passes / MAX_EPOCHS))
    epochs = max(1, round(num_passes / passes_per_epoch))
    settings = make_common_settings(args) | {
        "data.fraction": label_fraction,
        "train.epochs": epochs,
        "train.seed": seed,
    }
    settings |= {"data.passes_per_epoch": passes_per_epoch}
    settings |= {"train.batch_size": args.batch, "train.compile": args.compile}
    if pretrained_run is not None:
        settings |= {"weights": str(pretrained_run.path.resolve()), "train.layer_decay": args.layer_decay}
        settings |= {"train.muon_lr": args.muon_lr, "train.lr": args.lr}
    row = {"arm": arm_name, "kind": "fine-tuned", "labels": label_fraction, "seed": seed}
    row |= train_and_measure(
        f"{arm_name}, {format_percent(label_fraction, 0)} of the labels",
        args.data,
        settings,
        args,
        runs_folder=args.runs / "finetuned",
    )
    return row | {"flops": 3.0 * row["flops"] * row["passes"] * row["images_seen"]}  # of the whole training


def measure_seed(seed: int, args: argparse.Namespace, record: GrowingRecord) -> None:
    """Measure one seed: features, and equally long fine-tuning of all arms."""
    starts = {start: pretrain_or_find_run(start, seed, args) for start in args.starts}
    for start, run in starts.items():
        if not record.has_row(arm=ARM_BY_METHOD[start], kind="features", seed=seed):
            record.add_row(evaluate_features(start, run, args))
    for fraction in args.labels:
        for arm, run in {SCRATCH_ARM: None, **{ARM_BY_METHOD[start]: run for start, run in starts.items()}}.items():
            if not record.has_row(arm=arm, labels=fraction, seed=seed):
                record.add_row(finetune_and_measure(arm, fraction, seed, run, 1.0, args))


def measure_equal_compute(seed: int, label_fraction: float, args: argparse.Namespace, record: GrowingRecord) -> None:
    """Train from scratch with the compute of both stages of the most expensive arm.

    The compute of pretraining is taken from the record, so its run need not exist."""
    if record.has_row(arm=EQUAL_COMPUTE_ARM, labels=label_fraction, seed=seed):
        return
    if not any(row["kind"] == "features" and row["seed"] == seed for row in record.rows):
        raise SystemExit(f"--only-longer needs --go-on with a record of seed {seed}'s pretraining.")
    scratch_row = next(row for row in record.rows if row["arm"] == SCRATCH_ARM and row.get("labels") == label_fraction)
    pretraining_flops = [row["flops"] for row in record.rows if row["kind"] == "features" and row["seed"] == seed]
    epoch_factor = 1 + max(pretraining_flops) / scratch_row["flops"]
    row = finetune_and_measure(EQUAL_COMPUTE_ARM, label_fraction, seed, None, min(epoch_factor, args.longest), args)
    record.add_row(
        row | {"times_as_long": min(epoch_factor, args.longest), "equal_compute": epoch_factor <= args.longest}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", help="data set; the recipes are DATA-dino and so on")
    parser.add_argument("--images", type=int, default=50_000, help="number of training images of the data set")
    parser.add_argument("--starts", nargs="*", choices=list(ARM_BY_METHOD), default=list(ARM_BY_METHOD))
    parser.add_argument("--labels", nargs="+", type=float, default=[0.01, 0.1, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    for method in ARM_BY_METHOD:
        parser.add_argument(f"--{method}-epochs", type=int)
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
    add_run_options(parser, runs_folder="runs-pretraining", record_path=RESULTS_FOLDER / "pretraining.json")
    parser.add_argument("--draw", type=Path, help="draw this record to --out (.png) instead of training")
    args = parser.parse_args()
    if args.draw:
        rows = json.loads(args.draw.read_text(encoding="utf-8"))["rows"]
        save_figure(draw_accuracy_by_label_fraction([row for row in rows if row["kind"] == "fine-tuned"]), args.out)
        return
    record = GrowingRecord("benchmarks.pretraining", args)
    for seed in args.seeds if not args.only_longer else ():
        measure_seed(seed, args, record)
    for seed, fraction in itertools.product(args.seeds if args.starts and args.longer else (), args.labels):
        measure_equal_compute(seed, fraction, args, record)
    record.write()
    print(f"Record: {args.out}")


if __name__ == "__main__":
    main()
