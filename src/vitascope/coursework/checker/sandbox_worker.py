"""Run a user's file in a separate process; `sandbox.py` starts it with `python -m`.

With a task as its argument, it runs this task. Otherwise it reads tasks from standard input, forks for each task and
prints the exit code, so that PyTorch is imported only once.
"""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from vitascope.coursework.checker.check import (
    CheckStarted,
    UnrecognizedNames,
    check_parts_yielding_progress_and_reports,
)
from vitascope.coursework.checker.report import CheckReport
from vitascope.coursework.checker.sandbox import CheckTask, ExitCode, WorkerMessage
from vitascope.errors import UserError, shorten_error_message

WALL_CLOCK_FACTOR = 10.0  # wall-clock limit, as a multiple of the computing time limit


def main() -> None:
    if len(sys.argv) > 1:
        run_task_and_exit(json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps({"code": run_task_in_forked_child(json.loads(line))}), flush=True)


def run_task_in_forked_child(task: CheckTask) -> ExitCode | None:
    """Run the task in a child process; return its exit code, or None if it was killed after the timeout.

    Processes that the child has started are killed too."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(task["log_file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        run_task_and_exit(task)
    deadline = time.monotonic() + task["timeout_seconds"]
    try:
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def run_task_and_exit(task: CheckTask) -> NoReturn:
    """Check a file, write one message per line to the output file, and exit."""
    path, output_path = Path(task["file"]).resolve(), Path(task["output_file"]).resolve()
    restart_cpu_and_wall_time_limits(task["time_limit_seconds"])
    limit_additional_memory(task["memory_limit_gib"])
    with output_path.open("a", encoding="utf-8") as file:

        def send(message: WorkerMessage) -> None:
            file.write(json.dumps(message) + "\n")
            file.flush()

        try:
            for progress in check_parts_yielding_progress_and_reports(
                enter_folder_and_import_file(path), task["name"], task["part"]
            ):
                match progress:
                    case CheckReport():
                        send(_make_report_or_memory_error(progress, task["memory_limit_gib"]))
                    case CheckStarted():
                        restart_cpu_and_wall_time_limits(task["time_limit_seconds"])
                        send({"started": progress.name})
                    case UnrecognizedNames():
                        restart_cpu_and_wall_time_limits(task["time_limit_seconds"])
                        send({"unrecognized_names": progress.names})
        except BaseException as error:
            send({"error": explain_error(error, path, task["memory_limit_gib"])})
        send({"done": True})
    sys.stdout.flush()
    os._exit(0)  # exit even if the file has left threads running


def _make_report_or_memory_error(report: CheckReport, memory_limit_gib: float) -> WorkerMessage:
    error = str((report.first_difference or {}).get("error", ""))
    if "MemoryError" in error or "allocate memory" in error:
        return {"error": _format_memory_error(report.name, memory_limit_gib)}
    return {"report": report.to_dict()}


def enter_folder_and_import_file(path: Path) -> ModuleType:
    """Import a file as a module."""
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    name = f"_reader_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path.name} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def explain_error(error: BaseException, path: Path, memory_limit_gib: float) -> str:
    """Explain why the file could not be checked, with the line number."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    location = f" (line {lines[-1]})" if lines else ""
    message = shorten_error_message(error, 200) if isinstance(error, Exception) else str(error)
    kind = type(error).__name__
    match error:
        case UserError():
            return str(error)
        case SyntaxError():
            return f"Syntax error in line {error.lineno}: {error.msg}."
        case ModuleNotFoundError():
            return f"It imports {error.name}, which is not installed{location}."
        case SystemExit():
            return f"It exits the program, e.g. with sys.exit(){location}."
        case MemoryError():
            return _format_memory_error("It", memory_limit_gib, location)
        case _ if "allocate memory" in message:
            return _format_memory_error("It", memory_limit_gib, location)
        case _:
            return f"It raised {kind}: {message}{location}." if message else f"It raised {kind}{location}."


def _format_memory_error(name: str, memory_limit_gib: float, location: str = "") -> str:
    return f"{name} needs more than {memory_limit_gib:g} GiB of memory{location}. Increase the limit with --memory."


def restart_cpu_and_wall_time_limits(cpu_seconds: float) -> None:
    """Restart both timers: end this process after `cpu_seconds` of computing time, or ten times as many of wall-clock
    time.

    Computing time does not depend on other programs, so a busy machine gives the same verdict."""
    if hasattr(signal, "setitimer"):
        for timer, signal_number, limit in (
            (signal.ITIMER_PROF, signal.SIGPROF, cpu_seconds),
            (signal.ITIMER_REAL, signal.SIGALRM, WALL_CLOCK_FACTOR * cpu_seconds),
        ):
            signal.signal(signal_number, signal.SIG_DFL)
            signal.setitimer(timer, limit)


def limit_additional_memory(memory_limit_gib: float) -> None:
    """Limit the memory that the file may use in addition to PyTorch's own (Linux only)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        status = Path("/proc/self/status").read_text(encoding="utf-8")
        used_bytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
        limit_bytes = used_bytes + int(memory_limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


if __name__ == "__main__":
    main()
