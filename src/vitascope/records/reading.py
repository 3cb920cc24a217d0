"""Read records from a folder and format their numbers for tables."""

import json
from pathlib import Path
from typing import Any

from vitascope.errors import UserError, did_you_mean
from vitascope.records.arms import format_mean
from vitascope.records.record import Record, read_record


def accuracy_words(record: Record) -> str:
    """The mean over seeds with its 95 % confidence interval; the values themselves with one or two seeds."""
    return format_mean(record.test_accuracy)


def seconds_words(seconds: list[float]) -> str:
    """One number if the seeds agree after rounding (seconds, tenths below ten), else the range."""
    low, high = (f"{value:.{0 if value >= 10 else 1}f}" for value in (min(seconds), max(seconds)))
    return low if low == high else f"{low}–{high}"


def wall_words(record: Record) -> str:
    """The longest known wall-clock time of the seeds, as for cold seconds."""
    known = record.known_wall_seconds
    return seconds_words([max(known)]) if known else "–"


def millions(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.0f} k"


def linked(path: Path, record: Record) -> str:
    """A record's name as a link to its file; `{results}` is replaced by the folder's path relative to the page."""
    return f"[{record.name}]({{results}}/{path.name})"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find_records(folder: Path) -> dict[str, list[Path]]:
    """Record name -> its files, one per machine. A record has seeds and one test accuracy per seed."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        said = read_file(path)
        if "test_accuracy" in said and "seeds" in said:
            found.setdefault(said["name"], []).append(path)
    return found


def records_named(folder: Path, names: list[str]) -> list[tuple[Path, Record]]:
    """The named records, or all records."""
    known = find_records(folder)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) if known else "The folder has no records. Write one with: vitascope record"
            raise UserError(f"There is no record '{name}' in {folder}. {hint}")
    return [(path, read_record(path)) for name in names or sorted(known) for path in known[name]]


def rows_of(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    if not names:
        raise UserError("This kind of results mark needs the name of a record.")
    return [row for name in names for row in read_file(folder / f"{name}.json").get("rows", [])]


def read_file(path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a record ({type(error).__name__}).") from error
