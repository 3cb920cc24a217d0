"""Messages between the checker and the process that runs a user's file; as JSON, without PyTorch."""

from typing import Any, TypedDict


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
