"""`make guard`: today's speed beside timm's against the recorded one; fails where we have become slower.

Ratios from one run can be compared between days, seconds cannot: the machine is shared.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.__main__ import RESULTS, guarded
from benchmarks.race import Arm, race, ratio

ALLOWED = 0.9  # of the recorded ratio: the noise of a short race


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, default=RESULTS / "bench-cpu.json")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    record = json.loads(asked.record.read_text(encoding="utf-8"))
    device, precision = record["device"], record["precision"]
    slower = []
    for row in record["rows"]:
        arms = [replace(arm, precision=precision) for arm in (guarded(row["task"], device), Arm("timm"))]
        if row["who"] != arms[0].name or row["task"] == "latency":
            continue
        times = race(
            row["shape"],
            row["task"],
            arms,
            batch=row["batch"],
            rounds=asked.rounds,
            calls=record["calls"],
            device=device,
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
