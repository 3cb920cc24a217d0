"""Write benchmark records to results/, with machine, versions and commit; at once or run by run."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import collect_machine_info
from vitascope.training.hardware import choose_device

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
    """A record that is written after every row. `asked` has the options of `add_run_options`, and `data`."""

    def __init__(self, module: str, args: argparse.Namespace) -> None:
        self.module, self.args = module, args
        known = [json.loads(place.read_text(encoding="utf-8")) for place in args.go_on]
        self.rows: list[dict[str, Any]] = []
        for row in (row for record in known for row in record["rows"]):
            if row not in self.rows:
                self.rows.append(row)
        every = [earlier for record in known for earlier in _list_origins(record)]
        before = [earlier for place, earlier in enumerate(every) if earlier not in every[:place]]
        self.origins = {"went_on_from": before} if before else {}

    def has_row(self, **row_values: Any) -> bool:
        return any(all(row.get(key) == value for key, value in row_values.items()) for row in self.rows)

    def add_row(self, row: dict[str, Any]) -> None:
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
            device=choose_device(self.args.device),
            **self.origins,
            rows=self.rows,
        )


def _list_origins(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The origin of a record's rows: the records it continued, and its own command."""
    earlier = record.get("went_on_from", [])
    return [*([earlier] if isinstance(earlier, dict) else earlier), {k: record.get(k) for k in ORIGIN_KEYS}]


def format_typed_command(module_name: str) -> str:
    """The command as typed, without folders of this machine."""
    return f"python -m {module_name} {shlex.join(_remove_unrecorded_options(sys.argv[1:]))}".strip()


def _remove_unrecorded_options(arguments: list[str]) -> list[str]:
    """The arguments without folders of this machine and without the commit."""
    kept, hiding = [], False
    for word in arguments:
        hiding = word in UNRECORDED_OPTIONS if word.startswith("--") else hiding
        if not hiding:
            kept.append(word)
    return kept
