"""Wall-clock seconds: since the process's start, stored for its first run only, summed in records."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import vitascope
from tests.training.tiny import tiny_run
from vitascope.records.pages import make_model_card_of_record
from vitascope.records.record import evaluate_and_make_record, read_record, write_record_per_machine
from vitascope.records.tables import RESULT_FORMATTERS
from vitascope.run import machine
from vitascope.run.directory import Run

IMPORTED = time.monotonic()
ONE = {"train.epochs": 1, "data.validation": 0}


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not worked on a run yet; an interpreter without a prompt."""
    monkeypatch.setattr(machine, "_started_tasks", [])
    monkeypatch.delattr(sys, "ps1", raising=False)


def last_result(run: Run) -> dict:
    return json.loads(run.get_path("test-openings.jsonl").read_text().splitlines()[-1])


def test_wall_seconds_grow_and_are_no_less_than_the_time_since_this_file_was_imported() -> None:
    first = machine.measure_seconds_since_process_start()
    since = time.monotonic() - IMPORTED
    second = machine.measure_seconds_since_process_start()
    assert first is not None and second is not None
    assert first <= second and second >= since - machine.CLOCK_TOLERANCE_SECONDS


def test_a_process_is_no_older_than_the_call_that_started_it() -> None:
    code = "from vitascope.run import machine; print(machine.measure_seconds_since_process_start())"
    before = time.monotonic()
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < float(output) <= time.monotonic() - before + machine.CLOCK_TOLERANCE_SECONDS


def test_without_proc_psutil_is_asked_and_without_both_or_with_nonsense_nothing_is_known(monkeypatch) -> None:
    monkeypatch.setattr(machine, "_try_to_read_linux_process_seconds", lambda: None)
    process = SimpleNamespace(create_time=lambda: time.time() - 5000)
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=lambda: process))
    assert machine.measure_seconds_since_process_start() == pytest.approx(5000, abs=1)
    monkeypatch.setitem(sys.modules, "psutil", None)  # not installed
    assert machine.measure_seconds_since_process_start() is None
    monkeypatch.setattr(machine, "_try_to_read_linux_process_seconds", lambda: -3.0)
    assert machine.measure_seconds_since_process_start() is None


def test_the_first_run_of_a_process_stores_its_wall_seconds_and_the_second_none(fresh, tmp_path) -> None:
    first, second = (tiny_run(tmp_path, **ONE, **{"train.seed": seed}) for seed in (1, 2))
    stored = first.machine["wall_seconds"]
    assert 0 < stored <= machine.measure_seconds_since_process_start() and "wall_seconds" not in second.machine
    assert first.machine.keys() - second.machine.keys() == {"wall_seconds"}


def test_a_user_who_types_has_no_wall_seconds(fresh, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert "wall_seconds" not in tiny_run(tmp_path, **ONE).machine


def test_a_resumed_run_has_no_wall_seconds(fresh, tmp_path) -> None:
    run = tiny_run(tmp_path, **ONE)
    facts = {key: value for key, value in run.machine.items() if key != "wall_seconds"}
    run.get_path("machine.json").write_text(json.dumps(facts))
    run.get_path("model.safetensors").unlink()
    machine._started_tasks.clear()
    vitascope.resume(run.path, quiet=True)
    assert run.is_finished and "resumed" in run.machine and "wall_seconds" not in run.machine


def test_evaluate_stores_its_wall_seconds_once_and_says_whether_they_include_the_training(fresh, tmp_path) -> None:
    run = tiny_run(tmp_path, **ONE)
    evaluation = vitascope.load(run).evaluate()
    here = last_result(run)
    assert here["wall_includes_training"] and here["wall_seconds"] >= run.machine["wall_seconds"]
    assert evaluation.as_dict()["wall_seconds"] == here["wall_seconds"]
    vitascope.load(run).evaluate()
    assert "wall_seconds" not in last_result(run)
    machine._started_tasks.clear()  # as if in a process of its own
    vitascope.load(run).evaluate()
    assert last_result(run)["wall_includes_training"] is False and last_result(run)["wall_seconds"] > 0


def test_a_record_adds_training_and_evaluation_where_both_are_known_and_tables_show_it_only_then(
    fresh, tmp_path
) -> None:
    run = tiny_run(tmp_path, **ONE)
    machine._started_tasks.clear()
    vitascope.load(run).evaluate()
    record = evaluate_and_make_record([run], "tiny")
    total = run.machine["wall_seconds"] + last_result(run)["wall_seconds"]
    assert record.wall_seconds == pytest.approx([total])
    path = write_record_per_machine(record, tmp_path)
    assert read_record(path) == record
    for page in (
        RESULT_FORMATTERS["table"](tmp_path, []),
        RESULT_FORMATTERS["targets"](tmp_path, ["tiny:90:10:1"]),
        make_model_card_of_record(record, path.name).format_markdown(),
    ):
        head, _, row = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")][:3]
        assert len(row) == len(head) and float(row[head.index("wall clock")]) == pytest.approx(total, abs=0.5)
    assert " s wall clock, " in RESULT_FORMATTERS["sentence"](tmp_path, ["tiny"])
    older = {key: value for key, value in json.loads(path.read_text()).items() if key != "wall_seconds"}
    path.write_text(json.dumps(older))
    assert read_record(path) == replace(record, wall_seconds=None)
    for kind, names in {"table": [], "targets": ["tiny:90:10:1"], "sentence": ["tiny"]}.items():
        assert "wall" not in RESULT_FORMATTERS[kind](tmp_path, names)
    assert "Wall" not in make_model_card_of_record(read_record(path), path.name).format_markdown()


def test_a_record_of_a_run_that_was_trained_and_scored_in_one_process_counts_the_training_once(fresh, tmp_path) -> None:
    run = tiny_run(tmp_path, **ONE)
    record = evaluate_and_make_record([run], "tiny")  # scores it
    assert record.wall_seconds == [last_result(run)["wall_seconds"]]
    facts = {key: value for key, value in run.machine.items() if key != "wall_seconds"}
    run.get_path("machine.json").write_text(json.dumps(facts))
    assert evaluate_and_make_record([run], "tiny").wall_seconds == record.wall_seconds
    lines = run.get_path("test-openings.jsonl").read_text().replace('"wall_includes_training": true', '"x": 0')
    run.get_path("test-openings.jsonl").write_text(lines)
    assert evaluate_and_make_record([run], "tiny").wall_seconds is None  # the training's is not known
