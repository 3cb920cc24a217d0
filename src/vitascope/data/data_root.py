"""Folders of the data sets on this machine."""

import os
import sys
from pathlib import Path


def resolve_data_root(requested_folder: str | None) -> Path:
    """The asked folder, else $VITASCOPE_DATA, else the user's cache folder."""
    given = requested_folder or os.environ.get("VITASCOPE_DATA")
    return Path(given).expanduser() if given else get_cache_folder() / "data"


def get_cache_folder() -> Path:
    """The system's place for files that can be fetched again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "vitascope"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vitascope"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vitascope"


def find_first_existing(paths: list[Path]) -> Path | None:
    return next((path for path in paths if path.exists()), None)
