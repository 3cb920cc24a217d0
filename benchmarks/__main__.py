"""`make bench`: training, inference and latency, ours beside the peers', in one run on one machine."""

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import SHAPES
from benchmarks.race import Arm, Times, percentile, race, ratio
from vitascope.model.anatomy import total_flops
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import record_of_machine

RESULTS = Path(__file__).parent.parent / "results"
PEERS = [Arm(library) for library in ("transformers", "torchvision", "vit-pytorch")]
TIMM = [Arm("timm"), Arm("timm", again=True), Arm("timm", compiled=True)]
OURS = [Arm("ours"), Arm("ours", compiled=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["192×12", "256×8"])
    parser.add_argument(
        "--tasks", nargs="+", choices=["train", "infer", "latency"], default=["train", "infer", "latency"]
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1, help="calls a turn")
    parser.add_argument("--precision", default=None, help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--without", nargs="*", default=[], help="libraries to leave out")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.precision = asked.precision or ("float32" if asked.device == "cpu" else "bfloat16")
    out = asked.out or RESULTS / f"bench-{asked.device}.json"
    record: dict[str, Any] = {
        "name": out.stem,
        "command": f"python -m benchmarks --device {asked.device} --shapes {' '.join(asked.shapes)} "
        f"--batch {asked.batch} --rounds {asked.rounds} --calls {asked.calls}",
        "precision": asked.precision,
        "threads": torch.get_num_threads(),
        "rows": [],
    } | record_of_machine(asked.commit)
    for shape in asked.shapes:
        for task in asked.tasks:
            record["rows"] += measure(shape, task, asked)
            make_folder(out.parent)
            write_json(out, record)
    print(f"Record: {out}")


def measure(shape: str, task: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One race; a row per contender."""
    arms = [
        Arm(a.library, a.compiled, asked.precision, a.task, a.again)
        for a in _arms(task)
        if a.library not in asked.without
    ]
    batch = 1 if task == "latency" else asked.batch
    rounds = asked.rounds * (4 if task == "latency" else 1)
    times = race(
        shape, "train" if task == "train" else "infer", arms,
        batch=batch, rounds=rounds, calls=asked.calls, device=asked.device, threads=torch.get_num_threads(),
    )  # fmt: skip
    eager = [arm for arm in arms if arm.library != "ours" and not arm.compiled and not arm.again]
    running = [times[arm.name] for arm in eager if not times[arm.name].broken]
    fastest = min(running, key=lambda peer: median(peer.rounds), default=None)
    timm = times.get(Arm("timm", precision=asked.precision).name)
    print(f"\n{shape}  {task}, batch {batch}")
    rows = [row(shape, task, batch, arm, times[arm.name], timm, fastest) for arm in arms]
    for found in rows:
        print(tell(found), flush=True)
    return rows


def _arms(task: str) -> list[Arm]:
    whole = [Arm("ours", task="step"), Arm("ours", compiled=True, task="step")] if task == "train" else []
    return [*OURS, *whole, *TIMM, *PEERS]


def row(
    shape: str, task: str, batch: int, arm: Arm, mine: Times, timm: Times | None, fastest: Times | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": shape, "task": task, "batch": batch, "who": arm.name, "library": arm.library}
    if mine.broken:
        return found | {"broken": mine.broken}
    seconds = median(mine.rounds)
    work = total_flops(SHAPES[shape]) * (3 if task == "train" else 1)
    return found | {
        "images_per_second": round(batch / seconds, 1),
        "milliseconds": round(1e3 * seconds, 3),
        "p99_milliseconds": round(1e3 * percentile(mine.rounds, 0.99), 3),
        "tflops_per_second": round(work * batch / seconds / 1e12, 3),
        "times_timm": _times(timm, mine),
        "times_fastest_peer": _times(fastest, mine),
        "peak_mib": round(mine.peak_bytes / 2**20),
        "ready_seconds": mine.ready,
    }


def tell(found: dict[str, Any]) -> str:
    if "broken" in found:
        return f"  {found['who']:<28} {found['broken']}"
    return (
        f"  {found['who']:<28} {found['images_per_second']:>9,.1f} images/s {found['milliseconds']:>9.2f} ms "
        f"(p99 {found['p99_milliseconds']:.2f})  {found['times_timm'] or 0:>5.2f}× timm  "
        f"{found['times_fastest_peer'] or 0:>5.2f}× fastest peer  {found['peak_mib']:>6,} MiB"
    )


def _times(theirs: Times | None, ours: Times) -> float | None:
    found = ratio(theirs, ours) if theirs else None
    return None if found is None else round(found, 3)


if __name__ == "__main__":
    main()
