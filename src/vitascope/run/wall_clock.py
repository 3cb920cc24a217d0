"""Measure wall-clock seconds since the operating system started this process, for the first run it works on."""

import os
import sys
import time
from importlib import import_module
from pathlib import Path

from vitascope.run.directory import Run

TRAIN, EVALUATE = "train", "evaluate"
TICK = 0.05  # seconds by which the operating system's clocks may disagree
_imported = time.monotonic()
_begun: list[tuple[str, Path]] = []  # (task, run) in the order in which this process began them


def begin_task(task: str, run: Run) -> None:
    """Note that this process works on a run. Call it before `measure_task_seconds`."""
    _begun.append((task, run.path.resolve()))


def measure_task_seconds(run: Run) -> float | None:
    """Seconds from the process's start until now; None where they include other work than this run's.

    Other work is another run, the same task twice, or a user who types commands."""
    tasks = [task for task, path in _begun if path == run.path.resolve()]
    is_alone = len(tasks) == len(_begun) and tasks in ([TRAIN], [EVALUATE], [TRAIN, EVALUATE])
    return measure_wall_seconds() if is_alone and not hasattr(sys, "ps1") else None


def was_trained_here(run: Run) -> bool:
    """Whether this process trained the run, so that its wall-clock seconds include the training."""
    return (TRAIN, run.path.resolve()) in _begun


def measure_wall_seconds() -> float | None:
    """Seconds since this process was started; None where the operating system does not say when that was."""
    seconds = _read_linux_seconds() if sys.platform == "linux" else None
    seconds = _ask_psutil_seconds() if seconds is None else seconds
    is_possible = seconds is not None and seconds >= time.monotonic() - _imported - TICK
    return seconds if is_possible else None


def _read_linux_seconds() -> float | None:
    """From /proc/self/stat: field 22 is the start in clock ticks since boot. Field 2, in brackets, may have spaces."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _ask_psutil_seconds() -> float | None:
    """From psutil, which is optional."""
    try:
        return time.time() - import_module("psutil").Process().create_time()
    except (ImportError, OSError):
        return None
