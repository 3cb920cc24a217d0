"""`make bench`: training speed, inference speed and latency of Vitascope and its peers, on one machine."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.contenders import SHAPES
from benchmarks.matrix_rate import measure_matrix_flops_per_second
from benchmarks.race import Implementation, ImplementationTimes, compute_speedup, percentile, time_implementations
from vitascope.model.anatomy import count_flops
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import collect_machine_info

RESULTS_FOLDER = Path(__file__).parent.parent / "results"
PEER_IMPLEMENTATIONS = [Implementation(library) for library in ("transformers", "torchvision", "vit-pytorch")]
TIMM_IMPLEMENTATIONS = [
    Implementation("timm"),
    Implementation("timm", is_repeat=True),
    Implementation("timm", compiled=True),
]
VITASCOPE_MODELS = [Implementation("ours"), Implementation("ours", compiled=True)]
VITASCOPE_WHOLE_STEPS = [Implementation("ours", task="step"), Implementation("ours", compiled=True, task="step")]
NUM_LATENCY_ROUNDS = 60  # single predictions of each implementation
SHAPES_WITH_PEERS = (
    "256×8",
    "ViT-B/16",
)  # on a GPU, other shapes are compared with timm only


@dataclass(frozen=True)
class BenchmarkPlan:
    """The benchmarks for a device: shapes with their batch sizes, calls per turn, rounds."""

    batch_sizes: dict[str, int]
    calls: int
    rounds: int
    precision: str


CPU_PLAN = BenchmarkPlan({"192×12": 32, "256×8": 32}, calls=1, rounds=15, precision="float32")
GPU_PLAN = BenchmarkPlan(
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
    plan = CPU_PLAN if asked.device == "cpu" else GPU_PLAN
    batches = {shape: asked.batch or plan.batch_sizes.get(shape, 32) for shape in asked.shapes or plan.batch_sizes}
    given = {name: getattr(asked, name) for name in ("rounds", "calls", "precision") if getattr(asked, name)}
    plan = replace(plan, batch_sizes=batches, **given)
    out = asked.out or RESULTS_FOLDER / f"bench-{asked.device}.json"
    record: dict[str, Any] = {
        "name": out.stem,
        "command": f"python -m benchmarks --device {asked.device} --shapes {' '.join(batches)}",
        "device": asked.device,
        "precision": plan.precision,
        "threads": torch.get_num_threads(),
        "rounds": plan.rounds,
        "calls": plan.calls,
        "matrix_rate": measure_matrix_flops_per_second(asked.device, plan.precision),
        "rows": [],
    } | collect_machine_info(asked.commit)
    for shape in batches:
        for task in asked.tasks:
            if task == "latency" and asked.device == "cuda" and shape not in SHAPES_WITH_PEERS:
                continue
            record["rows"] += benchmark_task(shape, task, asked, plan, record["matrix_rate"])
            make_folder(out.parent)
            write_json(out, record)
    print(f"Record: {out}")


def benchmark_task(
    shape_name: str, task: str, args: argparse.Namespace, plan: BenchmarkPlan, matrix_flops_per_second: float
) -> list[dict[str, Any]]:
    """Run one benchmark; return one row per implementation."""
    arms = [
        arm if arm.precision != "float32" else replace(arm, precision=plan.precision)
        for arm in _list_implementations(shape_name, task, args.device)
        if arm.library not in args.without
    ]
    batch = 1 if task == "latency" else plan.batch_sizes[shape_name]
    rounds, calls = (NUM_LATENCY_ROUNDS, 1) if task == "latency" else (plan.rounds, plan.calls)
    times = time_implementations(
        shape_name, "train" if task == "train" else "infer", arms,
        batch_size=batch, num_rounds=rounds, calls_per_round=calls, device=args.device, num_threads=torch.get_num_threads(),
    )  # fmt: skip
    usual = [
        arm for arm in arms if arm == Implementation(arm.library, precision=plan.precision) and arm.library != "ours"
    ]
    running = [times[arm.name] for arm in usual if not times[arm.name].failure_reason]
    fastest = min(running, key=lambda peer: median(peer.seconds_per_round), default=None)
    beside = {
        "times_timm": times.get(Implementation("timm", precision=plan.precision).name),
        "times_timm_compiled": times.get(Implementation("timm", compiled=True, precision=plan.precision).name),
        "times_fastest_peer": fastest,
    }
    print(f"\n{shape_name}  {task}, batch {batch}")
    rows = [make_row(shape_name, task, batch, arm, times[arm.name], beside, matrix_flops_per_second) for arm in arms]
    for found in rows:
        print(format_row(found), flush=True)
    return rows


def _list_implementations(shape_name: str, task: str, device: str) -> list[Implementation]:
    """On a GPU our training is the whole step; on a CPU also the model alone, and timm in bfloat16."""
    if device == "cpu":
        narrow = [Implementation("timm", precision="bfloat16")]
        return [
            *VITASCOPE_MODELS,
            *(VITASCOPE_WHOLE_STEPS if task == "train" else [Implementation("ours", task="fast")]),
            *TIMM_IMPLEMENTATIONS,
            *PEER_IMPLEMENTATIONS,
            *narrow,
        ]
    if task != "train":
        ours = [Implementation("ours", task="fast")]
    elif shape_name == "256×8":
        ours = [*VITASCOPE_WHOLE_STEPS, Implementation("ours", compiled=True, task="recipe")]
    else:
        ours = [VITASCOPE_WHOLE_STEPS[1]]
    return [
        *ours,
        Implementation("timm"),
        Implementation("timm", compiled=True),
        *(PEER_IMPLEMENTATIONS if shape_name in SHAPES_WITH_PEERS else []),
    ]


def choose_guarded_implementation(task: str, device: str) -> Implementation:
    """Our arm for `make guard`: on a CPU the model alone, on a GPU the whole step."""
    if device == "cpu":
        return Implementation("ours")
    return VITASCOPE_WHOLE_STEPS[1] if task == "train" else Implementation("ours", task="fast")


def make_row(
    shape_name: str,
    task: str,
    batch_size: int,
    implementation: Implementation,
    times: ImplementationTimes,
    reference_times: dict[str, ImplementationTimes | None],
    matrix_flops_per_second: float,
) -> dict[str, Any]:
    """One row of the record. TFLOP/s use the FLOPs of the full network for every implementation."""
    found: dict[str, Any] = {
        "shape": shape_name,
        "task": task,
        "batch": batch_size,
        "who": implementation.name,
        "library": implementation.library,
    }
    if times.failure_reason:
        return found | {"broken": times.failure_reason}
    seconds = median(times.seconds_per_round)
    work = count_flops(SHAPES[shape_name]) * (3 if task == "train" else 1) * batch_size / seconds
    return found | {
        "images_per_second": round(batch_size / seconds, 1),
        "milliseconds": round(1e3 * seconds, 3),
        "p99_milliseconds": round(1e3 * percentile(times.seconds_per_round, 0.99), 3),
        "tflops_per_second": round(work / 1e12, 3),
        "share_of_matrix_rate": round(work / matrix_flops_per_second, 3),
        **{name: _compute_rounded_speedup(theirs, times) for name, theirs in reference_times.items()},
        "peak_mib": round(times.peak_bytes / 2**20),
        "ready_seconds": times.setup_seconds,
    }


def format_row(row: dict[str, Any]) -> str:
    if "broken" in row:
        return f"  {row['who']:<48} {row['broken']}"
    return (
        f"  {row['who']:<48} {row['images_per_second']:>9,.1f} images/s {row['milliseconds']:>8.2f} ms "
        f"(p99 {row['p99_milliseconds']:.2f})  {row['times_timm'] or 0:>5.2f}× timm "
        f"{row['times_timm_compiled'] or 0:>5.2f}× timm compiled "
        f"{row['times_fastest_peer'] or 0:>5.2f}× fastest peer "
        f"{100 * row['share_of_matrix_rate']:>3.0f} % of matrix rate {row['peak_mib']:>6,} MiB"
    )


def _compute_rounded_speedup(
    reference_times: ImplementationTimes | None, candidate_times: ImplementationTimes
) -> float | None:
    found = compute_speedup(reference_times, candidate_times) if reference_times else None
    return None if found is None else round(found, 3)


if __name__ == "__main__":
    main()
