"""`make growth`: how the cost of a training step grows with batch size, tokens, width and depth."""

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.__main__ import RESULTS
from benchmarks.timing import seconds_of
from benchmarks.whole_step import own_network, whole_step
from vitascope import ModelConfig
from vitascope.draw.look import caption, label, new_figure, save
from vitascope.model.anatomy import total_flops
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import machine_name, record_of_machine

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SCALES = {
    "cpu": {"batch": [8, 16, 32, 64], "tokens": [16, 64, 256], "width": [64, 128, 256, 512], "depth": [2, 4, 8, 16]},
    "cuda": {
        "batch": [64, 125, 250, 500, 1000, 2000],
        "tokens": [16, 64, 256, 1024],
        "width": [64, 128, 256, 512, 1024],
        "depth": [2, 4, 8, 16],
    },
}
BASE = {
    "cpu": {"batch": 16, "tokens": 64, "width": 128, "depth": 4},
    "cuda": {"batch": 500, "tokens": 64, "width": 256, "depth": 8},
}
PATCH = {16: 8, 64: 4, 256: 2, 1024: 1}  # patch size by number of tokens, for 32 × 32 images
REPEATS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    out = asked.out or RESULTS / f"bench-growth-{asked.device}.json"
    record: dict[str, Any] = {
        "name": out.stem,
        "command": f"python -m benchmarks.growth --device {asked.device}",
        "device": asked.device,
        "base": BASE[asked.device],
        "rows": [],
        "exponents": {},
    } | record_of_machine(asked.commit)
    for axis, values in SCALES[asked.device].items():
        rows = [point(axis, value, asked.device) for value in values]
        record["rows"] += rows
        record["exponents"][axis] = {
            name: round(exponent(values, [row[name] for row in rows]), 2) for name in ("milliseconds", "flops")
        }
        fitted = record["exponents"][axis]
        print(f"{axis}: exponent of time {fitted['milliseconds']}, of FLOPs {fitted['flops']}", flush=True)
    make_folder(out.parent)
    write_json(out, record)
    picture = draw(record, asked.picture or IMAGES / f"growth-{asked.device}.png")
    print(f"Record: {out}\nFigure: {picture}")


def point(axis: str, value: int, device: str) -> dict[str, Any]:
    """Median time of a step of cifar10's network with one size changed."""
    here = BASE[device] | {axis: value}
    shape = network(here)
    precision = "bfloat16" if device == "cuda" else "float32"
    gc.collect()  # free the memory of the step before
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    asked = argparse.Namespace(batch=here["batch"], device=device, precision=precision, compiled=False, threads=0)
    seconds = median(seconds_of(whole_step(shape, asked), device, REPEATS)[2:])
    work = 3 * total_flops(shape) * here["batch"]
    row = {"axis": axis, **here, "milliseconds": round(1e3 * seconds, 3), "flops": work}
    if device == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
    print(row, flush=True)
    return row


def network(here: dict[str, int]) -> ModelConfig:
    return replace(
        own_network(),
        patch_size=PATCH[here["tokens"]],
        embed_dim=here["width"],
        depth=here["depth"],
        num_heads=max(1, here["width"] // 64),
    )


def exponent(sizes: list[int], costs: list[float]) -> float:
    """The slope of log cost over log size, by least squares: cost ~ size^slope."""
    x, y = torch.tensor(sizes).double().log(), torch.tensor(costs).double().log()
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / (x * x).sum()).item()


def draw(record: dict[str, Any], out: Path) -> Path:
    """One log-log panel per size: milliseconds per step, with the fitted exponent."""
    figure, panels = new_figure(4, width=11, height=3.2)
    for panel, (axis, fitted) in zip(panels, record["exponents"].items(), strict=True):
        rows = [row for row in record["rows"] if row["axis"] == axis]
        panel.loglog([row[axis] for row in rows], [row["milliseconds"] for row in rows], "o-")
        panel.set_xticks([row[axis] for row in rows], [str(row[axis]) for row in rows])
        panel.minorticks_off()
        panel.set_yticks([row["milliseconds"] for row in rows], [f"{row['milliseconds']:.3g}" for row in rows])
        panel.set_xlabel(axis)
        label(
            panel,
            f"time ~ {axis}^{fitted['milliseconds']}",
            f"{axis} (FLOPs ~ {axis}^{fitted['flops']})",
            "ms per step",
        )
    rest = ", ".join(f"{name} {value}" for name, value in record["base"].items())
    machine = machine_name(record["machine"], record["device"])
    caption(
        figure,
        f"Training step of cifar10's network, not compiled, {machine}. Base: {rest}; each panel changes one size.",
    )
    return save(figure, out)


if __name__ == "__main__":
    main()
