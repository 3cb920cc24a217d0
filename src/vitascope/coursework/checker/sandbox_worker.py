"""The process in which a user's file runs; `sandbox.py` starts it with `python -m`.

With a task as its argument it runs that one. Else it reads tasks from standard input, forks for each and prints
the exit code: PyTorch is imported once for many files.
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
from typing import Any, NoReturn

from vitascope.coursework.checker.check import check_module_parts
from vitascope.coursework.checker.report import CheckReport
from vitascope.errors import UserError, shorten_error_message

WALL_CLOCK_FACTOR = 10.0  # wall-clock limit, as a multiple of the computing time limit


def main() -> None:
    if len(sys.argv) > 1:
        run_task(json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps({"code": fork_and_wait(json.loads(line))}), flush=True)


def fork_and_wait(task: dict[str, Any]) -> int | None:
    """The child's exit code, or None where it was ended after `most` seconds; what it started ends with it."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
            os.dup2(os.open(task["log"] if number else os.devnull, flags), number)
        os.dup2(1, 2)
        run_task(task)
    deadline = time.monotonic() + task["most"]
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


def run_task(task: dict[str, Any]) -> NoReturn:
    """A task has file, name, part, seconds, memory and out; its reports go to `out`, line by line."""
    path, out = Path(task["file"]).resolve(), Path(task["out"]).resolve()
    set_time_limit(task["seconds"])
    set_memory_limit(task["memory"])
    with out.open("a", encoding="utf-8") as file:

        def tell(**words: object) -> None:
            file.write(json.dumps(words) + "\n")
            file.flush()

        try:
            for found in check_module_parts(import_user_file(path), task["name"], task["part"]):
                if isinstance(found, CheckReport):
                    tell(**_make_report_message(found, task["memory"]))
                else:
                    set_time_limit(task["seconds"])
                    tell(**({"started": found} if isinstance(found, str) else {"passed_over": found}))
        except BaseException as error:
            tell(error=explain_error(error, path, task["memory"]))
        tell(done=True)
    sys.stdout.flush()
    os._exit(0)  # exit even if the file has left threads running


def _make_report_message(report: CheckReport, memory_limit_gib: float) -> dict[str, object]:
    error = str((report.first_difference or {}).get("error", ""))
    if "MemoryError" in error or "allocate memory" in error:
        return {"error": _format_memory_error(report.name, memory_limit_gib)}
    return {"report": report.to_dict()}


def import_user_file(path: Path) -> ModuleType:
    """The file as a module; what it prints goes to a log."""
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
    """Why the file could not be checked, with the line number."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    words = shorten_error_message(error, 200) if isinstance(error, Exception) else str(error)
    kind = type(error).__name__
    match error:
        case UserError():
            return str(error)
        case SyntaxError():
            return f"Syntax error in line {error.lineno}: {error.msg}."
        case ModuleNotFoundError():
            return f"It imports {error.name}, which is not installed{where}."
        case SystemExit():
            return f"It exits the program, e.g. with sys.exit(){where}."
        case MemoryError():
            return _format_memory_error("It", memory_limit_gib, where)
        case _ if "allocate memory" in words:
            return _format_memory_error("It", memory_limit_gib, where)
        case _:
            return f"It raised {kind}: {words}{where}." if words else f"It raised {kind}{where}."


def _format_memory_error(name: str, memory_limit_gib: float, location: str = "") -> str:
    return f"{name} needs more than {memory_limit_gib:g} GiB of memory{location}. Increase the limit with --memory."


def set_time_limit(seconds: float) -> None:
    """End this process after `seconds` of computing time, or ten times as many seconds of wall-clock time.

    Computing time does not depend on other programs, so a busy machine gives the same verdict."""
    if hasattr(signal, "setitimer"):
        for timer, number, most in (
            (signal.ITIMER_PROF, signal.SIGPROF, seconds),
            (signal.ITIMER_REAL, signal.SIGALRM, WALL_CLOCK_FACTOR * seconds),
        ):
            signal.signal(number, signal.SIG_DFL)
            signal.setitimer(timer, most)


def set_memory_limit(memory_limit_gib: float) -> None:
    """Limit the memory that the file may use in addition to PyTorch's own (Linux only)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        status = Path("/proc/self/status").read_text(encoding="utf-8")
        taken = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
        most = taken + int(memory_limit_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()
