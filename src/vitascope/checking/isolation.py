"""Check a user's file in a separate process with limits on time and memory."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vitascope.checking.result import Reports, report_from
from vitascope.errors import UserError

START = 120.0  # additional seconds for Python and PyTorch to start on a slow machine


def check_file(
    path: Path, name: str | None = None, part: str | None = None, *, seconds: float = 60.0, memory: float = 4.0
) -> Reports:
    """Check all parts of a file, or one. `seconds` limits loading and each part; `memory` is in GiB."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "answer.jsonl", Path(folder) / "log.txt"
        out.touch()
        task = {"file": str(path), "name": name, "part": part, "seconds": seconds, "memory": memory, "out": str(out)}
        code = _run(task, log, 20 * seconds + START)
        told = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return _collected(told, code, seconds, log.read_text(encoding="utf-8", errors="replace"))


def _run(task: dict[str, Any], log: Path, most: float) -> int | None:
    """Return the exit code, or None if the process was killed after `most` seconds."""
    if not hasattr(os, "fork"):
        return _run_alone(task, log, most)
    launcher = IDLE.pop() if IDLE else Launcher()
    code = launcher.run(task | {"log": str(log), "most": most})
    IDLE.append(launcher)
    return code


class Launcher:
    """A process that imports PyTorch once and then forks for each file: the second file starts at once."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            _command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(), text=True
        )
        atexit.register(self.close)

    def run(self, task: dict[str, Any]) -> int | None:
        if self.process.stdin is None or self.process.stdout is None:
            raise UserError("The checker process could not be started: it has no pipes.")
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise UserError(f"The checker process ended unexpectedly (exit code {self.process.wait()}).")
        return json.loads(answer)["code"]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.communicate()


IDLE: list[Launcher] = []  # started and waiting for a file; as many as files were checked at the same time


def _run_alone(task: dict[str, Any], log: Path, most: float) -> int | None:
    """Where processes cannot fork (Windows): a new one for each file."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*_command(), json.dumps(task)], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=_environment()
        )
        try:
            return process.wait(timeout=most)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _command() -> list[str]:
    return [sys.executable, "-m", "vitascope.checking.child"]


def _environment() -> dict[str, str]:
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def _collected(told: list[dict[str, Any]], code: int | None, seconds: float, log: str) -> Reports:
    reports = Reports()
    started = None
    for words in told:
        if "report" in words:
            reports.parts.append(report_from(words["report"]))
            started = None
        elif "error" in words:
            reports.error = words["error"]
            started = None
        else:
            started = words.get("started", started)
            reports.passed_over += words.get("passed_over", [])
    if reports.error is None and not (told and told[-1].get("done")):
        reports.error = _ended(code, started, seconds, log)
    return reports


def _ended(code: int | None, started: str | None, seconds: float, log: str) -> str:
    """Why the process ended before all parts were checked."""
    what = started or "Loading the file"
    if code is None or -code in (getattr(signal, "SIGALRM", None), getattr(signal, "SIGPROF", None)):
        return f"{what} did not finish within {seconds:g} seconds of computing time. Is there an infinite loop?"
    last = (log.strip().splitlines() or [""])[-1][:200]
    return f"{what} crashed the Python process (exit code {code}).{' Last output: ' + last if last else ''}"
