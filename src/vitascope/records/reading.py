"""Read records from a folder and format their numbers for tables."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from vitascope.errors import UserError, suggest_choice
from vitascope.records.ablation import format_percent_mean_or_values
from vitascope.records.record import Record, read_record

BenchmarkRow = dict[str, Any]  # a row of a results file; the keys depend on the benchmark


class StoredRecord(NamedTuple):
    """A record and the path of its file."""

    path: Path
    record: Record


def format_mean_test_accuracy(record: Record) -> str:
    """Format the mean over seeds with its 95 % confidence interval; the values themselves with one or two seeds."""
    return format_percent_mean_or_values(record.test_accuracy)


def format_seconds_range(seconds: list[float]) -> str:
    """Format one number if the seeds agree after rounding (to seconds, to tenths below ten), else the range."""
    low, high = (f"{value:.{0 if value >= 10 else 1}f}" for value in (min(seconds), max(seconds)))
    return low if low == high else f"{low}–{high}"


def format_longest_wall_seconds(record: Record) -> str:
    """Format the longest known wall-clock time of the seeds, as for cold seconds."""
    seconds = record.known_wall_seconds
    return format_seconds_range([max(seconds)]) if seconds else "–"


def format_thousands_or_millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"


def format_record_link(record_path: Path, record: Record) -> str:
    """Format a record's name as a link to its file. `{results}` stands for the folder's path relative to the page."""
    return f"[{record.name}]({{results}}/{record_path.name})"


def format_markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find_record_files_by_name(results_folder: Path) -> dict[str, list[Path]]:
    """Return record name -> its files, one per machine. A record has seeds and one test accuracy per seed."""
    paths_by_name: dict[str, list[Path]] = {}
    for path in sorted(results_folder.glob("*.json")):
        results = read_results_file(path)
        if "test_accuracy" in results and "seeds" in results:
            paths_by_name.setdefault(results["name"], []).append(path)
    return paths_by_name


def read_named_or_all_records(results_folder: Path, record_names: list[str]) -> list[StoredRecord]:
    """Read the named records, or all records."""
    paths_by_name = find_record_files_by_name(results_folder)
    for name in record_names:
        if name not in paths_by_name:
            no_records = "The folder has no records. Write one with: vitascope record"
            hint = suggest_choice(name, paths_by_name) if paths_by_name else no_records
            raise UserError(f"There is no record '{name}' in {results_folder}. {hint}")
    names = record_names or sorted(paths_by_name)
    return [StoredRecord(path, read_record(path)) for name in names for path in paths_by_name[name]]


def read_benchmark_rows(results_folder: Path, record_names: list[str]) -> list[BenchmarkRow]:
    """Read the rows of all named results files."""
    if not record_names:
        raise UserError("This kind of results mark needs the name of a record.")
    return [row for name in record_names for row in read_results_file(results_folder / f"{name}.json").get("rows", [])]


def read_results_file(path: Path) -> dict[str, Any]:
    """Read a file of the results folder: a record or a benchmark."""
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a record ({type(error).__name__}).") from error
