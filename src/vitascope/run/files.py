"""Write files atomically: a file is complete or absent, even after a crash."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitascope.errors import JSON_ERRORS, UserError


def write_atomically(path: Path, content: bytes | memoryview | str, previous_path: Path | None = None) -> None:
    """Write to a temporary file, then rename it, so that no reader sees a partial file.

    `previous_path`: the old file is renamed to this. After a crash between the two renames, only this one exists."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary_path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if previous_path is not None and path.is_file():
            path.replace(previous_path)
        temporary_path.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary_path.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written: {error.strerror}. Files written before are intact.") from error


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure, where the operating system can."""
    with suppress(OSError):  # Windows cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make what was appended to a file survive a power failure."""
    with suppress(OSError), open(path, "r+b") as file:
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json_object_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON file; return an empty dict if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *JSON_ERRORS):
        return {}
    return content if isinstance(content, dict) else {}


def append_json_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line; start a new line if the last one is incomplete."""
    try:
        with open(path, "a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")
            file.write(json.dumps(value).encode() + b"\n")
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror}. Files written before are intact.") from error


def make_folder(path: Path, error_hint: str = "") -> None:
    """Create a folder and its parents. `error_hint` ends the error message."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {path} could not be created: {error.strerror}. {error_hint}".strip()) from error
