"""Locate the folders of data sets on this machine."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def choose_data_root(requested_folder: str | None) -> Path:
    """Return the requested folder, else $VITASCOPE_DATA, else a folder in the user's cache."""
    folder = requested_folder or os.environ.get("VITASCOPE_DATA")
    return Path(folder).expanduser() if folder else get_cache_folder() / "data"


def get_cache_folder() -> Path:
    """Return the system's folder for files that can be downloaded again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "vitascope"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vitascope"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vitascope"


def try_write_cache_file(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file below the cache folder. If that is not possible, the content is computed again next time."""
    partial_path = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path.write_text(json.dumps(content))
        partial_path.replace(path)


def find_first_existing(paths: list[Path]) -> Path | None:
    """Return the first path that exists, or None."""
    return next((path for path in paths if path.exists()), None)
