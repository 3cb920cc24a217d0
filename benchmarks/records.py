"""Write benchmark records to results/, with machine, versions and commit; at once or run by run."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from vitascope.inference.hardware import choose_or_check_device
from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import collect_machine_info

Row = dict[str, Any]  # one row of a record, with stored keys
Record = dict[str, Any]  # contents of a record file
ORIGIN_KEYS = ("command", "commit", "date")
UNRECORDED_OPTIONS = ("--out", "--runs", "--commit", "--go-on")


def write_record(record_path: Path, commit: str | None, **content: Any) -> None:
    """Write a record named after its file."""
    make_folder(record_path.parent)
    write_json(record_path, {"name": record_path.stem} | content | collect_machine_info(commit))


def add_run_options(parser: argparse.ArgumentParser, *, runs_folder: str, record_path: Path) -> None:
    """Add the options of all benchmarks that train."""
    parser.add_argument("--tune", action="store_true", help="evaluate on a held-out tenth of the training images")
    parser.add_argument("--compile", default="never")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path(runs_folder))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=record_path)
    parser.add_argument(
        "--go-on",
        type=Path,
        nargs="+",
        default=[],
        help="continue these records of the same settings; their rows are kept",
    )


class GrowingRecord:
    """A record that is written after every row. `args`: the options of `add_run_options`, and `data`."""

    def __init__(self, module: str, args: argparse.Namespace) -> None:
        self.module, self.args = module, args
        earlier_records: list[Record] = [json.loads(path.read_text(encoding="utf-8")) for path in args.go_on]
        self.rows: list[Row] = []
        for row in (row for record in earlier_records for row in record["rows"]):
            if row not in self.rows:
                self.rows.append(row)
        all_origins = [origin for record in earlier_records for origin in _list_origins(record)]
        origins = [origin for index, origin in enumerate(all_origins) if origin not in all_origins[:index]]
        self.origins = {"went_on_from": origins} if origins else {}

    def has_row(self, **row_values: Any) -> bool:
        return any(all(row.get(key) == value for key, value in row_values.items()) for row in self.rows)

    def add_row(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write all rows so far; also called at the end, to merge records without new rows."""
        write_record(
            self.args.out,
            self.args.commit,
            command=format_typed_command(self.module),
            data=self.args.data,
            judged_by="validation" if self.args.tune else "test",
            device=choose_or_check_device(self.args.device),
            **self.origins,
            rows=self.rows,
        )


def _list_origins(record: Record) -> list[Row]:
    """Return the origin of a record's rows: the records it continued, and its own command."""
    earlier = record.get("went_on_from", [])
    return [*([earlier] if isinstance(earlier, dict) else earlier), {k: record.get(k) for k in ORIGIN_KEYS}]


def format_typed_command(module_name: str) -> str:
    """Return the command as typed, without folders of this machine."""
    return f"python -m {module_name} {shlex.join(_remove_unrecorded_options(sys.argv[1:]))}".strip()


def _remove_unrecorded_options(arguments: list[str]) -> list[str]:
    """Return the arguments without folders of this machine and without the commit."""
    recorded, is_unrecorded = [], False
    for argument in arguments:
        is_unrecorded = argument in UNRECORDED_OPTIONS if argument.startswith("--") else is_unrecorded
        if not is_unrecorded:
            recorded.append(argument)
    return recorded
