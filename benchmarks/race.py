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
from typing import Any

QUIET = 0.25  # seconds: on a CPU, OpenMP threads of the previous process spin before they free the cores
TASKS = {"step": "whole step", "recipe": "whole step of cifar10's network", "fast": "fast"}
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Arm:
    """One library with one set of options."""

    library: str
    compiled: bool = False
    precision: str = "float32"
    task: str | None = None  # 'step', 'recipe': our whole training step; 'fast': our fast inference
    again: bool = False  # repeated, to show the noise
    tree: Path | None = None  # another checkout of our code

    @property
    def name(self) -> str:
        more = [word for word, said in (("compiled", self.compiled), ("again", self.again)) if said]
        more += [self.precision] if self.precision != "float32" else []
        more += [TASKS[self.task]] if self.task else []
        more += ["as it was"] if self.tree else []
        return ", ".join([self.library, *more])


@dataclass
class Times:
    """Seconds per call and round, set-up seconds, peak memory; broken: why the process ended."""

    rounds: list[float] = field(default_factory=list)
    ready: float = 0.0
    peak_bytes: int = 0
    broken: str | None = None


def race(
    shape: str,
    task: str,
    arms: list[Arm],
    *,
    batch: int,
    rounds: int,
    calls: int = 1,
    device: str = "cpu",
    threads: int = 0,
) -> dict[str, Times]:
    """Start all implementations (on a CPU one after the other), then time them in rounds with alternating order."""
    times = {arm.name: Times() for arm in arms}
    runners = {}
    for arm in arms:
        runners[arm.name] = _start(shape, task, arm, batch, device, threads)
        if device == "cpu":
            _await(runners[arm.name], times[arm.name])
    for name in runners if device != "cpu" else ():
        _await(runners[name], times[name])
    for number in range(rounds):
        for name in list(runners)[:: 1 if number % 2 else -1]:
            if times[name].broken is None:
                time.sleep(QUIET if device == "cpu" else 0)
                times[name].rounds.append(_ask(runners[name], str(calls), times[name]) or 0.0)
    for name, runner in runners.items():
        said = None if times[name].broken else _ask(runner, "end", times[name])
        times[name].peak_bytes = (said or {}).get("peak_bytes", 0)
        runner.communicate()
    return times


def _start(shape: str, task: str, arm: Arm, batch: int, device: str, threads: int) -> subprocess.Popen[str]:
    words = [arm.library, shape, arm.task or task, "--batch", str(batch), "--device", device, "--threads", str(threads)]
    words += ["--precision", arm.precision] + (["--compiled"] if arm.compiled else [])
    tree = arm.tree or ROOT
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.worker", *words],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _await(runner: subprocess.Popen[str], times: Times) -> None:
    said = _ask(runner, None, times)
    times.ready = (said or {}).get("ready", 0.0)


def _ask(runner: subprocess.Popen[str], line: str | None, times: Times) -> Any:
    """Send one line and read one answer; a process that has ended is marked as broken."""
    if runner.stdin is None or runner.stdout is None:
        return None
    try:
        if line is not None:
            runner.stdin.write(line + "\n")
            runner.stdin.flush()
        answer = runner.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        code = runner.wait()
        times.broken = f"stopped by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return None
    return json.loads(answer)


def ratio(theirs: Times, ours: Times) -> float | None:
    """How many times faster ours is: the median over rounds of their time over ours."""
    if theirs.broken or ours.broken:
        return None
    return median(their / our for their, our in zip(theirs.rounds, ours.rounds, strict=True))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
