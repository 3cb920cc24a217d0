"""Train recipes and record test accuracy, seconds, the time to a target accuracy, and the training loop's overhead.

python -m benchmarks.first_runs mnist cifar10 --out results/first-runs.json [--commit …] [train.compile=always …]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.worker import wait_for
from vitascope.evaluation.trained import load
from vitascope.model.anatomy import total_parameters
from vitascope.recipe.reading import read_recipe
from vitascope.run.directory import Run
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import record_of_machine
from vitascope.training.feeding import EpochLoader
from vitascope.training.session import start_session
from vitascope.training.step import Tally
from vitascope.training.train import console_for, open_data, train_recipe

BARS = {"mnist": 0.9461, "sheet-a": 0.9461, "cifar10": 0.70}  # the targets of sheets A and E


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="+", help="recipes, and key=value settings for all of them")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit")
    asked = parser.parse_args()
    settings = [word for word in asked.recipes if "=" in word]
    names = [word for word in asked.recipes if "=" not in word]
    recorded = [word for word in settings if not word.startswith("data.root=")]  # the path of the data is not recorded
    record: dict[str, Any] = {
        "name": asked.out.stem,
        "command": f"python -m benchmarks.first_runs {' '.join(names + recorded)}",
    }
    record |= record_of_machine(asked.commit) | {"rows": []}
    for name in names:
        record["rows"].append(measure(name, settings, asked.runs))
        make_folder(asked.out.parent)
        write_json(asked.out, record)


def measure(name: str, settings: list[str], runs: Path) -> dict[str, Any]:
    start = time.monotonic()
    run = train_recipe(read_recipe(name, settings), runs, console_for(quiet=True))
    cold = time.monotonic() - start
    found, rows, recipe = load(run, device="auto").evaluate(), run.metrics, run.recipe
    row = {
        "recipe": name,
        "track": "pure",
        "params": total_parameters(recipe.model),
        "tokens": recipe.model.num_tokens,
        "images_seen": rows[-1]["images_seen"],
        "views": 1,
        "seed": recipe.train.seed,
        "validation": recipe.data.validation,
        "test_accuracy": found.accuracy,
        "seconds": round(sum(row["seconds"] for row in rows), 2),
        "cold_seconds": round(cold, 2),
        "images_per_second": rows[-1]["images_per_second"],
        "hardware": run.machine["hardware"],
        "overhead": round(overhead(run), 4),
    }
    if name in BARS and "val_accuracy" in rows[0]:
        row |= {"bar": BARS[name], "bar_passed_after_seconds": seconds_to(rows, BARS[name])}
    print(json.dumps(row), flush=True)
    return row


def seconds_to(rows: list[dict[str, Any]], bar: float) -> float | None:
    """Seconds, including validation, until the validation accuracy first exceeded the target."""
    passed = 0.0
    for row in rows:
        passed += row["seconds"]
        if row["val_accuracy"] > bar:
            return round(passed, 2)
    return None


def overhead(run: Run, rounds: int = 5) -> float:
    """1 - (bare step time × steps) / (epoch time without validation), measured by repeating the steps alone."""
    session = start_session(run.recipe, open_data(run.recipe, console_for(quiet=True)))
    loader, tally = EpochLoader(session), Tally.empty(session)
    step_on, times = loader.start(0, tally), []
    for _ in range(rounds):
        loader.rewind()
        wait_for(session.hardware.device)
        start = time.monotonic()
        for step in range(session.steps_per_epoch):
            step_on(step)
        wait_for(session.hardware.device)
        times.append(time.monotonic() - start)
    loader.close()
    later = sorted(row["train_seconds"] for row in run.metrics[len(run.metrics) // 2 :])
    return 1 - sorted(times)[rounds // 2] / later[len(later) // 2]


if __name__ == "__main__":
    main()
