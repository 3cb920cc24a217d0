"""What a benchmark found -> its file in results/, with machine, versions and commit."""

from pathlib import Path
from typing import Any

from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import record_of_machine


def write_record(out: Path, commit: str | None, **said: Any) -> None:
    """Under its file's name."""
    make_folder(out.parent)
    write_json(out, {"name": out.stem} | said | record_of_machine(commit))
