"""`make bench`: training speed, inference speed and latency of Vitascope and its peers, on one machine."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import SHAPES
from benchmarks.matrix_rate import matrix_rate
from benchmarks.race import Arm, Times, percentile, race, ratio
from vitascope.model.anatomy import total_flops
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import record_of_machine

RESULTS = Path(__file__).parent.parent / "results"
PEERS = [Arm(library) for library in ("transformers", "torchvision", "vit-pytorch")]
TIMM = [Arm("timm"), Arm("timm", again=True), Arm("timm", compiled=True)]
OURS = [Arm("ours"), Arm("ours", compiled=True)]
WHOLE = [Arm("ours", task="step"), Arm("ours", compiled=True, task="step")]
LATENCIES = 60  # single predictions of each implementation
WITH_PEERS = (
    "256×8",
    "ViT-B/16",
)  # on a GPU, other shapes are compared with timm only


@dataclass(frozen=True)
class Plan:
    """The benchmarks for a device: shapes with their batch sizes, calls per turn, rounds."""

    batches: dict[str, int]
    calls: int
    rounds: int
    precision: str


CPU = Plan({"192×12": 32, "256×8": 32}, calls=1, rounds=15, precision="float32")
GPU = Plan(
    {"256×8": 1000, "ViT-B/16": 128, "192×12": 1000, "384×7": 1000, "ViT-S/16": 256},
    calls=20,
    rounds=5,
    precision="bfloat16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    tasks = ["train", "infer", "latency"]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--calls", type=int, help="calls per turn")
    parser.add_argument("--precision", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--without", nargs="*", default=[], help="libraries to leave out")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    plan = CPU if asked.device == "cpu" else GPU
    batches = {shape: asked.batch or plan.batches.get(shape, 32) for shape in asked.shapes or plan.batches}
    given = {name: getattr(asked, name) for name in ("rounds", "calls", "precision") if getattr(asked, name)}
    plan = replace(plan, batches=batches, **given)
    out = asked.out or RESULTS / f"bench-{asked.device}.json"
    record: dict[str, Any] = {
        "name": out.stem,
        "command": f"python -m benchmarks --device {asked.device} --shapes {' '.join(batches)}",
        "device": asked.device,
        "precision": plan.precision,
        "threads": torch.get_num_threads(),
        "rounds": plan.rounds,
        "calls": plan.calls,
        "matrix_rate": matrix_rate(asked.device, plan.precision),
        "rows": [],
    } | record_of_machine(asked.commit)
    for shape in batches:
        for task in asked.tasks:
            if task == "latency" and asked.device == "cuda" and shape not in WITH_PEERS:
                continue
            record["rows"] += measure(shape, task, asked, plan, record["matrix_rate"])
            make_folder(out.parent)
            write_json(out, record)
    print(f"Record: {out}")


def measure(shape: str, task: str, asked: argparse.Namespace, plan: Plan, rate: float) -> list[dict[str, Any]]:
    """Run one benchmark; return one row per implementation."""
    arms = [
        arm if arm.precision != "float32" else replace(arm, precision=plan.precision)
        for arm in _arms(shape, task, asked.device)
        if arm.library not in asked.without
    ]
    batch = 1 if task == "latency" else plan.batches[shape]
    rounds, calls = (LATENCIES, 1) if task == "latency" else (plan.rounds, plan.calls)
    times = race(
        shape, "train" if task == "train" else "infer", arms,
        batch=batch, rounds=rounds, calls=calls, device=asked.device, threads=torch.get_num_threads(),
    )  # fmt: skip
    usual = [arm for arm in arms if arm == Arm(arm.library, precision=plan.precision) and arm.library != "ours"]
    running = [times[arm.name] for arm in usual if not times[arm.name].broken]
    fastest = min(running, key=lambda peer: median(peer.rounds), default=None)
    beside = {
        "times_timm": times.get(Arm("timm", precision=plan.precision).name),
        "times_timm_compiled": times.get(Arm("timm", compiled=True, precision=plan.precision).name),
        "times_fastest_peer": fastest,
    }
    print(f"\n{shape}  {task}, batch {batch}")
    rows = [row(shape, task, batch, arm, times[arm.name], beside, rate) for arm in arms]
    for found in rows:
        print(tell(found), flush=True)
    return rows


def _arms(shape: str, task: str, device: str) -> list[Arm]:
    """On a GPU our training is the whole step; on a CPU also the model alone, and timm in bfloat16."""
    if device == "cpu":
        narrow = [Arm("timm", precision="bfloat16")]
        return [*OURS, *(WHOLE if task == "train" else [Arm("ours", task="fast")]), *TIMM, *PEERS, *narrow]
    if task != "train":
        ours = [Arm("ours", task="fast")]
    elif shape == "256×8":
        ours = [*WHOLE, Arm("ours", compiled=True, task="recipe")]
    else:
        ours = [WHOLE[1]]
    return [*ours, Arm("timm"), Arm("timm", compiled=True), *(PEERS if shape in WITH_PEERS else [])]


def guarded(task: str, device: str) -> Arm:
    """Our arm for `make guard`: on a CPU the model alone, on a GPU the whole step."""
    if device == "cpu":
        return Arm("ours")
    return WHOLE[1] if task == "train" else Arm("ours", task="fast")


def row(
    shape: str, task: str, batch: int, arm: Arm, mine: Times, beside: dict[str, Times | None], rate: float
) -> dict[str, Any]:
    """One row of the record. TFLOP/s use the FLOPs of the full network for every implementation."""
    found: dict[str, Any] = {"shape": shape, "task": task, "batch": batch, "who": arm.name, "library": arm.library}
    if mine.broken:
        return found | {"broken": mine.broken}
    seconds = median(mine.rounds)
    work = total_flops(SHAPES[shape]) * (3 if task == "train" else 1) * batch / seconds
    return found | {
        "images_per_second": round(batch / seconds, 1),
        "milliseconds": round(1e3 * seconds, 3),
        "p99_milliseconds": round(1e3 * percentile(mine.rounds, 0.99), 3),
        "tflops_per_second": round(work / 1e12, 3),
        "share_of_matrix_rate": round(work / rate, 3),
        **{name: _times(theirs, mine) for name, theirs in beside.items()},
        "peak_mib": round(mine.peak_bytes / 2**20),
        "ready_seconds": mine.ready,
    }


def tell(found: dict[str, Any]) -> str:
    if "broken" in found:
        return f"  {found['who']:<48} {found['broken']}"
    return (
        f"  {found['who']:<48} {found['images_per_second']:>9,.1f} images/s {found['milliseconds']:>8.2f} ms "
        f"(p99 {found['p99_milliseconds']:.2f})  {found['times_timm'] or 0:>5.2f}× timm "
        f"{found['times_timm_compiled'] or 0:>5.2f}× timm compiled "
        f"{found['times_fastest_peer'] or 0:>5.2f}× fastest peer "
        f"{100 * found['share_of_matrix_rate']:>3.0f} % of matrix rate {found['peak_mib']:>6,} MiB"
    )


def _times(theirs: Times | None, ours: Times) -> float | None:
    found = ratio(theirs, ours) if theirs else None
    return None if found is None else round(found, 3)


if __name__ == "__main__":
    main()
