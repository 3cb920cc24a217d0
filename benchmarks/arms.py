"""Train one arm of a benchmark and return its row: accuracy, size, time."""

import argparse
import gc
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.figures import TimePoint
from benchmarks.records import Row
from vitascope import open_model, train
from vitascope.model.anatomy import count_forward_flops_per_image, count_parameters
from vitascope.number_format import format_percent
from vitascope.run.metrics import list_epoch_seconds_without_setup, sum_epoch_seconds, sum_seconds_without_setup
from vitascope.training.hardware import count_equivalent_forward_passes


def train_and_measure(
    arm_name: str,
    recipe_name: str,
    settings: dict[str, Any],
    args: argparse.Namespace,
    *,
    view_counts: Sequence[int] = (1,),
    with_curve: bool = False,
    runs_folder: Path | None = None,
) -> Row:
    """Train and evaluate one arm. With `--tune` the accuracy is measured on validation images, else on test images.

    The accuracy is that of the first number of views; with several, the row has each."""
    start = time.perf_counter()
    run = train(recipe_name, runs=runs_folder or args.runs, quiet=True, **settings)
    cold_seconds, rows, model = time.perf_counter() - start, run.metrics, run.recipe.model
    trained = open_model(run, device=args.device)
    split = "val" if args.tune else "test"
    if split == "val" and list(view_counts) == [1]:
        scores = {1: rows[-1]["val_accuracy"]}
    else:
        scores = {views: trained.evaluate(split, views=views).accuracy for views in view_counts}
    score = scores[view_counts[0]]
    row = {"accuracy": round(score, 5), "parameters": count_parameters(model), "tokens": model.num_tokens}
    row |= {
        "flops": count_forward_flops_per_image(model),
        "passes": round(count_equivalent_forward_passes(run.recipe), 4),
        "lr": run.recipe.train.lr,
    }
    row |= {"images_seen": rows[-1]["images_seen"], "epochs": len(rows) * run.recipe.data.passes_per_epoch}
    row |= {"train_accuracy": round(rows[-1]["train_accuracy"], 4), "cold_seconds": round(cold_seconds, 1)}
    row |= {"seconds": round(sum_epoch_seconds(rows), 1), "steady_seconds": round(sum_seconds_without_setup(rows), 2)}
    train_seconds = sum(
        list_epoch_seconds_without_setup(rows, "train_seconds")
    )  # also if the first epochs use fewer patches
    row |= {"train_seconds": round(train_seconds, 2)}
    row |= {"images_per_second": round(rows[-1]["images_seen"] / train_seconds)}
    row |= {"val_loss": round(rows[-1]["val_loss"], 4)} if "val_loss" in rows[-1] else {}
    row |= {"accuracy_by_views": scores} if len(view_counts) > 1 else {}
    row |= {"compiled": run.machine["hardware"]["compiled"]}
    row |= {"curve": compute_accuracy_over_time(rows)} if with_curve else {}
    size = f"{row['parameters']:,} parameters, {row['steady_seconds']} s, {row['images_per_second']:,} images/s"
    accuracies = " / ".join(format_percent(score, 2) for score in scores.values())
    print(f"{arm_name:42s} seed {run.recipe.train.seed}: {accuracies}, {size}", flush=True)
    del trained
    gc.collect()  # a CUDA graph keeps its memory in a reference cycle
    return row


def compute_accuracy_over_time(metric_rows: list[Row]) -> list[TimePoint]:
    """Return, per epoch, training seconds so far, without set-up and validation, and the validation accuracy."""
    times = accumulate(list_epoch_seconds_without_setup(metric_rows, "train_seconds"))
    points = zip(times, (row["val_accuracy"] for row in metric_rows), strict=True)
    return [TimePoint(round(seconds, 3), round(accuracy, 4)) for seconds, accuracy in points]
