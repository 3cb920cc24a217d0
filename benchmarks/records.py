"""Write benchmark records to results/, with machine, versions and commit; at once or run by run."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from vitascope.run.files import make_folder, write_json
from vitascope.run.machine import record_of_machine
from vitascope.training.hardware import choose_device

FROM = ("command", "commit", "date")
HIDDEN = ("--out", "--runs", "--commit", "--go-on")


def write_record(out: Path, commit: str | None, **said: Any) -> None:
    """Write a record named after its file."""
    make_folder(out.parent)
    write_json(out, {"name": out.stem} | said | record_of_machine(commit))


def add_run_options(parser: argparse.ArgumentParser, *, runs: str, out: Path) -> None:
    """Add the options of all benchmarks that train."""
    parser.add_argument("--tune", action="store_true", help="evaluate on a held-out tenth of the training images")
    parser.add_argument("--compile", default="never")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=Path, default=Path(runs))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument(
        "--go-on",
        type=Path,
        nargs="+",
        default=[],
        help="continue these records of the same settings; their rows are kept",
    )


class GrowingRecord:
    """A record that is written after every row. `asked` has the options of `add_run_options`, and `data`."""

    def __init__(self, module: str, asked: argparse.Namespace) -> None:
        self.module, self.asked = module, asked
        known = [json.loads(place.read_text(encoding="utf-8")) for place in asked.go_on]
        self.rows: list[dict[str, Any]] = []
        for row in (row for record in known for row in record["rows"]):
            if row not in self.rows:
                self.rows.append(row)
        every = [earlier for record in known for earlier in _went_before(record)]
        before = [earlier for place, earlier in enumerate(every) if earlier not in every[:place]]
        self.told = {"went_on_from": before} if before else {}

    def has(self, **what: Any) -> bool:
        return any(all(row.get(key) == value for key, value in what.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write all rows so far; also called at the end, to merge records without new rows."""
        write_record(
            self.asked.out,
            self.asked.commit,
            command=typed_command(self.module),
            data=self.asked.data,
            judged_by="validation" if self.asked.tune else "test",
            device=choose_device(self.asked.device),
            **self.told,
            rows=self.rows,
        )


def _went_before(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The origin of a record's rows: the records it continued, and its own command."""
    earlier = record.get("went_on_from", [])
    return [*([earlier] if isinstance(earlier, dict) else earlier), {k: record.get(k) for k in FROM}]


def typed_command(module: str) -> str:
    """The command as typed, without folders of this machine."""
    return f"python -m {module} {shlex.join(_without_places(sys.argv[1:]))}".strip()


def _without_places(words: list[str]) -> list[str]:
    """The arguments without folders of this machine and without the commit."""
    kept, hiding = [], False
    for word in words:
        hiding = word in HIDDEN if word.startswith("--") else hiding
        if not hiding:
            kept.append(word)
    return kept
