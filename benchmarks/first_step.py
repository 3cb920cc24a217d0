"""`python -m benchmarks.first_step`: seconds from the start of a process to the end of its first training step.

The data are small JPEG files in class folders, made by this command. Each row is a new process that imports Vitascope,
opens the folder, prepares the training as `vitascope train` does, and stops after the first step.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
from PIL import Image

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.race import REPOSITORY_FOLDER
from benchmarks.records import Row, format_typed_command, write_record
from vitascope.run.machine import measure_seconds_since_process_start

MODES = {"memory": 64.0, "on demand": 0.0}  # data.memory, in GiB


class StopAfterFirstStepError(Exception):
    """Raised after the first step, to stop the training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=25_000)
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--size", type=int, default=64, help="width and height of the images")
    parser.add_argument("--repeats", type=int, default=2, help="processes per mode; the first has cold caches")
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--set", nargs="*", default=["model.patch_size=8"], help="further settings")
    parser.add_argument("--photos", type=Path, default=Path("runs/first-step-photos"), help="the folder of files")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / "first-step.json")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train_first_step_and_print_seconds(args.worker, args.runs)
    write_image_folder(args.photos, args.files, args.classes, args.size)
    rows: list[Row] = []
    for repeat in range(args.repeats):
        for mode, memory in MODES.items():
            settings = [args.recipe, f"data.name={args.photos}", f"model.img_size={args.size}", f"data.memory={memory}"]
            rows.append({"mode": mode, "repeat": repeat} | time_in_new_process([*settings, *args.set], args.runs))
            print(rows[-1], flush=True)
            write_record(args.out, args.commit, command=format_typed_command("benchmarks.first_step"), rows=rows)


def write_image_folder(folder: Path, num_files: int, num_classes: int, size: int) -> None:
    """Write JPEG files of random smooth images in class folders, unless the folder exists."""
    if folder.exists():
        return
    write = partial(_write_image, folder, num_classes, size)
    with ProcessPoolExecutor() as pool:
        list(pool.map(write, range(num_files), chunksize=500))


def _write_image(folder: Path, num_classes: int, size: int, index: int) -> None:
    path = folder / f"class-{index % num_classes:03d}" / f"{index:06d}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC).save(path, quality=90)


def time_in_new_process(arguments: Sequence[str], runs_folder: Path) -> Row:
    """Run a worker process; return the seconds that it printed."""
    command = [sys.executable, "-m", "benchmarks.first_step", "--runs", str(runs_folder), "--worker", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY_FOLDER, env=os.environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The worker failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def train_first_step_and_print_seconds(arguments: Sequence[str], runs_folder: Path) -> NoReturn:
    """Train the first step in this process, print the seconds since the process started, and end the process."""
    import torch

    from vitascope.recipe.reading import read_recipe
    from vitascope.training import loop
    from vitascope.training.prepare import make_console
    from vitascope.training.train import train_recipe

    seconds = {"imports": measure_seconds_since_process_start()}
    make_engine = loop.make_engine

    def make_engine_that_stops(state, metric_sums):
        seconds["prepared"] = measure_seconds_since_process_start()
        engine = make_engine(state, metric_sums)
        run_next_step = engine.run_next_step

        def run_first_step() -> None:
            run_next_step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            raise StopAfterFirstStepError

        engine.run_next_step = run_first_step
        return engine

    loop.make_engine = make_engine_that_stops
    try:
        train_recipe(read_recipe(arguments[0], arguments[1:]), runs_folder, make_console(quiet=True))
    except StopAfterFirstStepError:
        seconds["first_step"] = measure_seconds_since_process_start()
    print(json.dumps({name: value and round(value, 2) for name, value in seconds.items()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
