"""`python -m benchmarks.faults`: kill, damage, fill up and fuzz Vitascope, and record what was lost.

Each fault is tried many times with tiny runs; the results are compared with an uninterrupted run bit by bit. Commands
run in forks of a process that has imported PyTorch, a few in new processes. The exit code is 1 if anything was lost,
ended with a traceback or a wrong exit code, or hung.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from benchmarks.__main__ import RESULTS_FOLDER
from benchmarks.faults import damage, fuzzing, kills
from benchmarks.faults.counts import Attack, FaultCounts
from benchmarks.faults.processes import SETTINGS_OF_PROCESS, fork_and_run, preload_modules
from benchmarks.faults.runs import TRAIN
from benchmarks.records import format_typed_command, write_record
from vitascope.run.machine import find_commit_and_mark_changes


class Family(NamedTuple):
    """Faults of one kind: the function, its number of tries, with --quick, and its share of the time."""

    attack: Callable[[Attack], list[FaultCounts]]
    num_tries: int
    num_quick_tries: int
    time_share: float


FAMILIES = (
    Family(fuzzing.fuzz_arguments, 580, 10, 60),
    Family(fuzzing.fuzz_arguments_of_new_processes, 12, 0, 20),
    Family(fuzzing.fuzz_recipes, 400, 10, 50),
    Family(fuzzing.fuzz_images, 300, 10, 45),
    Family(fuzzing.fuzz_weights, 280, 10, 30),
    Family(fuzzing.fuzz_model_config, 280, 10, 27),
    Family(fuzzing.fuzz_checkpoints, 150, 4, 45),
    Family(fuzzing.fuzz_run_files, 150, 10, 40),
    Family(damage.flip_bits_in_checkpoints, 308, 4, 130),
    Family(damage.flip_bits_in_weights, 80, 4, 16),
    Family(damage.fill_disk, 15, 1, 20),
    Family(damage.resume_concurrently, 20, 1, 20),
    Family(damage.make_clock_jump, 4, 0, 20),
    Family(kills.kill_train, 70, 2, 120),
    Family(kills.kill_new_processes, 6, 0, 20),
    Family(kills.kill_study, 14, 0, 55),
    Family(kills.kill_evaluate, 16, 1, 45),
    Family(kills.kill_export, 20, 1, 50),
)
PRELOADED_COMMANDS = (
    TRAIN,
    ("evaluate", "runs/digits", "--split", "val", "--quick"),
    ("export", "folder", "runs/digits", "--out", "model"),
)
LARGE_PRELOADED_COMMANDS = (
    ("export", "torch", "runs/digits", "--out", "model.pt2"),
    ("export", "onnx", "runs/digits", "--out", "model.onnx"),
    kills.STUDY,
)


def attack_all_families(folder: Path, seed: int, end: float, num_jobs: int, *, quick: bool) -> list[FaultCounts]:
    """Try every fault, each in its share of the time that is left."""
    results, shares = [], [family.time_share for family in FAMILIES]
    for index, family in enumerate(FAMILIES):
        num_tries = family.num_quick_tries if quick else -(-family.num_tries // num_jobs)
        if not num_tries:
            continue
        share = shares[index] / sum(shares[index:])
        family_end = time.monotonic() + share * max(0.0, end - time.monotonic())
        name, started = family.attack.__name__, time.monotonic()
        attack = Attack(folder / name, random.Random(f"{seed} {name}"), num_tries, family_end)
        attack.folder.mkdir(parents=True)
        counts = family.attack(attack)
        results += counts
        failures = sum(one.num_failures for one in counts)
        tries = sum(one.tries for one in counts)
        print(f"{name}: {tries} tries, {failures} failures, {time.monotonic() - started:.0f} s", flush=True)
    return results


def attack_in_parallel(folder: Path, seeds: Sequence[int], end: float, *, quick: bool) -> list[FaultCounts]:
    """Attack in one fork for each seed, and add up the counts."""

    def attack_and_write(seed: int) -> None:
        results = attack_all_families(folder / str(seed), seed, end, len(seeds), quick=quick)
        (folder / f"{seed}.json").write_text(json.dumps([counts.as_row() for counts in results]), encoding="utf-8")

    process_ids = [fork_and_run(lambda seed=seed: attack_and_write(seed)) for seed in seeds]
    for process_id in process_ids:
        if os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]):
            raise RuntimeError("an attack failed itself; see above")
    totals: dict[str, FaultCounts] = {}
    for seed in seeds:
        for row in json.loads((folder / f"{seed}.json").read_text(encoding="utf-8")):
            counts = FaultCounts(**row)
            if counts.fault in totals:
                totals[counts.fault].add(counts)
            else:
                totals[counts.fault] = counts
    return list(totals.values())


def print_counts(results: Sequence[FaultCounts]) -> None:
    for counts in results:
        numbers = {name: value for name, value in counts.as_row().items() if isinstance(value, int) and value}
        print(f"{counts.fault}: {counts.skipped or ', '.join(f'{name} {value}' for name, value in numbers.items())}")
        for example in counts.examples:
            print(f"  {example}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=14.0, help="time limit; faults get fewer tries when it is short"
    )
    parser.add_argument("--quick", action="store_true", help="a few tries of most faults (about 20 seconds)")
    parser.add_argument("--jobs", type=int, default=2, help="processes that attack at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER / "faults.json")
    return parser.parse_args()


def main() -> None:
    args = read_options()
    os.environ.update(SETTINGS_OF_PROCESS)
    torch.set_num_threads(1)  # a process with threads of its own must not be forked
    started, commit = time.monotonic(), args.commit or find_commit_and_mark_changes()  # the commit that is attacked
    seeds = [args.seed + job for job in range(1 if args.quick else args.jobs)]
    with TemporaryDirectory(prefix="vitascope-faults-") as folder:
        preload_folder = Path(folder) / "preload"
        preload_folder.mkdir()
        preload_modules([*PRELOADED_COMMANDS, *(() if args.quick else LARGE_PRELOADED_COMMANDS)], preload_folder)
        results = attack_in_parallel(Path(folder), seeds, started + 60 * args.minutes, quick=args.quick)
    print_counts(results)
    rows = [counts.as_row() for counts in results]
    seconds = round(time.monotonic() - started)
    command = format_typed_command("benchmarks.faults")
    write_record(args.out, commit, command=command, random_seeds=seeds, seconds=seconds, rows=rows)
    print(f"Record: {args.out}")
    sys.exit(any(counts.num_failures for counts in results))


if __name__ == "__main__":
    main()
