"""Bytes -> a file that is either whole or not there, whatever happens meanwhile."""

import json
import os
from pathlib import Path
from typing import Any

from vitascope.errors import UserError


def write_whole(path: Path, content: bytes | str) -> None:
    """Beside it first, then renamed over it: a reader, or a killed writer's successor, never sees half a file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(
            f"{path} could not be written: {error.strerror}. What was written before is still whole."
        ) from error


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def append_line(path: Path, value: dict[str, Any]) -> None:
    """One JSON line more."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {error.strerror}. What was written before is still whole."
        ) from error


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {path} could not be made: {error.strerror}. Choose another place with --runs."
        ) from error
