"""The process in which a reader's file runs: `python -m vitascope.checking.child`, started by `isolation`."""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from vitascope.checking.examining import examine_file
from vitascope.checking.result import Report
from vitascope.errors import UserError, first_line


def main() -> None:
    """Arguments: a JSON object with file, name, part, seconds, memory and out."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    path, out = Path(task["file"]).resolve(), Path(task["out"]).resolve()
    hurry(task["seconds"])
    limit(task["memory"])
    with out.open("a", encoding="utf-8") as file:

        def tell(**words: object) -> None:
            file.write(json.dumps(words) + "\n")
            file.flush()

        try:
            for found in examine_file(loaded(path), task["name"], task["part"]):
                if isinstance(found, Report):
                    tell(**_finished(found, task["memory"]))
                else:
                    hurry(task["seconds"])
                    tell(**({"started": found} if isinstance(found, str) else {"passed_over": found}))
        except BaseException as error:
            tell(error=explained(error, path, task["memory"]))
        tell(done=True)
    sys.stdout.flush()
    os._exit(0)  # threads the file may have left behind do not keep us


def _finished(report: Report, memory: float) -> dict[str, object]:
    error = str((report.first_difference or {}).get("error", ""))
    if "MemoryError" in error or "allocate memory" in error:
        return {"error": f"{report.name} needs more than {memory:g} GiB of memory"}
    return {"report": report.whole()}


def loaded(path: Path) -> ModuleType:
    """The file as a module; what it prints goes to a log."""
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    name = f"_reader_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def explained(error: BaseException, path: Path, memory: float) -> str:
    """What stopped us, in one sentence with its line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    words = first_line(error, 200) if isinstance(error, Exception) else str(error)
    match error:
        case UserError():
            return str(error)
        case SyntaxError():
            return f"syntax error in line {error.lineno}: {error.msg}"
        case ModuleNotFoundError():
            return f"it imports {error.name}, which is not installed{where}"
        case SystemExit():
            return f"it ends the program by itself{where}"
        case MemoryError():
            return f"it needs more than {memory:g} GiB of memory{where}"
        case _ if "allocate memory" in words:
            return f"it needs more than {memory:g} GiB of memory{where}"
        case _:
            return f"it crashed: {type(error).__name__}: {words}{where}"


def hurry(seconds: float) -> None:
    """The system ends this process after so many seconds, whatever it does then."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def limit(memory: float) -> None:
    """Memory beyond what torch has taken is refused (Linux)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        status = Path("/proc/self/status").read_text(encoding="utf-8")
        taken = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
        most = taken + int(memory * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()
