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
from benchmarks.records import Row
from vitascope.model.anatomy import count_forward_flops_per_image
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
SHAPES_WITH_PEERS = ("256×8", "ViT-B/16")  # on a GPU, other shapes are compared with timm only


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
    args = parser.parse_args()
    plan = CPU_PLAN if args.device == "cpu" else GPU_PLAN
    batches = {shape: args.batch or plan.batch_sizes.get(shape, 32) for shape in args.shapes or plan.batch_sizes}
    overrides = {name: getattr(args, name) for name in ("rounds", "calls", "precision") if getattr(args, name)}
    plan = replace(plan, batch_sizes=batches, **overrides)
    out = args.out or RESULTS_FOLDER / f"bench-{args.device}.json"
    record: dict[str, Any] = {
        "name": out.stem,
        "command": f"python -m benchmarks --device {args.device} --shapes {' '.join(batches)}",
        "device": args.device,
        "precision": plan.precision,
        "threads": torch.get_num_threads(),
        "rounds": plan.rounds,
        "calls": plan.calls,
        "matrix_rate": measure_matrix_flops_per_second(args.device, plan.precision),
        "rows": [],
    } | collect_machine_info(args.commit)
    for shape in batches:
        for task in args.tasks:
            if task == "latency" and args.device == "cuda" and shape not in SHAPES_WITH_PEERS:
                continue
            record["rows"] += benchmark_task(shape, task, args, plan, record["matrix_rate"])
            make_folder(out.parent)
            write_json(out, record)
    print(f"Record: {out}")


def benchmark_task(
    shape_name: str, task: str, args: argparse.Namespace, plan: BenchmarkPlan, matrix_flops_per_second: float
) -> list[Row]:
    """Run one benchmark; return one row per implementation."""
    arms = [
        arm if arm.precision != "float32" else replace(arm, precision=plan.precision)
        for arm in _list_implementations(shape_name, task, args.device)
        if arm.library not in args.without
    ]
    batch = 1 if task == "latency" else plan.batch_sizes[shape_name]
    rounds, calls = (NUM_LATENCY_ROUNDS, 1) if task == "latency" else (plan.rounds, plan.calls)
    times = time_implementations(
        shape_name,
        "train" if task == "train" else "infer",
        arms,
        batch_size=batch,
        num_rounds=rounds,
        calls_per_round=calls,
        device=args.device,
        num_threads=torch.get_num_threads(),
    )
    default_peers = [
        arm for arm in arms if arm == Implementation(arm.library, precision=plan.precision) and arm.library != "ours"
    ]
    running = [times[arm.name] for arm in default_peers if not times[arm.name].failure_reason]
    fastest = min(running, key=lambda peer: median(peer.seconds_per_round), default=None)
    reference_times = {
        "times_timm": times.get(Implementation("timm", precision=plan.precision).name),
        "times_timm_compiled": times.get(Implementation("timm", compiled=True, precision=plan.precision).name),
        "times_fastest_peer": fastest,
    }
    print(f"\n{shape_name}  {task}, batch {batch}")
    rows = [
        make_row(shape_name, task, batch, arm, times[arm.name], reference_times, matrix_flops_per_second)
        for arm in arms
    ]
    for row in rows:
        print(format_row(row), flush=True)
    return rows


def _list_implementations(shape_name: str, task: str, device: str) -> list[Implementation]:
    """List what is timed: on a GPU Vitascope's whole step; on a CPU also the model alone, and timm in bfloat16."""
    if device == "cpu":
        return [
            *VITASCOPE_MODELS,
            *(VITASCOPE_WHOLE_STEPS if task == "train" else [Implementation("ours", task="fast")]),
            *TIMM_IMPLEMENTATIONS,
            *PEER_IMPLEMENTATIONS,
            Implementation("timm", precision="bfloat16"),
        ]
    if task != "train":
        vitascope = [Implementation("ours", task="fast")]
    elif shape_name == "256×8":
        vitascope = [*VITASCOPE_WHOLE_STEPS, Implementation("ours", compiled=True, task="recipe")]
    else:
        vitascope = [VITASCOPE_WHOLE_STEPS[1]]
    return [
        *vitascope,
        Implementation("timm"),
        Implementation("timm", compiled=True),
        *(PEER_IMPLEMENTATIONS if shape_name in SHAPES_WITH_PEERS else []),
    ]


def choose_guarded_implementation(task: str, device: str) -> Implementation:
    """Return Vitascope's implementation for `make guard`: on a CPU the model alone, on a GPU the whole step."""
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
) -> Row:
    """Return one row of the record. TFLOP/s use the FLOPs of the full network for every implementation."""
    row: Row = {
        "shape": shape_name,
        "task": task,
        "batch": batch_size,
        "who": implementation.name,
        "library": implementation.library,
    }
    if times.failure_reason:
        return row | {"broken": times.failure_reason}
    seconds = median(times.seconds_per_round)
    flops_per_second = (
        count_forward_flops_per_image(SHAPES[shape_name]) * (3 if task == "train" else 1) * batch_size / seconds
    )
    return row | {
        "images_per_second": round(batch_size / seconds, 1),
        "milliseconds": round(1e3 * seconds, 3),
        "p99_milliseconds": round(1e3 * percentile(times.seconds_per_round, 0.99), 3),
        "tflops_per_second": round(flops_per_second / 1e12, 3),
        "share_of_matrix_rate": round(flops_per_second / matrix_flops_per_second, 3),
        **{name: _compute_rounded_speedup(reference, times) for name, reference in reference_times.items()},
        "peak_mib": round(times.peak_bytes / 2**20),
        "ready_seconds": times.setup_seconds,
    }


def format_row(row: Row) -> str:
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
    speedup = compute_speedup(reference_times, candidate_times) if reference_times else None
    return None if speedup is None else round(speedup, 3)


if __name__ == "__main__":
    main()
