"""The attack by command: it counts what it says, and a few tries of most faults lose nothing."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults import processes
from benchmarks.faults.counts import Attack, FaultCounts, classify_outcome
from benchmarks.faults.inputs import mutate_bytes, mutate_json_text, mutate_yaml
from benchmarks.faults.processes import Outcome, StartedCommand
from benchmarks.faults.runs import is_same_result, remove_times

TRACEBACK = "Traceback (most recent call last):\n  …\nValueError: x"


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome(0, "", "", hung=False), "completed"),
        (Outcome(2, "", "Note: a\nvitascope: There is no b.\n", hung=False), "refused"),
        (Outcome(2, "Usage: vitascope runs", "", hung=False), "refused"),
        (Outcome(2, "", "", hung=False), "wrong_exit_codes"),
        (Outcome(1, "", "vitascope: There is no b.\n", hung=False), "wrong_exit_codes"),
        (Outcome(-11, "", "", hung=False), "wrong_exit_codes"),
        (Outcome(1, "", TRACEBACK, hung=False), "tracebacks"),
        (Outcome(0, TRACEBACK, "", hung=False), "tracebacks"),
        (Outcome(-9, "", "", hung=True), "hangs"),
    ],
)
def test_only_a_result_and_a_sentence_with_code_2_are_good_ends(outcome: Outcome, kind: str) -> None:
    counts = FaultCounts("a fault", "")
    assert classify_outcome(outcome) == counts.count_outcome(outcome, "") == kind
    assert counts.tries == getattr(counts, kind) == 1
    assert counts.num_failures == len(counts.examples) == (kind not in ("completed", "refused"))


def test_another_result_is_lost_and_counts_are_added_up() -> None:
    counts, other = FaultCounts("a fault", ""), FaultCounts("a fault", "")
    counts.count_recovery(False, "differs")
    other.count_recovery(True, "")
    counts.add(other)
    assert (counts.tries, counts.recovered, counts.lost, counts.examples) == (2, 1, 1, ["lost: differs"])


def test_results_are_compared_without_times_and_a_missing_file_is_another_result() -> None:
    row = {"loss": 1.5, "seconds": 2, "cells": [{"train_seconds": 3, "accuracy": 0.5}]}
    assert remove_times(row) == {"loss": 1.5, "cells": [{"accuracy": 0.5}]}
    assert not is_same_result(lambda: Path("missing").read_text(), "")


def test_a_command_that_waits_for_ever_is_a_hang(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(processes, "WALL_SECONDS", 0)
    for name in ("out", "err"):
        (tmp_path / name).touch()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert StartedCommand(process.pid, tmp_path).wait().hung
    process.returncode = 0
    process.communicate()


def test_a_seed_gives_the_same_wrong_inputs() -> None:
    def make_inputs() -> list[bytes]:
        rng = random.Random(7)
        value, text = {"a": [1, {"b": 2}], "c": "d"}, "model:\n  depth: 2\ntrain:\n  lr: 0.1\n"
        made = [
            (mutate_bytes(rng, b"abcdef" * 9), mutate_json_text(rng, value), mutate_yaml(rng, text)) for _ in range(50)
        ]
        return [content for contents in made for content in contents]

    inputs = make_inputs()
    assert inputs == make_inputs() and len(set(inputs)) > 100


def test_the_time_limits_the_tries_but_the_first(tmp_path) -> None:
    assert len(list(Attack(tmp_path / "late", random.Random(0), 9, time.monotonic()).list_tries())) == 1
    assert len(list(Attack(tmp_path / "early", random.Random(0), 9, time.monotonic() + 1e6).list_tries())) == 9


@pytest.mark.slow
def test_a_few_tries_of_most_faults_lose_nothing(tmp_path) -> None:
    record = tmp_path / "faults.json"
    command = [sys.executable, "-m", "benchmarks.faults", "--quick", "--out", str(record)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert len(rows) > 10 and all(row["tries"] or row["skipped"] for row in rows)
    assert not any(row["lost"] + row["tracebacks"] + row["hangs"] + row["wrong_exit_codes"] for row in rows)
