"""`make guard`: today's speed beside timm's against the recorded one; fails where we have become slower.

Ratios from one run can be compared between days, seconds cannot: the machine is shared.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import RESULTS, guarded
from benchmarks.race import Arm, race, ratio

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, default=RESULTS / "bench-cpu.json")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    record = json.loads(asked.record.read_text(encoding="utf-8"))
    slower = []
    for row, arms in watched(record):
        times = race(
            row["shape"],
            row["task"],
            arms,
            batch=row["batch"],
            rounds=asked.rounds,
            calls=record["calls"],
            device=device_of(record),
            threads=torch.get_num_threads(),
        )
        today = ratio(times[arms[1].name], times[arms[0].name]) or 0.0
        print(f"{row['shape']} {row['task']}: {today:.2f}× timm today, {row['times_timm']:.2f}× recorded", flush=True)
        if today < ALLOWED * row["times_timm"]:
            slower.append(f"{row['shape']} {row['task']}")
    if slower:
        sys.exit(f"Slower than recorded: {', '.join(slower)}.")


if __name__ == "__main__":
    main()
