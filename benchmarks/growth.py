"""`make growth`: how the cost of a training step grows with batch size, tokens, width and depth."""

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.records import Record, Row
from benchmarks.timing import time_calls
from benchmarks.whole_step import build_training_step, make_cifar10_config
from vitascope import ModelConfig
from vitascope.draw.style import add_caption, create_figure, save_figure, set_labels
from vitascope.model.anatomy import count_forward_flops_per_image
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import collect_machine_info, get_device_or_cpu_name

IMAGES_FOLDER = Path(__file__).parent.parent / "docs" / "images"
SIZES_BY_DEVICE = {
    "cpu": {"batch": [8, 16, 32, 64], "tokens": [16, 64, 256], "width": [64, 128, 256, 512], "depth": [2, 4, 8, 16]},
    "cuda": {
        "batch": [64, 125, 250, 500, 1000, 2000],
        "tokens": [16, 64, 256, 1024],
        "width": [64, 128, 256, 512, 1024],
        "depth": [2, 4, 8, 16],
    },
}
BASE_SIZES = {
    "cpu": {"batch": 16, "tokens": 64, "width": 128, "depth": 4},
    "cuda": {"batch": 500, "tokens": 64, "width": 256, "depth": 8},
}
PATCH_SIZE_BY_TOKENS = {16: 8, 64: 4, 256: 2, 1024: 1}  # patch size by number of tokens, for 32 × 32 images
NUM_REPEATS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    out = args.out or RESULTS_FOLDER / f"bench-growth-{args.device}.json"
    record: dict[str, Any] = {
        "name": out.stem,
        "command": f"python -m benchmarks.growth --device {args.device}",
        "device": args.device,
        "base": BASE_SIZES[args.device],
        "rows": [],
        "exponents": {},
    } | collect_machine_info(args.commit)
    for axis, values in SIZES_BY_DEVICE[args.device].items():
        rows = [measure_step(axis, value, args.device) for value in values]
        record["rows"] += rows
        record["exponents"][axis] = {
            name: round(fit_exponent(values, [row[name] for row in rows]), 2) for name in ("milliseconds", "flops")
        }
        fitted = record["exponents"][axis]
        print(f"{axis}: exponent of time {fitted['milliseconds']}, of FLOPs {fitted['flops']}", flush=True)
    make_folder(out.parent)
    write_json(out, record)
    picture = draw_step_times(record, args.picture or IMAGES_FOLDER / f"growth-{args.device}.png")
    print(f"Record: {out}\nFigure: {picture}")


def measure_step(size_name: str, value: int, device: str) -> Row:
    """Measure the median time of a step of cifar10's network with one size changed."""
    sizes = BASE_SIZES[device] | {size_name: value}
    config = make_model_config(sizes)
    precision = "bfloat16" if device == "cuda" else "float32"
    gc.collect()  # free the memory of the step before
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    args = argparse.Namespace(batch=sizes["batch"], device=device, precision=precision, compiled=False, threads=0)
    seconds = median(time_calls(build_training_step(config, args), device, NUM_REPEATS)[2:])
    flops = 3 * count_forward_flops_per_image(config) * sizes["batch"]
    row = {"axis": size_name, **sizes, "milliseconds": round(1e3 * seconds, 3), "flops": flops}
    if device == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
    print(row, flush=True)
    return row


def make_model_config(sizes: dict[str, int]) -> ModelConfig:
    return replace(
        make_cifar10_config(),
        patch_size=PATCH_SIZE_BY_TOKENS[sizes["tokens"]],
        embed_dim=sizes["width"],
        depth=sizes["depth"],
        num_heads=max(1, sizes["width"] // 64),
    )


def fit_exponent(sizes: list[int], costs: list[float]) -> float:
    """Return the slope of log cost over log size, by least squares: cost ~ size^slope."""
    x, y = torch.tensor(sizes).double().log(), torch.tensor(costs).double().log()
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / (x * x).sum()).item()


def draw_step_times(record: Record, figure_path: Path) -> Path:
    """Draw one log-log panel per size: milliseconds per step, with the fitted exponent."""
    figure, panels = create_figure(4, width=11, height=3.2)
    for panel, (axis, fitted) in zip(panels, record["exponents"].items(), strict=True):
        rows = [row for row in record["rows"] if row["axis"] == axis]
        panel.loglog([row[axis] for row in rows], [row["milliseconds"] for row in rows], "o-")
        panel.set_xticks([row[axis] for row in rows], [str(row[axis]) for row in rows])
        panel.minorticks_off()
        panel.set_yticks([row["milliseconds"] for row in rows], [f"{row['milliseconds']:.3g}" for row in rows])
        panel.set_xlabel(axis)
        set_labels(
            panel,
            f"time ~ {axis}^{fitted['milliseconds']}",
            f"{axis} (FLOPs ~ {axis}^{fitted['flops']})",
            "ms per step",
        )
    base = ", ".join(f"{name} {value}" for name, value in record["base"].items())
    machine = get_device_or_cpu_name(record["machine"], record["device"])
    add_caption(
        figure,
        f"Training step of cifar10's network, not compiled, {machine}. Base: {base}; each panel changes one size.",
    )
    return save_figure(figure, figure_path)


if __name__ == "__main__":
    main()
