"""`make guard`: today's speed beside timm's against the recorded one; fails where we have become slower.

Ratios from one run can be compared between days on one machine; seconds cannot, because it is shared. On another
machine than the record's, `--against COMMIT` races today's code with that commit's, in turns.
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

ALLOWED = 0.9  # of the recorded ratio: the noise of a short race


def device_of(record: dict[str, Any]) -> str:
    """Older records say it only in their command."""
    return record.get("device") or ("cuda" if "--device cuda" in record["command"] else "cpu")


def watched(record: dict[str, Any]) -> list[tuple[dict[str, Any], list[Arm]]]:
    """The recorded rows that are run again, ours, each with its two contenders."""
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
        "--against", metavar="COMMIT", help="race ours of that commit instead of reading what was timed"
    )
    asked = parser.parse_args()
    record = json.loads(asked.record.read_text(encoding="utf-8"))
    there, here = (machine_name(machine, device_of(record)) for machine in (record["machine"], device_names()))
    if there != here and not asked.against:
        sys.exit(
            f"The record is of {there}, this is {here}: ratios differ between machines. Record this one (make bench), "
            "or race an older commit here: python -m benchmarks.guard --against COMMIT."
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
            words = f"as fast as at {asked.against}" if tree else f"timm today, {wanted:.2f}× recorded"
            print(f"{row['shape']} {row['task']}: {today:.2f}× {words}", flush=True)
            slower += [f"{row['shape']} {row['task']}"] if today < ALLOWED * wanted else []
    if slower:
        sys.exit(f"Slower than before: {', '.join(slower)}.")


def _checkout(commit: str, folder: Path) -> Path:
    """Export that commit's files; a wrong commit ends the program with a sentence."""
    try:
        return export_commit(commit, folder)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
