"""Locate the folders of data sets on this machine."""

import os
import sys
from pathlib import Path


def resolve_data_root(requested_folder: str | None) -> Path:
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


def find_first_existing(paths: list[Path]) -> Path | None:
    """Return the first path that exists, or None."""
    return next((path for path in paths if path.exists()), None)
