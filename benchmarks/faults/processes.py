"""Run the command line in forked processes, which have PyTorch imported already, or in new processes."""

import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from benchmarks.race import REPOSITORY_FOLDER

CPU_SECONDS, WALL_SECONDS = 60, 900  # a command that needs more than the first, or waits for the second, hangs
LOG_FILES = ("out", "err")
POLL_SECONDS = 0.002
SETTINGS_OF_PROCESS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "NO_COLOR": "1"}


class Outcome(NamedTuple):
    """How a command ended: its exit code (negative: killed by this signal) and what it wrote."""

    exit_code: int
    output: str
    errors: str
    hung: bool


@dataclass
class StartedCommand:
    """A running command, in a process group of its own."""

    pid: int
    log_folder: Path
    started: float = field(default_factory=time.monotonic)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it may not have its group yet
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Outcome:
        """Wait for the end. A command that uses too much CPU time, or waits too long, hangs."""
        hung = False
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - self.started > WALL_SECONDS:
                hung = True
                self.kill()
            time.sleep(POLL_SECONDS)
        code = os.waitstatus_to_exitcode(status)
        texts = [(self.log_folder / name).read_bytes().decode(errors="replace") for name in LOG_FILES]
        shutil.rmtree(self.log_folder)
        return Outcome(code, texts[0], texts[1], hung or code == -signal.SIGXCPU)

    def kill_after(self, seconds: float) -> Outcome | None:
        """Send SIGKILL after this time; return None. Return how the command ended, if it ended before."""
        end = self.started + seconds
        while time.monotonic() < end:
            time.sleep(min(POLL_SECONDS, max(0.0, end - time.monotonic())))
        self.kill()
        outcome = self.wait()
        return None if outcome.exit_code == -signal.SIGKILL else outcome


def start_forked_command(arguments: Sequence[str], folder: Path, max_file_bytes: int | None = None) -> StartedCommand:
    """Start `vitascope ARGUMENTS` in a copy of this process. `max_file_bytes`: the largest file it can write."""
    log_folder = _make_log_folder()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _prepare_child(folder, log_folder, max_file_bytes)
            code = _run_command_line(arguments)
        finally:
            os._exit(code)
    return StartedCommand(pid, log_folder)


def _make_log_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vitascope-faults-log-"))
    for name in LOG_FILES:
        (folder / name).touch()
    return folder


def _prepare_child(folder: Path, log_folder: Path, max_file_bytes: int | None) -> None:
    os.setsid()
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(log_folder / name, os.O_WRONLY), number)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(number, "wb", closefd=False)) for number in (1, 2))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False))
    warnings.resetwarnings()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if max_file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does at its start
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))


def _run_command_line(arguments: Sequence[str]) -> int:
    from vitascope.cli import main

    sys.argv = ["vitascope", *arguments]
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code


def run_forked_command(arguments: Sequence[str], folder: Path, max_file_bytes: int | None = None) -> Outcome:
    return start_forked_command(arguments, folder, max_file_bytes).wait()


def start_new_command(
    arguments: Sequence[str | bytes], folder: Path, environment: Mapping[str, str] | None = None
) -> StartedCommand:
    """Start `python -m vitascope ARGUMENTS` as a user does."""
    log_folder = _make_log_folder()
    paths = [str(REPOSITORY_FOLDER / "src"), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-m", "vitascope", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=(log_folder / "out").open("wb"),
        stderr=(log_folder / "err").open("wb"),
        start_new_session=True,
    )
    process.returncode = 0  # `StartedCommand` waits for it
    return StartedCommand(process.pid, log_folder)


def preload_modules(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Import here what these commands import, so that forked commands need not. Their results stay in the folder."""
    names_path = folder / "modules.txt"
    for arguments in commands:
        _run_in_fork(lambda arguments=arguments: _run_and_list_modules(arguments, folder, names_path))
        for name in names_path.read_text(encoding="utf-8").split() if names_path.is_file() else []:
            if name not in sys.modules and not name.startswith("__"):
                with suppress(Exception), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    import_module(name)


def _run_and_list_modules(arguments: Sequence[str], folder: Path, names_path: Path) -> None:
    log_folder = _make_log_folder()
    _prepare_child(folder, log_folder, None)
    _run_command_line(arguments)
    shutil.rmtree(log_folder)
    names_path.write_text("\n".join(sys.modules), encoding="utf-8")


def _run_in_fork(run: Callable[[], object]) -> None:
    os.waitpid(fork_and_run(run), 0)


def fork_and_run(run: Callable[[], object]) -> int:
    """Call the function in a copy of this process, and return its id. The exit code is 1 if the function fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid
