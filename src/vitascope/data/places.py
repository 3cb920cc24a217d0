"""Folders of the data sets on this machine."""

import os
import sys
from pathlib import Path


def data_root(asked: str | None) -> Path:
    """The asked folder, else $VITASCOPE_DATA, else the user's cache folder."""
    given = asked or os.environ.get("VITASCOPE_DATA")
    return Path(given).expanduser() if given else cache_folder() / "data"


def cache_folder() -> Path:
    """The system's place for files that can be fetched again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "vitascope"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vitascope"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vitascope"


def first_existing(candidates: list[Path]) -> Path | None:
    return next((path for path in candidates if path.exists()), None)
