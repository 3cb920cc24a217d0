"""A folder of records -> what they say, and the words that numbers become in tables."""

import json
from pathlib import Path
from typing import Any

from vitascope.errors import UserError, did_you_mean
from vitascope.records.record import Record, read_record


def accuracy_words(record: Record) -> str:
    spread = "" if record.spread is None else f" ± {100 * record.spread:.2f}"
    return f"{100 * record.accuracy:.2f}{spread} %"


def seconds_words(seconds: list[float]) -> str:
    """One number where seeds agree to the second (below ten to the tenth), else from – to."""
    low, high = (f"{value:.{0 if value >= 10 else 1}f}" for value in (min(seconds), max(seconds)))
    return low if low == high else f"{low}–{high}"


def wall_words(record: Record) -> str:
    """The longest of the seeds whose wall clock is known, as for cold seconds."""
    known = record.known_wall_seconds
    return seconds_words([max(known)]) if known else "–"


def millions(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.0f} k"


def linked(path: Path, record: Record) -> str:
    """A record's name as a link to its file; `{results}` becomes the folder as seen from the page."""
    return f"[{record.name}]({{results}}/{path.name})"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find_records(folder: Path) -> dict[str, list[Path]]:
    """Name -> its files, one per machine. A record is what has seeds and an accuracy for each."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        said = read_file(path)
        if "test_accuracy" in said and "seeds" in said:
            found.setdefault(said["name"], []).append(path)
    return found


def records_named(folder: Path, names: list[str]) -> list[tuple[Path, Record]]:
    """The named ones, or all."""
    known = find_records(folder)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) if known else "There is none at all: write one with vitascope record."
            raise UserError(f"There is no record '{name}' in {folder}. {hint}")
    return [(path, read_record(path)) for name in names or sorted(known) for path in known[name]]


def rows_of(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    if not names:
        raise UserError("This kind of results needs the name of a record.")
    return [row for name in names for row in read_file(folder / f"{name}.json").get("rows", [])]


def read_file(path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a record ({type(error).__name__}).") from error
