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
from typing import NamedTuple

import torch

from benchmarks.__main__ import RESULTS_FOLDER, choose_guarded_implementation
from benchmarks.race import Implementation, compute_speedup, time_implementations
from benchmarks.records import Record, Row
from benchmarks.trees import export_commit
from vitascope.errors import UserError
from vitascope.run.machine import get_device_names_by_type, get_device_or_cpu_name

MIN_RELATIVE_SPEED = 0.9  # fraction of the recorded ratio; allows for the noise of a short benchmark


class GuardedRow(NamedTuple):
    row: Row
    vitascope: Implementation
    timm: Implementation


def get_record_device(record: Record) -> str:
    """Return the record's device; older records have it only in their command."""
    return record.get("device") or ("cuda" if "--device cuda" in record["command"] else "cpu")


def select_guarded_rows(record: Record) -> list[GuardedRow]:
    """Return the recorded rows to measure again."""
    guarded = []
    for row in record["rows"]:
        vitascope, timm = (
            replace(implementation, precision=record["precision"])
            for implementation in (
                choose_guarded_implementation(row["task"], get_record_device(record)),
                Implementation("timm"),
            )
        )
        if row["who"] == vitascope.name and row["task"] != "latency":
            guarded.append(GuardedRow(row, vitascope, timm))
    return guarded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RESULTS_FOLDER / "bench-cpu.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare with Vitascope's code at that commit instead of the record"
    )
    args = parser.parse_args()
    record = json.loads(args.record.read_text(encoding="utf-8"))
    recorded_machine, this_machine = (
        get_device_or_cpu_name(machine, get_record_device(record))
        for machine in (record["machine"], get_device_names_by_type())
    )
    if recorded_machine != this_machine and not args.against:
        sys.exit(
            f"The record is from {recorded_machine}, this machine is {this_machine}, and ratios differ between "
            "machines. Record this machine (make bench), or compare with an older commit: "
            "python -m benchmarks.guard --against COMMIT."
        )
    slower = []
    with TemporaryDirectory() as folder:
        tree = _export_commit_or_exit(args.against, Path(folder)) if args.against else None
        for row, vitascope, timm in select_guarded_rows(record):
            reference = replace(vitascope, source_tree=tree) if tree else timm
            times = time_implementations(
                row["shape"],
                row["task"],
                [vitascope, reference],
                batch_size=row["batch"],
                num_rounds=args.rounds,
                calls_per_round=record["calls"],
                device=get_record_device(record),
                num_threads=torch.get_num_threads(),
            )
            speedup = compute_speedup(times[reference.name], times[vitascope.name]) or 0.0
            recorded = 1.0 if tree else row["times_timm"]
            description = f"the speed at {args.against}" if tree else f"timm's speed now, {recorded:.2f}× recorded"
            print(f"{row['shape']} {row['task']}: {speedup:.2f}× {description}", flush=True)
            slower += [f"{row['shape']} {row['task']}"] if speedup < MIN_RELATIVE_SPEED * recorded else []
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
