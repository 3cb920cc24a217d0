"""`make guard`: compare the current speed relative to timm with the recorded one; fail if it is slower.

On a shared machine, ratios from one run can be compared between days; seconds cannot. On another machine than the
record's, `--against COMMIT` compares the current code with that commit's, in alternating turns.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.__main__ import RESULTS_FOLDER, choose_guarded_implementation
from benchmarks.race import Implementation, compute_speedup, time_implementations
from benchmarks.trees import export_commit
from vitascope.errors import UserError
from vitascope.run.machine import get_device_names, get_machine_name

MIN_RELATIVE_SPEED = 0.9  # fraction of the recorded ratio; allows for the noise of a short benchmark


def get_record_device(record: dict[str, Any]) -> str:
    """The record's device; older records have it only in their command."""
    return record.get("device") or ("cuda" if "--device cuda" in record["command"] else "cpu")


def select_guarded_rows(record: dict[str, Any]) -> list[tuple[dict[str, Any], list[Implementation]]]:
    """The recorded rows to measure again, each with our arm and timm's."""
    found = []
    for row in record["rows"]:
        arms = [
            replace(a, precision=record["precision"])
            for a in (choose_guarded_implementation(row["task"], get_record_device(record)), Implementation("timm"))
        ]
        if row["who"] == arms[0].name and row["task"] != "latency":
            found.append((row, arms))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RESULTS_FOLDER / "bench-cpu.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare with our code at that commit instead of the record"
    )
    asked = parser.parse_args()
    record = json.loads(asked.record.read_text(encoding="utf-8"))
    there, here = (
        get_machine_name(machine, get_record_device(record)) for machine in (record["machine"], get_device_names())
    )
    if there != here and not asked.against:
        sys.exit(
            f"The record is from {there}, this machine is {here}, and ratios differ between machines. Record this "
            "machine (make bench), or compare with an older commit: python -m benchmarks.guard --against COMMIT."
        )
    slower = []
    with TemporaryDirectory() as folder:
        tree = _export_commit_or_exit(asked.against, Path(folder)) if asked.against else None
        for row, arms in select_guarded_rows(record):
            other = replace(arms[0], source_tree=tree) if tree else arms[1]
            times = time_implementations(
                row["shape"],
                row["task"],
                [arms[0], other],
                batch_size=row["batch"],
                num_rounds=asked.rounds,
                calls_per_round=record["calls"],
                device=get_record_device(record),
                num_threads=torch.get_num_threads(),
            )
            today, wanted = (
                compute_speedup(times[other.name], times[arms[0].name]) or 0.0,
                1.0 if tree else row["times_timm"],
            )
            words = f"the speed at {asked.against}" if tree else f"timm's speed now, {wanted:.2f}× recorded"
            print(f"{row['shape']} {row['task']}: {today:.2f}× {words}", flush=True)
            slower += [f"{row['shape']} {row['task']}"] if today < MIN_RELATIVE_SPEED * wanted else []
    if slower:
        sys.exit(f"Slower than before: {', '.join(slower)}.")


def _export_commit_or_exit(commit: str, folder: Path) -> Path:
    """Export that commit's files; an unknown commit ends the program with a message."""
    try:
        return export_commit(commit, folder)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
