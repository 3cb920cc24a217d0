"""Write files atomically: a file is complete or absent, even after a crash."""

import json
import os
from pathlib import Path
from typing import Any

from vitascope.errors import JSON_ERRORS, UserError


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write to a temporary file, then rename it, so that no reader sees a partial file."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary_path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary_path.replace(path)
    except OSError as error:
        temporary_path.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written: {error.strerror}. Files written before are intact.") from error


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
