"""Measure wall-clock seconds since the operating system started this process, for the first run it works on."""

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from vitascope.run.directory import Run

Task = Literal["train", "evaluate"]
TRAIN, EVALUATE = "train", "evaluate"
CLOCK_TOLERANCE_SECONDS = 0.05  # seconds by which the operating system's clocks may disagree
_import_time = time.monotonic()


class StartedTask(NamedTuple):
    task: Task
    run_path: Path


_started_tasks: list[StartedTask] = []  # in the order in which this process began them


def record_task_start_in_this_process(task: Task, run: Run) -> None:
    """Record that this process works on a run. Call it before `measure_process_seconds_if_alone`."""
    _started_tasks.append(StartedTask(task, run.path.resolve()))


def measure_process_seconds_if_alone(run: Run) -> float | None:
    """Return the seconds since the process started; None if they include other work than this run's.

    Other work is another run, the same task twice, or an interactive session."""
    tasks = [task for task, path in _started_tasks if path == run.path.resolve()]
    is_alone = len(tasks) == len(_started_tasks) and tasks in ([TRAIN], [EVALUATE], [TRAIN, EVALUATE])
    return measure_seconds_since_process_start() if is_alone and not hasattr(sys, "ps1") else None


def is_trained_by_this_process(run: Run) -> bool:
    """Return whether this process trained the run, so that its wall-clock seconds include the training."""
    return StartedTask(TRAIN, run.path.resolve()) in _started_tasks


def measure_seconds_since_process_start() -> float | None:
    """Return the seconds since this process started; None if the operating system does not report its start."""
    seconds = _read_linux_process_seconds() if sys.platform == "linux" else None
    seconds = _read_psutil_process_seconds() if seconds is None else seconds
    is_possible = seconds is not None and seconds >= time.monotonic() - _import_time - CLOCK_TOLERANCE_SECONDS
    return seconds if is_possible else None


def _read_linux_process_seconds() -> float | None:
    """Read /proc/self/stat: field 22 is the start in clock ticks since boot. Field 2, in brackets, may have spaces."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _read_psutil_process_seconds() -> float | None:
    """Use psutil, which is optional."""
    try:
        return time.time() - import_module("psutil").Process().create_time()
    except (ImportError, OSError):
        return None
