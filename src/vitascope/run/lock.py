"""Lock a run, so that only one process at a time trains or deletes it. The lock file names its holder.

The operating system ends the lock (flock) with its holder, even after SIGKILL. Without flock (Windows, some network
drives) the lock file alone counts: its holder's process is looked up."""

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitascope.errors import UserError
from vitascope.run.directory import Run

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK_FILE = "lock.json"
WAIT_FOR_NAME_SECONDS = 2.0  # a holder writes its name milliseconds after it has taken the lock
STILL_ACTIVE, PROCESS_QUERY_LIMITED_INFORMATION = 259, 0x1000  # of the Windows API
_descriptors: set[int] = set()  # of the locks that this process holds


class RunInUseError(UserError):
    """Another process holds the lock of the run."""


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock."""

    host: str
    pid: int
    process_start: str  # another process with the same id has another one; "" if unknown
    since: str

    @property
    def is_on_this_host(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def may_be_running(self) -> bool:
        """False only if it has certainly ended. The processes of another host are unknown."""
        if not self.is_on_this_host:
            return True
        start = find_process_start(self.pid)
        return start is not None and (start == self.process_start or "" in (start, self.process_start))


class HeldLock(NamedTuple):
    path: Path
    content: bytes
    descriptor: int | None = None  # None without flock


@contextmanager
def lock_run(run: Run, *, force: bool = False) -> Iterator[None]:
    """Hold the lock of a run; raise RunInUseError if another process has it. `force`: take it from another host."""
    path, process = run.get_path(LOCK_FILE), os.getpid()
    since = datetime.now().isoformat(" ", timespec="seconds")
    holder = LockHolder(socket.gethostname(), process, find_process_start(process) or "", since)
    content = json.dumps(asdict(holder)).encode()
    try:
        lock = _take_lock_with_flock(path, content, force) or _take_lock_without_flock(path, content, force)
    except OSError as error:
        if other_holder := _find_holder(path):  # of another user
            _check_can_take_over(path, other_holder, force)
        raise UserError(f"{path} could not be written: {error.strerror}. Nothing was changed.") from error
    try:
        yield
    finally:
        _release_lock(lock)


def _take_lock_with_flock(path: Path, content: bytes, force: bool) -> HeldLock | None:
    """Return None where flock does not work."""
    deadline = time.monotonic() + WAIT_FOR_NAME_SECONDS
    while fcntl is not None:
        descriptor, is_new = _open_lock_file(path)
        try:
            result = _try_flock(descriptor, path)
            if result == "taken":
                holder = _find_holder(path)  # one of this host has ended, or the folder is a copy
                if holder and not holder.is_on_this_host:
                    _check_can_take_over(path, holder, force)
                os.ftruncate(descriptor, 0)
                os.write(descriptor, content)
                _descriptors.add(descriptor)
                return HeldLock(path, content, descriptor)
        finally:
            if descriptor not in _descriptors:
                os.close(descriptor)
        if result == "unsupported":
            if is_new:
                path.unlink(missing_ok=True)
            return None
        if result == "held":
            _remove_forced_or_wait_or_refuse(path, force, deadline)
    return None


def _open_lock_file(path: Path) -> tuple[int, bool]:
    """Return a descriptor, which programs started later do not inherit, and whether the file is new."""
    while True:
        with suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        with suppress(FileNotFoundError):  # its holder has just removed it
            return os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)), False


def _try_flock(descriptor: int, path: Path) -> Literal["taken", "held", "removed", "unsupported"]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # pyright: ignore[reportOptionalMemberAccess]
    except BlockingIOError:
        return "held"
    except OSError:
        return "unsupported"
    try:
        return "taken" if os.path.samestat(os.fstat(descriptor), path.stat()) else "removed"
    except FileNotFoundError:
        return "removed"


def _remove_forced_or_wait_or_refuse(path: Path, force: bool, deadline: float) -> None:
    """Handle a lock that another process holds: with `force`, remove another host's; refuse a named holder's."""
    holder = _find_holder(path)
    if holder and holder.may_be_running:
        _check_can_take_over(path, holder, force)
        path.unlink(missing_ok=True)
    elif time.monotonic() > deadline:
        raise RunInUseError(f"{path.parent} is used by another process; wait until it ends, or stop it.")
    else:
        time.sleep(0.02)  # the holder has not written its name yet


def _take_lock_without_flock(path: Path, content: bytes, force: bool) -> HeldLock:
    deadline = time.monotonic() + WAIT_FOR_NAME_SECONDS
    while True:
        descriptor, is_new = _open_lock_file(path)
        with open(descriptor, "r+b") as file:
            if is_new:
                file.write(content)
                return HeldLock(path, content)
            found = file.read()
        if holder := _parse_holder(found):
            _check_can_take_over(path, holder, force)
        elif time.monotonic() < deadline:
            time.sleep(0.02)  # the holder has not written its name yet
            continue
        _remove_lock_file(path, found)


def _remove_lock_file(path: Path, content: bytes) -> None:
    """Remove the lock file if it has this content. Another process may replace it at any moment."""
    moved = path.with_name(f".{path.name}.{os.getpid()}.stale")
    with suppress(OSError):
        if path.read_bytes() == content:
            path.replace(moved)
            if moved.read_bytes() != content and not path.exists():
                moved.rename(path)
    moved.unlink(missing_ok=True)


def _check_can_take_over(path: Path, holder: LockHolder, force: bool) -> None:
    if not holder.may_be_running or (force and not holder.is_on_this_host):
        return
    text = f"{path.parent} is used by process {holder.pid} on {holder.host} since {holder.since}"
    if holder.is_on_this_host:
        raise RunInUseError(f"{text}; wait until it ends, or stop it.")
    raise RunInUseError(f"{text}; if that process has ended, add --force (in Python force=True).")


def _find_holder(path: Path) -> LockHolder | None:
    try:
        return _parse_holder(path.read_bytes())
    except OSError:
        return None


def _parse_holder(content: bytes) -> LockHolder | None:
    """Return None if the file is incomplete or damaged."""
    try:
        fields = json.loads(content)
        pid = int(fields["pid"])
        holder = LockHolder(str(fields["host"]), pid, str(fields["process_start"]), str(fields["since"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return holder if 0 < pid < 2**31 else None


def _release_lock(lock: HeldLock) -> None:
    """Remove the lock file, unless another host has taken it by force; then end the lock."""
    if lock.descriptor is not None and lock.descriptor not in _descriptors:
        return  # in a forked process
    _remove_lock_file(lock.path, lock.content)
    if lock.descriptor is not None:
        _descriptors.remove(lock.descriptor)
        os.close(lock.descriptor)


def _close_locks_in_forked_process() -> None:
    """A forked process inherits flock; it must not hold the lock when its parent has ended."""
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks_in_forked_process)


def find_process_start(pid: int) -> str | None:
    """Return the start of a process, in a unit of the operating system; None if it has ended; "" if unknown."""
    if sys.platform == "linux":
        return _find_linux_process_start(pid)
    if os.name == "nt":
        return _find_windows_process_start(pid)
    try:
        command = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return ""


def _find_linux_process_start(pid: int) -> str | None:
    """Return the boot's id and field 22 of /proc/PID/stat, in clock ticks since boot."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return None if fields[0] in "ZX" else f"{boot_id} {fields[19]}"  # a zombie has ended
    except (OSError, IndexError):
        return _probe_process(pid)


def _probe_process(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # a process of another user
        return ""
    return ""


def _find_windows_process_start(pid: int) -> str | None:
    kernel32: Any = getattr(ctypes, "windll").kernel32  # noqa: B009 - pyright knows it on Windows only
    handle = kernel32.OpenProcess(PROCESS_QUERY_LIMITED_INFORMATION, False, pid)
    if not handle:
        return None
    exit_code, times = ctypes.c_ulong(), [ctypes.c_ulonglong() for _ in range(4)]
    kernel32.GetExitCodeProcess(handle, ctypes.byref(exit_code))
    kernel32.GetProcessTimes(handle, *map(ctypes.byref, times))
    kernel32.CloseHandle(handle)
    return str(times[0].value) if exit_code.value == STILL_ACTIVE else None
