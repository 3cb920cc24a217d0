"""Time several implementations in alternating rounds, so that noise affects all equally."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

QUIET_SECONDS = 0.25  # seconds: on a CPU, OpenMP threads of the previous process spin before they free the cores
TASK_NAMES = {"step": "whole step", "recipe": "whole step of cifar10's network", "fast": "fast"}
REPOSITORY_FOLDER = Path(__file__).parent.parent
WorkerReply = float | dict[str, float] | None  # seconds per call; set-up seconds or peak bytes; the process ended


@dataclass(frozen=True)
class Implementation:
    """One library with one set of options."""

    library: str
    compiled: bool = False
    precision: str = "float32"
    task: str | None = None  # 'step', 'recipe': Vitascope's whole training step; 'fast': its fast inference
    is_repeat: bool = False  # repeated, to show the noise
    source_tree: Path | None = None  # another checkout of Vitascope

    @property
    def name(self) -> str:
        options = [name for name, is_set in (("compiled", self.compiled), ("again", self.is_repeat)) if is_set]
        options += [self.precision] if self.precision != "float32" else []
        options += [TASK_NAMES[self.task]] if self.task else []
        options += ["as it was"] if self.source_tree else []
        return ", ".join([self.library, *options])


@dataclass
class ImplementationTimes:
    """Seconds per call for each round, set-up seconds, peak memory, and why the process ended, if it did."""

    seconds_per_round: list[float] = field(default_factory=list)
    setup_seconds: float = 0.0
    peak_bytes: int = 0
    failure_reason: str | None = None


def time_implementations(
    shape_name: str,
    task: str,
    implementations: list[Implementation],
    *,
    batch_size: int,
    num_rounds: int,
    calls_per_round: int = 1,
    device: str = "cpu",
    num_threads: int = 0,
) -> dict[str, ImplementationTimes]:
    """Start all implementations (on a CPU one after the other), then time them in rounds with alternating order."""
    times = {arm.name: ImplementationTimes() for arm in implementations}
    runners = {}
    for arm in implementations:
        runners[arm.name] = _start_worker(shape_name, task, arm, batch_size, device, num_threads)
        if device == "cpu":
            _wait_until_ready(runners[arm.name], times[arm.name])
    for name in runners if device != "cpu" else ():
        _wait_until_ready(runners[name], times[name])
    for round_index in range(num_rounds):
        for name in list(runners)[:: 1 if round_index % 2 else -1]:
            if times[name].failure_reason is None:
                time.sleep(QUIET_SECONDS if device == "cpu" else 0)
                reply = _send_line_and_read_json(runners[name], str(calls_per_round), times[name])
                times[name].seconds_per_round.append(reply if isinstance(reply, float | int) else 0.0)
    for name, runner in runners.items():
        reply = None if times[name].failure_reason else _send_line_and_read_json(runner, "end", times[name])
        times[name].peak_bytes = int(reply["peak_bytes"]) if isinstance(reply, dict) else 0
        runner.communicate()
    return times


def _start_worker(
    shape_name: str, task: str, implementation: Implementation, batch_size: int, device: str, num_threads: int
) -> subprocess.Popen[str]:
    arguments = [
        implementation.library,
        shape_name,
        implementation.task or task,
        "--batch",
        str(batch_size),
        "--device",
        device,
        "--threads",
        str(num_threads),
    ]
    arguments += ["--precision", implementation.precision] + (["--compiled"] if implementation.compiled else [])
    tree = implementation.source_tree or REPOSITORY_FOLDER
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.worker", *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _wait_until_ready(worker: subprocess.Popen[str], times: ImplementationTimes) -> None:
    reply = _send_line_and_read_json(worker, None, times)
    times.setup_seconds = reply["ready"] if isinstance(reply, dict) else 0.0


def _send_line_and_read_json(
    worker: subprocess.Popen[str], line: str | None, times: ImplementationTimes
) -> WorkerReply:
    """Send one line and read one reply; if the process has ended, `times.failure_reason` is set."""
    if worker.stdin is None or worker.stdout is None:
        return None
    try:
        if line is not None:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        reply = worker.stdout.readline()
    except BrokenPipeError:
        reply = ""
    if not reply:
        code = worker.wait()
        times.failure_reason = f"stopped by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return None
    return json.loads(reply)


def compute_speedup(reference_times: ImplementationTimes, candidate_times: ImplementationTimes) -> float | None:
    """Return the median over rounds of the reference's time divided by the candidate's; None if one failed."""
    if reference_times.failure_reason or candidate_times.failure_reason:
        return None
    return median(
        reference / candidate
        for reference, candidate in zip(
            reference_times.seconds_per_round, candidate_times.seconds_per_round, strict=True
        )
    )


def percentile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
