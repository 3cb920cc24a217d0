"""`python -m benchmarks.together`: training speed of many small models in one batch, compared with a single model.

Width 64, 4 blocks, 16 tokens (MNIST in 7 × 7 patches), batch size 256, AdamW. The time covers the whole step: images,
forward, backward, update. Every row is a separate process. `--recipe` measures another recipe's model.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.records import format_typed_command, write_record
from vitascope.model.anatomy import count_forward_flops_per_image, count_parameters
from vitascope.recipe.reading import read_recipe
from vitascope.training.engines.batched import BatchedTraining
from vitascope.training.prepare import (
    complete_recipe_and_load_data_and_weights,
    make_console,
    seed_and_build_train_state,
)

MODEL_OVERRIDES = ["model.img_size=28", "model.patch_size=7", "model.in_chans=1", "model.embed_dim=64", "model.depth=4"]
MODEL_OVERRIDES += ["model.num_heads=2", "model.class_token=false", "model.global_pool=avg", "train.batch_size=256"]
MODEL_OVERRIDES += ["data.augment.shift=0"]


def measure_batched_models(num_models: int, compiled: bool, args: argparse.Namespace) -> dict[str, Any]:
    overrides = ["train.epochs=3", f"train.compile={'always' if compiled else 'never'}"]
    overrides += [] if args.recipe else [*MODEL_OVERRIDES, f"data.name={args.data}"]
    base, data, _ = complete_recipe_and_load_data_and_weights(
        read_recipe(args.recipe or "sheet-d", overrides), make_console(quiet=True)
    )
    states = []
    for seed in range(num_models):
        recipe = replace(base, train=replace(base.train, seed=seed))
        states.append(seed_and_build_train_state(recipe, data, states[0].hardware if states else None))
    start = time.perf_counter()
    batched = BatchedTraining(states)
    batched.train_epoch(0).loss.tolist()
    cold_seconds = time.perf_counter() - start
    times = []
    for epoch in (1, 2):
        batched.start_epoch(epoch)  # random draws are made before the steps
        start = time.perf_counter()
        for _ in range(batched.steps_per_epoch):
            batched.run_next_step()
        batched.metric_sums.tolist()
        times.append(time.perf_counter() - start)
    images = num_models * batched.steps_per_epoch * batched.batch_size
    flops = 3 * count_forward_flops_per_image(base.model) * images / min(times)
    row = {"models": num_models, "compiled": compiled, "attention": states[0].model.blocks[0].attn.kernel}
    row |= {"images_per_second": round(images / min(times)), "tflops": round(flops / 1e12, 1)}
    row |= {
        "milliseconds_a_step": round(1e3 * min(times) / batched.steps_per_epoch, 3),
        "cold_seconds": round(cold_seconds, 1),
    }
    return row | {"parameters": count_parameters(base.model), "batch": batched.batch_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--compiled", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--recipe", help="measure this recipe's model and data")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / "together-cuda.json")
    parser.add_argument("--one", action="store_true", help="measure in this process and print (used internally)")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure_batched_models(args.models[0], bool(args.compiled[0]), args)))
        return
    rows = []
    for compiled in args.compiled:
        for models in args.models:
            options = ["--one", "--models", str(models), "--compiled", str(compiled), "--data", args.data]
            options += ["--recipe", args.recipe] if args.recipe else []
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.together", *options], capture_output=True, text=True
            )
            if done.returncode:
                print(f"{models} models, compiled={compiled}: failed\n{done.stderr[-1500:]}", flush=True)
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_record(args.out, args.commit, command=format_typed_command("benchmarks.together"), device=device, rows=rows)


if __name__ == "__main__":
    main()
