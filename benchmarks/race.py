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
from tempfile import TemporaryDirectory

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
    with TemporaryDirectory() as folder:
        workers: dict[str, Worker] = {}
        for index, arm in enumerate(implementations):
            arguments = _make_worker_arguments(shape_name, task, arm, batch_size, device, num_threads)
            log_path = Path(folder) / f"{index}.log"
            workers[arm.name] = Worker(arguments, arm.source_tree or REPOSITORY_FOLDER, log_path, times[arm.name])
            if device == "cpu":
                workers[arm.name].wait_until_ready()
        for worker in workers.values() if device != "cpu" else ():
            worker.wait_until_ready()
        for round_index in range(num_rounds):
            for worker in list(workers.values())[:: 1 if round_index % 2 else -1]:
                if worker.times.failure_reason is None:
                    time.sleep(QUIET_SECONDS if device == "cpu" else 0)
                    worker.time_one_round(calls_per_round)
        for worker in workers.values():
            worker.read_peak_bytes_and_end()
    return times


def _make_worker_arguments(
    shape_name: str, task: str, implementation: Implementation, batch_size: int, device: str, num_threads: int
) -> list[str]:
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
    return arguments + ["--precision", implementation.precision] + (["--compiled"] if implementation.compiled else [])


class Worker:
    """A process that times one implementation (`benchmarks.worker`). What it prints as errors goes to `log_path`."""

    def __init__(self, arguments: list[str], tree: Path, log_path: Path, times: ImplementationTimes) -> None:
        self.times, self.log_path = times, log_path
        paths = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]  # packages may lie elsewhere
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", *arguments],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_until_ready(self) -> None:
        reply = self._send_line_and_read_json(None)
        self.times.setup_seconds = reply["ready"] if isinstance(reply, dict) else 0.0

    def time_one_round(self, num_calls: int) -> None:
        reply = self._send_line_and_read_json(str(num_calls))
        self.times.seconds_per_round.append(reply if isinstance(reply, float | int) else 0.0)

    def read_peak_bytes_and_end(self) -> None:
        reply = None if self.times.failure_reason else self._send_line_and_read_json("end")
        self.times.peak_bytes = int(reply["peak_bytes"]) if isinstance(reply, dict) else 0
        self.process.communicate()

    def _send_line_and_read_json(self, line: str | None) -> WorkerReply:
        """Send one line and read one reply; if the process has ended, `times.failure_reason` is set."""
        if self.process.stdin is None or self.process.stdout is None:
            return None
        try:
            if line is not None:
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
            reply = self.process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self.times.failure_reason = self._describe_end()
            return None
        return json.loads(reply)

    def _describe_end(self) -> str:
        """Say how the process ended, with the last line that it printed."""
        code = self.process.wait()
        end = f"stopped by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        last_line = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "no message")
        return f"{end}: {last_line}"


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
