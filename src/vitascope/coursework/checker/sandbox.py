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

from vitascope.coursework.checker.report import FileReport, parse_report
from vitascope.errors import UserError

STARTUP_SECONDS = 120.0  # additional seconds for Python and PyTorch to start on a slow machine


def check_file(
    path: Path,
    name: str | None = None,
    part: str | None = None,
    *,
    time_limit_seconds: float = 60.0,
    memory_limit_gib: float = 4.0,
) -> FileReport:
    """Check all parts of a file, or one. `seconds` limits loading and each part; `memory` is in GiB."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "answer.jsonl", Path(folder) / "log.txt"
        out.touch()
        task = {
            "file": str(path),
            "name": name,
            "part": part,
            "seconds": time_limit_seconds,
            "memory": memory_limit_gib,
            "out": str(out),
        }
        code = _run_task(task, log, 20 * time_limit_seconds + STARTUP_SECONDS)
        told = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return _collect_reports(told, code, time_limit_seconds, log.read_text(encoding="utf-8", errors="replace"))


def _run_task(task: dict[str, Any], log_path: Path, timeout_seconds: float) -> int | None:
    """Return the exit code, or None if the process was killed after `most` seconds."""
    if not hasattr(os, "fork"):
        return _run_task_without_fork(task, log_path, timeout_seconds)
    launcher = IDLE_FORK_SERVERS.pop() if IDLE_FORK_SERVERS else ForkServer()
    code = launcher.run_task(task | {"log": str(log_path), "most": timeout_seconds})
    IDLE_FORK_SERVERS.append(launcher)
    return code


class ForkServer:
    """A process that imports PyTorch once and then forks for each file: the second file starts at once."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            _build_child_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_build_child_environment(),
            text=True,
        )
        atexit.register(self.close)

    def run_task(self, task: dict[str, Any]) -> int | None:
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


IDLE_FORK_SERVERS: list[
    ForkServer
] = []  # started and waiting for a file; as many as files were checked at the same time


def _run_task_without_fork(task: dict[str, Any], log_path: Path, timeout_seconds: float) -> int | None:
    """Where processes cannot fork (Windows): a new one for each file."""
    with log_path.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*_build_child_command(), json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=_build_child_environment(),
        )
        try:
            return process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _build_child_command() -> list[str]:
    return [sys.executable, "-m", "vitascope.coursework.checker.sandbox_worker"]


def _build_child_environment() -> dict[str, str]:
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def _collect_reports(
    messages: list[dict[str, Any]], exit_code: int | None, time_limit_seconds: float, log: str
) -> FileReport:
    reports = FileReport()
    started = None
    for words in messages:
        if "report" in words:
            reports.part_reports.append(parse_report(words["report"]))
            started = None
        elif "error" in words:
            reports.error = words["error"]
            started = None
        else:
            started = words.get("started", started)
            reports.unrecognized_names += words.get("passed_over", [])
    if reports.error is None and not (messages and messages[-1].get("done")):
        reports.error = _explain_early_exit(exit_code, started, time_limit_seconds, log)
    return reports


def _explain_early_exit(exit_code: int | None, unfinished_name: str | None, time_limit_seconds: float, log: str) -> str:
    """Why the process ended before all parts were checked."""
    what = unfinished_name or "Loading the file"
    if exit_code is None or -exit_code in (getattr(signal, "SIGALRM", None), getattr(signal, "SIGPROF", None)):
        return (
            f"{what} did not finish within {time_limit_seconds:g} seconds of computing time. Is there an infinite loop?"
        )
    last = (log.strip().splitlines() or [""])[-1][:200]
    return f"{what} crashed the Python process (exit code {exit_code}).{' Last output: ' + last if last else ''}"
