"""A reader's file -> reports, from a process of its own that cannot hang, fill the memory or take us down."""

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

START = 120.0  # seconds for Python and torch to start on a slow machine, beside the file's own time


def check_file(
    path: Path, name: str | None = None, part: str | None = None, *, seconds: float = 60.0, memory: float = 4.0
) -> Reports:
    """All parts of a file, or one; at most so many seconds for its start and for each part, and so many GiB."""
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
    """The exit code, or None where it had to be ended from here."""
    here = str(Path(__file__).parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, "-m", "vitascope.checking.child", json.dumps(task)]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            return process.wait(timeout=most)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # and whatever the file started
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
            process.wait()


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
    """Why a process ended before it was done."""
    what = started or "the file itself"
    if code is None or (hasattr(signal, "SIGALRM") and code == -signal.SIGALRM):
        return f"{what} did not end within {seconds:g} seconds: is there an endless loop?"
    last = (log.strip().splitlines() or [""])[-1][:200]
    return f"{what} crashed the process (exit code {code}){': ' + last if last else ''}"
