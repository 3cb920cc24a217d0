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
from typing import Any, TypedDict

from vitascope.coursework.checker.report import FileReport, build_report_from_dict
from vitascope.errors import UserError

ExitCode = int
STARTUP_SECONDS = 120.0  # additional seconds for Python and PyTorch to start on a slow machine


class CheckTask(TypedDict):
    """A file to check, and the limits of the process."""

    file: str
    name: str | None
    part: str | None
    time_limit_seconds: float  # computing time, for loading the file and for each part
    memory_limit_gib: float
    output_file: str  # receives one WorkerMessage per line
    log_file: str  # receives what the file prints
    timeout_seconds: float  # wall-clock time of the whole task


class WorkerMessage(TypedDict, total=False):
    """One line of output of the process; each has one of the keys."""

    unrecognized_names: list[str]
    started: str  # name of the function or class whose check begins
    report: dict[str, Any]  # the fields of a CheckReport
    error: str
    done: bool


def check_file_in_sandbox(
    path: Path,
    name: str | None = None,
    part: str | None = None,
    *,
    time_limit_seconds: float = 60.0,
    memory_limit_gib: float = 4.0,
) -> FileReport:
    """Check all parts of a file, or one. The time limit holds for loading and for each part."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "answer.jsonl", Path(folder) / "log.txt"
        out.touch()
        task = CheckTask(
            file=str(path),
            name=name,
            part=part,
            time_limit_seconds=time_limit_seconds,
            memory_limit_gib=memory_limit_gib,
            output_file=str(out),
            log_file=str(log),
            timeout_seconds=20 * time_limit_seconds + STARTUP_SECONDS,
        )
        exit_code = _run_task_in_pooled_process(task)
        messages = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return _build_file_report(
            messages, exit_code, time_limit_seconds, log.read_text(encoding="utf-8", errors="replace")
        )


def _run_task_in_pooled_process(task: CheckTask) -> ExitCode | None:
    """Return the exit code, or None if the process was killed after the timeout."""
    if not hasattr(os, "fork"):
        return _run_task_in_new_process(task)
    server = IDLE_FORK_SERVERS.pop() if IDLE_FORK_SERVERS else ForkServer()
    exit_code = server.run_task(task)
    IDLE_FORK_SERVERS.append(server)
    return exit_code


class ForkServer:
    """A process that imports PyTorch once and then forks for each file, so that later files start faster."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            _build_child_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_build_child_environment(),
            text=True,
        )
        atexit.register(self.close)

    def run_task(self, task: CheckTask) -> ExitCode | None:
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


# Servers that wait for a file; their number is the highest number of files checked at the same time.
IDLE_FORK_SERVERS: list[ForkServer] = []


def _run_task_in_new_process(task: CheckTask) -> ExitCode | None:
    """Start a new process for each file, where processes cannot fork (Windows)."""
    with Path(task["log_file"]).open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*_build_child_command(), json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=_build_child_environment(),
        )
        try:
            return process.wait(timeout=task["timeout_seconds"])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _build_child_command() -> list[str]:
    return [sys.executable, "-m", "vitascope.coursework.checker.sandbox_worker"]


def _build_child_environment() -> dict[str, str]:
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def _build_file_report(
    messages: list[WorkerMessage], exit_code: ExitCode | None, time_limit_seconds: float, log: str
) -> FileReport:
    reports = FileReport()
    started = None
    for message in messages:
        if "report" in message:
            reports.part_reports.append(build_report_from_dict(message["report"]))
            started = None
        elif "error" in message:
            reports.error = message["error"]
            started = None
        else:
            started = message.get("started", started)
            reports.unrecognized_names += message.get("unrecognized_names", [])
    if reports.error is None and not (messages and messages[-1].get("done")):
        reports.error = _explain_early_exit(exit_code, started, time_limit_seconds, log)
    return reports


def _explain_early_exit(
    exit_code: ExitCode | None, unfinished_name: str | None, time_limit_seconds: float, log: str
) -> str:
    """Explain why the process ended before all parts were checked."""
    activity = unfinished_name or "Loading the file"
    if exit_code is None or -exit_code in (getattr(signal, "SIGALRM", None), getattr(signal, "SIGPROF", None)):
        limit = f"{time_limit_seconds:g} seconds of computing time"
        return f"{activity} did not finish within {limit}. Is there an infinite loop?"
    last = (log.strip().splitlines() or [""])[-1][:200]
    return f"{activity} crashed the Python process (exit code {exit_code}).{' Last output: ' + last if last else ''}"
