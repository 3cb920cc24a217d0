"""Train recipes and record test accuracy, seconds, the time to a target accuracy, and the training loop's overhead.

python -m benchmarks.first_runs mnist cifar10 --out results/first-runs.json [--commit …] [train.compile=always …]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.records import Row
from benchmarks.timing import synchronize_device
from vitascope.inference.open_model import open_model
from vitascope.model.anatomy import count_parameters
from vitascope.recipe.reading import read_recipe
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import collect_machine_info
from vitascope.training.engines.single_run import make_engine
from vitascope.training.prepare import make_console, open_data_and_print_notes, seed_and_build_train_state
from vitascope.training.step import MetricSums
from vitascope.training.train import train_recipe

TARGET_ACCURACIES = {"mnist": 0.9461, "sheet-a": 0.9461, "cifar10": 0.70}  # the targets of sheets A and E


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="+", help="recipes, and key=value settings for all of them")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit")
    args = parser.parse_args()
    settings = [argument for argument in args.recipes if "=" in argument]
    names = [argument for argument in args.recipes if "=" not in argument]
    recorded = [setting for setting in settings if not setting.startswith("data.root=")]  # a path of this machine
    record: dict[str, Any] = {
        "name": args.out.stem,
        "command": f"python -m benchmarks.first_runs {' '.join(names + recorded)}",
    }
    record |= collect_machine_info(args.commit) | {"rows": []}
    for name in names:
        record["rows"].append(train_and_measure(name, settings, args.runs))
        make_folder(args.out.parent)
        write_json(args.out, record)


def train_and_measure(recipe_name: str, overrides: list[str], runs_folder: Path) -> Row:
    start = time.monotonic()
    run = train_recipe(read_recipe(recipe_name, overrides), runs_folder, make_console(quiet=True))
    cold_seconds = time.monotonic() - start
    evaluation, rows, recipe = open_model(run, device="auto").evaluate(), run.metrics, run.recipe
    row = {
        "recipe": recipe_name,
        "track": "pure",
        "params": count_parameters(recipe.model),
        "tokens": recipe.model.num_tokens,
        "images_seen": rows[-1]["images_seen"],
        "views": 1,
        "seed": recipe.train.seed,
        "validation": recipe.data.validation,
        "test_accuracy": evaluation.accuracy,
        "seconds": round(sum(row["seconds"] for row in rows), 2),
        "cold_seconds": round(cold_seconds, 2),
        "images_per_second": rows[-1]["images_per_second"],
        "hardware": run.machine["hardware"],
        "overhead": round(measure_loop_overhead(run), 4),
    }
    if recipe_name in TARGET_ACCURACIES and "val_accuracy" in rows[0]:
        row |= {
            "bar": TARGET_ACCURACIES[recipe_name],
            "bar_passed_after_seconds": compute_seconds_to_accuracy(rows, TARGET_ACCURACIES[recipe_name]),
        }
    print(json.dumps(row), flush=True)
    return row


def compute_seconds_to_accuracy(metric_rows: list[Row], target_accuracy: float) -> float | None:
    """Return the seconds, including validation, until the validation accuracy first exceeded the target."""
    seconds = 0.0
    for row in metric_rows:
        seconds += row["seconds"]
        if row["val_accuracy"] > target_accuracy:
            return round(seconds, 2)
    return None


def measure_loop_overhead(run: Run, num_rounds: int = 5) -> float:
    """Return 1 - (bare step time × steps) / (epoch time without validation), measured by repeating the steps alone."""
    state = seed_and_build_train_state(run.recipe, open_data_and_print_notes(run.recipe, make_console(quiet=True)))
    engine, times = make_engine(state, MetricSums.empty(state)), []
    engine.start_epoch(0)
    for _ in range(num_rounds):
        engine.reset_step_counters()
        synchronize_device(state.hardware.device)
        start = time.monotonic()
        for _ in range(state.steps_per_epoch):
            engine.run_next_step()
        synchronize_device(state.hardware.device)
        times.append(time.monotonic() - start)
    engine.close()
    epoch_seconds = sorted(row["train_seconds"] for row in run.metrics[len(run.metrics) // 2 :])
    return 1 - sorted(times)[num_rounds // 2] / epoch_seconds[len(epoch_seconds) // 2]


if __name__ == "__main__":
    main()
