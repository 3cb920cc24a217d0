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

from benchmarks.__main__ import RESULTS, guarded
from benchmarks.race import Arm, race, ratio
from benchmarks.trees import export_commit
from vitascope.errors import UserError
from vitascope.run.machine import device_names, machine_name

ALLOWED = 0.9  # fraction of the recorded ratio; allows for the noise of a short benchmark


def device_of(record: dict[str, Any]) -> str:
    """The record's device; older records have it only in their command."""
    return record.get("device") or ("cuda" if "--device cuda" in record["command"] else "cpu")


def watched(record: dict[str, Any]) -> list[tuple[dict[str, Any], list[Arm]]]:
    """The recorded rows to measure again, each with our arm and timm's."""
    found = []
    for row in record["rows"]:
        arms = [
            replace(a, precision=record["precision"]) for a in (guarded(row["task"], device_of(record)), Arm("timm"))
        ]
        if row["who"] == arms[0].name and row["task"] != "latency":
            found.append((row, arms))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RESULTS / "bench-cpu.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare with our code at that commit instead of the record"
    )
    asked = parser.parse_args()
    record = json.loads(asked.record.read_text(encoding="utf-8"))
    there, here = (machine_name(machine, device_of(record)) for machine in (record["machine"], device_names()))
    if there != here and not asked.against:
        sys.exit(
            f"The record is from {there}, this machine is {here}, and ratios differ between machines. Record this "
            "machine (make bench), or compare with an older commit: python -m benchmarks.guard --against COMMIT."
        )
    slower = []
    with TemporaryDirectory() as folder:
        tree = _checkout(asked.against, Path(folder)) if asked.against else None
        for row, arms in watched(record):
            other = replace(arms[0], tree=tree) if tree else arms[1]
            times = race(
                row["shape"],
                row["task"],
                [arms[0], other],
                batch=row["batch"],
                rounds=asked.rounds,
                calls=record["calls"],
                device=device_of(record),
                threads=torch.get_num_threads(),
            )
            today, wanted = ratio(times[other.name], times[arms[0].name]) or 0.0, 1.0 if tree else row["times_timm"]
            words = f"the speed at {asked.against}" if tree else f"timm's speed now, {wanted:.2f}× recorded"
            print(f"{row['shape']} {row['task']}: {today:.2f}× {words}", flush=True)
            slower += [f"{row['shape']} {row['task']}"] if today < ALLOWED * wanted else []
    if slower:
        sys.exit(f"Slower than before: {', '.join(slower)}.")


def _checkout(commit: str, folder: Path) -> Path:
    """Export that commit's files; an unknown commit ends the program with a message."""
    try:
        return export_commit(commit, folder)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
