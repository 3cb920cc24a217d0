"""Studies: combinations are checked first, no run is repeated or lost, no trial is taken twice, intervals hold."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from optuna.samplers import TPESampler

import vitascope
from tests.training.killing import kill_after_epoch
from vitascope import UserError
from vitascope.draw.study import ParetoPoint, draw_pareto_fronts
from vitascope.records.ablation import compute_ci_half_width
from vitascope.study import workers
from vitascope.study.design import Range, parse_and_check_design, split_at_outer_commas
from vitascope.study.queue import TrialQueue
from vitascope.study.report import (
    build_results_table,
    draw_study_curves,
    draw_study_figures,
    format_notes,
    write_html_markdown_and_json_report,
)
from vitascope.study.results import StudyResults, collect_results
from vitascope.study.storage import hide_password, make_sqlite_storage_url
from vitascope.study.workers import run_trials
from vitascope.training.engines.batched import BatchedTraining

QUICK = ["train.epochs=1", "train.device=cpu", "train.precision=float32", "model.depth=1"]


def test_overrides_become_combinations_with_the_last_setting_changing_fastest() -> None:
    design = parse_and_check_design("digits", ["model.depth=1,2", "train.epochs=3", "model.embed_dim=16,32"], 2)
    assert [tuple(cell.values()) for cell in design.combinations] == [
        ("1", "16"),
        ("1", "32"),
        ("2", "16"),
        ("2", "32"),
    ]
    assert design.fixed_overrides == ("train.epochs=3",) and design.seeds == (1, 2)
    recipe = design.build_recipe(design.combinations[1], 7)
    assert (recipe.model.depth, recipe.model.embed_dim, recipe.train.epochs, recipe.train.seed) == (1, 32, 3, 7)
    assert split_at_outer_commas("[0.9,0.95],[0.9,0.99]") == ["[0.9,0.95]", "[0.9,0.99]"]


def test_ranges_are_integer_or_real_and_logarithmic_if_far_apart() -> None:
    design = parse_and_check_design(
        "digits", ["train.lr=1e-4..1e-2", "model.depth=1..4", "data.augment.shift=0..2"], 1, num_search_trials=5
    )
    assert (
        design.ranges_by_setting["train.lr"] == Range(1e-4, 1e-2, is_integer=False)
        and design.ranges_by_setting["train.lr"].is_log_scale
    )
    assert (
        design.ranges_by_setting["model.depth"].is_integer and not design.ranges_by_setting["model.depth"].is_log_scale
    )
    assert not design.ranges_by_setting["data.augment.shift"].is_log_scale


REFUSED = {
    ("model.depht=1,2",): "Did you mean",
    (
        "model.embed_dim=32,33",
        "model.num_heads=4",
    ): "The combination model.embed_dim=33 is not possible: model.num_heads=4 does not",
    ("model.patch_size=2,3",): "The combination model.patch_size=3 is not possible",
    ("train.epochs=3",): "Nothing is varied",
    ("model.depth=1,1",): "has the value 1 twice",
    ("train.lr=1e-3,0.001",): "has the value 1e-3 twice",
    ("model.depth=1,,2",): "has an empty value",
    ("model.depth=1,2", "model.depth=3,4"): "is varied twice",
    ("train.seed=1,2",): "--seeds sets train.seed",
    ("model.depth=3", "model.depth=2,4"): "model.depth is both fixed and varied",
    ("model.depth=2,4", "model.depth=3"): "model.depth is varied twice",
    ("train.lr=1e-4..1e-2",): "is a range, which needs a search",
    ("train.lr=1..0.1",): "is not a range. The first number must be smaller",
    ("model.depth=1,2", "data.validation=0"): "compares validation accuracy, but data.validation=0",
    ("depth",): "is not a setting",
    ("train.epochs", "3,4"): "Write train.epochs=3,4, without spaces.",
    ("train.lr=a..b",): "train.lr=a..b is not a range. Write two numbers: low..high",
    ("data.name=digits,nope",): "data.name=nope is not possible: There is no data set and no folder named 'nope' in ",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_an_impossible_design_is_rejected_before_training(words) -> None:
    with pytest.raises(UserError) as error:
        parse_and_check_design("digits", list(words), 2)
    assert REFUSED[words] in str(error.value)


def test_a_storage_that_cannot_be_reached_is_named_without_its_password(tmp_path) -> None:
    design = parse_and_check_design("digits", ["model.depth=1,2"], 1)
    with pytest.raises(UserError, match="The storage sqlite:////nowhere"):
        TrialQueue(design, "sqlite:////nowhere/at/all/study.db", "x")
    with pytest.raises(UserError) as error:
        TrialQueue(design, f"postgresql://me:secret@127.0.0.1:{_free_port()}/db", "x")
    assert "me:…@127.0.0.1" in str(error.value) and "secret" not in str(error.value).split("cannot be reached")[0]
    assert hide_password("sqlite:///x.db") == "sqlite:///x.db" and "secret" not in hide_password(
        "postgresql:me:secret@h/db"
    )
    with pytest.raises(UserError, match="cannot hold a database"):
        make_sqlite_storage_url(tmp_path / "a?b")


def run_study_trials(tmp_path: Path, words: list[str], seeds: int, **more):
    design = parse_and_check_design("digits", [*QUICK, *words], seeds, **more)
    queue = TrialQueue(design, make_sqlite_storage_url(tmp_path), "study")
    return queue, list(run_trials(queue, tmp_path))


def test_every_combination_and_seed_is_run_once_and_the_same_command_repeats_nothing(tmp_path) -> None:
    queue, outcomes = run_study_trials(tmp_path, ["model.embed_dim=16,32"], 2)
    assert sorted((one.settings["model.embed_dim"], *one.seeds) for one in outcomes) == [
        ("16", 1), ("16", 2), ("32", 1), ("32", 2),
    ]  # fmt: skip
    runs = list((tmp_path / "runs" / "digits").iterdir())
    assert len(runs) == 4
    _, again = run_study_trials(tmp_path, ["model.embed_dim=16,32"], 2)
    assert again == [] and len(list((tmp_path / "runs" / "digits").iterdir())) == 4
    queue, more = run_study_trials(tmp_path, ["model.embed_dim=16,32"], 3)  # a study grows: only the new seed is run
    assert sorted(one.seeds[0] for one in more) == [3, 3]
    results = collect_results(queue.design, queue.trials)
    assert [len(cell.results) for cell in results.combinations] == [3, 3] and results.num_unfinished == 0
    recorded = {json.loads((run / "metrics.jsonl").read_text())["val_accuracy"] for run in runs}
    assert {results.combinations[0].results[1]["accuracy"], results.combinations[1].results[2]["accuracy"]} <= recorded


def test_a_study_can_become_smaller_and_overrides_may_change_their_order(tmp_path) -> None:
    large = parse_and_check_design("digits", [*QUICK, "model.embed_dim=16,32", "model.num_heads=1,2"], 2)
    TrialQueue(large, make_sqlite_storage_url(tmp_path), "study")
    small = parse_and_check_design("digits", [*QUICK, "model.num_heads=1,2", "model.embed_dim=16"], 1)
    with pytest.raises(UserError, match=r"varied was model.embed_dim, model.num_heads, now model.num_heads"):
        TrialQueue(small, make_sqlite_storage_url(tmp_path), "study")
    fewer = parse_and_check_design("digits", [*QUICK, "model.num_heads=1,2", "model.embed_dim=32,16"], 1)
    queue = TrialQueue(fewer, make_sqlite_storage_url(tmp_path), "study")
    assert len(queue.trials) == 4
    trial = queue.take_next_trial()
    assert trial.seeds == [1]
    queue.mark_trial_finished(trial, 0.5)
    assert len(TrialQueue(large, make_sqlite_storage_url(tmp_path), "study").trials) == 8


def test_a_smaller_study_beside_a_larger_one_takes_and_drops_nothing_of_it(tmp_path) -> None:
    """Two workers, one told to run one seed, the other three; a trial that is put back is the last to wait."""
    large, small = (parse_and_check_design("digits", [*QUICK, "model.embed_dim=16,32"], seeds) for seeds in (3, 1))
    one = TrialQueue(large, make_sqlite_storage_url(tmp_path), "study")
    one.requeue_unfinished_trial(one.take_next_trial())
    other = TrialQueue(small, make_sqlite_storage_url(tmp_path), "study")
    taken = [other.take_next_trial() for _ in range(3)]
    assert [trial and trial.seeds for trial in taken] == [[1], [1], None]
    assert len(one.trials) == 6 and one.num_waiting == 4


def test_a_requeued_trial_of_a_search_keeps_its_suggested_settings(tmp_path) -> None:
    """So that the sampler learns from it."""
    design = parse_and_check_design(
        "digits", [*QUICK, "train.lr=1e-4..1e-2", "model.embed_dim=16,32"], 1, num_search_trials=2
    )
    queue = TrialQueue(design, make_sqlite_storage_url(tmp_path), "search")
    first = queue.take_next_trial()
    queue.requeue_unfinished_trial(first)
    again = [queue.take_next_trial() for _ in range(2)][-1]
    queue.mark_trial_finished(again, 0.5)
    assert again.settings == first.settings
    assert queue.optuna_study.get_trials()[again.optuna_trial.number].params == first.optuna_trial.params != {}


def test_an_interruption_while_a_batch_is_reported_loses_no_result(tmp_path, monkeypatch) -> None:
    design = parse_and_check_design("digits", [*QUICK, "model.drop_path_rate=0", "train.lr=1e-3,2e-3,4e-3"], 1)
    queue = TrialQueue(design, make_sqlite_storage_url(tmp_path), "study")
    assert next(run_trials(queue, tmp_path, max_runs_per_batch=3)).accuracy  # and nobody asks for the others
    assert [trial.state.name for trial in queue.trials] == ["COMPLETE"] * 3
    assert all(trial.user_attrs["results"]["1"]["together"] == 3 for trial in queue.trials)


def test_a_result_that_the_storage_rejects_is_reported_and_the_others_are_stored(tmp_path, monkeypatch) -> None:
    design = parse_and_check_design("digits", [*QUICK, "model.drop_path_rate=0", "train.lr=1e-3,2e-3,4e-3"], 1)
    queue, real = TrialQueue(design, make_sqlite_storage_url(tmp_path), "study"), TrialQueue.mark_trial_finished

    def finish(self, trial, value):
        if trial.settings["train.lr"] == "2e-3":
            raise OSError("the server is away")
        real(self, trial, value)

    monkeypatch.setattr(TrialQueue, "mark_trial_finished", finish)
    outcomes = list(run_trials(queue, tmp_path, max_runs_per_batch=3))
    assert [one.failure_reason for one in outcomes] == [None, "OSError: the server is away", None]


def test_an_abandoned_trial_is_taken_again_and_a_living_one_is_not() -> None:
    from datetime import datetime, timedelta

    from vitascope.study.queue import _is_abandoned

    here, now, old = socket.gethostname(), time.time(), time.time() - 4000
    assert not _is_abandoned({"worker": [here, os.getpid()], "alive": now}, None)
    assert _is_abandoned({"worker": [here, os.getpid()], "alive": old}, None)  # another process of the same number
    assert _is_abandoned({"worker": [here, 2**22 + 7], "alive": now}, None)
    assert _is_abandoned({"worker": ["elsewhere", 5], "alive": old}, None)
    assert not _is_abandoned({"worker": ["elsewhere", 5], "alive": now}, None)
    assert _is_abandoned({}, datetime.now() - timedelta(hours=1)) and not _is_abandoned({}, datetime.now())


def test_another_study_of_the_same_name_is_rejected_with_the_differences(tmp_path) -> None:
    first = ["model.depth=1,2", "train.epochs=3"]
    TrialQueue(parse_and_check_design("digits", first, 1), make_sqlite_storage_url(tmp_path), "study")
    with pytest.raises(UserError, match=r"with other settings: train.epochs was 3, now 5. Choose another name"):
        TrialQueue(
            parse_and_check_design("digits", [*first[:1], "train.epochs=5"], 1),
            make_sqlite_storage_url(tmp_path),
            "study",
        )
    with pytest.raises(UserError, match=r"varied was model.depth, now model.embed_dim"):
        TrialQueue(
            parse_and_check_design("digits", ["model.embed_dim=16,32", *first[1:]], 1),
            make_sqlite_storage_url(tmp_path),
            "study",
        )
    with pytest.raises(UserError, match="--split was val, now test"):
        TrialQueue(
            parse_and_check_design("digits", first, 1, eval_split="test"), make_sqlite_storage_url(tmp_path), "study"
        )
    TrialQueue(
        parse_and_check_design("digits", ["train.lr=1e-4..1e-2"], 2, num_search_trials=3),
        make_sqlite_storage_url(tmp_path),
        "search",
    )
    with pytest.raises(UserError, match=r"train.lr was 0\.0001\.\.0\.01, now 0\.001\.\.0\.01"):
        TrialQueue(
            parse_and_check_design("digits", ["train.lr=1e-3..1e-2"], 2, num_search_trials=3),
            make_sqlite_storage_url(tmp_path),
            "search",
        )
    with pytest.raises(UserError, match="and 8 more"):  # another recipe
        TrialQueue(parse_and_check_design("mnist", ["model.depth=1,2"], 1), make_sqlite_storage_url(tmp_path), "study")
    with pytest.raises(UserError, match="seeds was 2, now 3"):  # more seeds would not be run
        TrialQueue(
            parse_and_check_design("digits", ["train.lr=1e-4..1e-2"], 3, num_search_trials=3),
            make_sqlite_storage_url(tmp_path),
            "search",
        )


def test_a_failed_run_is_reported_and_the_others_go_on_and_retry_tries_again(tmp_path, monkeypatch) -> None:
    from vitascope.study import workers

    real = workers.train_recipe

    def failing(recipe, *rest):
        if recipe.model.embed_dim == 32:
            raise RuntimeError("the disk is full\nand more")
        return real(recipe, *rest)

    monkeypatch.setattr(workers, "train_recipe", failing)
    queue, outcomes = run_study_trials(tmp_path, ["model.embed_dim=16,32,48"], 1)
    assert [one.failure_reason for one in outcomes] == [None, "RuntimeError: the disk is full", None]
    results = collect_results(queue.design, queue.trials)
    assert len(results.combinations) == 2 and results.failed_trials == [
        ("model.embed_dim=32, seed 1", "RuntimeError: the disk is full")
    ]
    monkeypatch.setattr(workers, "train_recipe", real)
    assert run_study_trials(tmp_path, ["model.embed_dim=16,32,48"], 1)[1] == []  # not by itself
    assert queue.requeue_failed_trials() == 1
    assert [one.settings["model.embed_dim"] for one in run_trials(queue, tmp_path)] == ["32"]
    assert (
        collect_results(queue.design, queue.trials).failed_trials == []
        and len(collect_results(queue.design, queue.trials).combinations) == 3
    )


def test_a_killed_study_goes_on_without_repeating_or_losing_a_run(tmp_path, vitascope) -> None:
    """SIGKILL in the second run, after its third epoch: the first is kept, the second goes on from its second epoch."""
    words = ["train.epochs=5", "train.device=cpu", "train.save_seconds=0", "model.depth=1,2", "--seeds", "1"]
    command = ["study", "digits", *words, "--out", str(tmp_path)]
    kill_after_epoch(3, *command, when="state.recipe.model.depth == 2")
    folder = tmp_path / "digits-depth"
    before = _runs(folder)
    assert len(before) == 2 and (before[0] / "model.safetensors").exists()
    assert not (before[1] / "model.safetensors").exists() and _epochs(before[1]) == 3
    first = (before[0] / "metrics.jsonl").read_text()
    done = vitascope(*command)
    assert done.code == 0, done.err
    assert _runs(folder) == before and (before[0] / "metrics.jsonl").read_text() == first
    assert _epochs(before[1]) == 5 and "resumed" in (before[1] / "machine.json").read_text()
    assert any(f"2 runs (2 combinations × 1 seed), {left} to do" in done.out for left in (0, 1))
    contents = json.loads((folder / "answer.json").read_text())
    assert len(contents["cells"]) == 2 and contents["waiting"] == 0 and contents["failed"] == []


def _runs(folder: Path) -> list[Path]:
    return sorted((folder / "runs" / "digits").glob("*"))


def _epochs(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def _postgres() -> tuple[str, str] | None:
    """initdb and pg_ctl, on the path or where Debian puts them."""
    places = [None, *(str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    for place in places:
        programs = shutil.which("initdb", path=place), shutil.which("pg_ctl", path=place)
        if all(programs):
            return programs
    return None


@pytest.fixture
def database(tmp_path):
    """A real PostgreSQL server of its own. It refuses to run as root, so root starts it as another user."""
    programs = _postgres()
    if programs is None:
        pytest.skip("there is no PostgreSQL on this machine")
    pytest.importorskip("psycopg")
    place, port, user = Path("/tmp") / f"vitascope-pg-{os.getpid()}", _free_port(), []
    if os.getuid() == 0:
        if shutil.which("runuser") is None or subprocess.run(["id", "nobody"], capture_output=True).returncode:
            pytest.skip("PostgreSQL does not run as root, and there is no other user")
        user = ["runuser", "-u", "nobody", "--"]
    place.mkdir()
    try:
        if user:
            shutil.chown(place, "nobody")
        base = {"check": True, "capture_output": True, "cwd": "/"}
        subprocess.run([*user, programs[0], "-D", place / "db", "-U", "me", "-A", "trust"], **base)
        options = f"-p {port} -k {place} -c listen_addresses=127.0.0.1 -c fsync=off"
        subprocess.run(
            [*user, programs[1], "-D", place / "db", "-o", options, "-l", place / "log", "-w", "start"], **base
        )
        try:
            yield f"postgresql://me@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*user, programs[1], "-D", place / "db", "-m", "immediate", "stop"], **base)
    finally:
        shutil.rmtree(place, ignore_errors=True)


WORKER = """
import os, sys, time
from pathlib import Path
from vitascope.study import workers
from vitascope.study.design import parse_and_check_design
from vitascope.study.queue import TrialQueue

ready = Path(sys.argv[2])

def wait_for_both(name):  # however long each takes
    (ready / f"{name}-{os.getpid()}").touch()
    while len(list(ready.glob(f"{name}-*"))) < 2:
        time.sleep(0.01)

def measured(queue, trial, folder):
    wait_for_both("took-a-trial")
    time.sleep(0.01)
    trial.set_attribute("results", {str(trial.seeds[0]): {"accuracy": 0.5}})
    return 0.5

workers._train_seeds_store_results_and_get_mean_accuracy = measured
design = parse_and_check_design("digits", ["model.embed_dim=16,32", "model.depth=1,2"], 6)
queue = TrialQueue(design, sys.argv[1], "shared")
wait_for_both("started")
for outcome in workers.run_trials(queue, Path(".")):
    print(outcome.trial_number, sorted(outcome.settings.items()), outcome.seeds, flush=True)
"""


@pytest.mark.slow
def test_two_workers_on_one_postgresql_study_never_run_the_same_trial_twice(database, tmp_path) -> None:
    check_two_workers(database, tmp_path)


def test_two_workers_on_one_file_never_run_the_same_trial_twice(tmp_path) -> None:
    check_two_workers(make_sqlite_storage_url(tmp_path), tmp_path)


def test_on_one_file_a_worker_waits_while_another_takes_a_trial(tmp_path) -> None:
    """SQLite by itself would give both the same trial."""
    from filelock import FileLock

    queue = TrialQueue(
        parse_and_check_design("digits", [*QUICK, "model.embed_dim=16,32"], 1),
        make_sqlite_storage_url(tmp_path),
        "study",
    )
    with ThreadPoolExecutor(1) as pool:
        with FileLock(tmp_path / "study.db.lock"):
            taking = pool.submit(queue.take_next_trial)
            with pytest.raises(TimeoutError):
                taking.result(timeout=0.5)
        assert taking.result().seeds == [1]


def check_two_workers(database: str, folder: Path) -> None:
    ready = make(folder / "ready")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, database, str(ready)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        lines_per_worker = [worker.communicate()[0].splitlines() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    lines = [line for part in lines_per_worker for line in part]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert len(lines) == len(set(lines)) == 24
    assert len({line.split(" ", 1)[1] for line in lines}) == 24  # 4 cells of 6 seeds, each once
    assert all(part for part in lines_per_worker)  # both worked


def test_the_interval_holds_the_true_mean_95_times_in_100() -> None:
    """Simulated: 4,000 studies of 3 and of 5 seeds."""
    rng = np.random.default_rng(0)
    for seeds in (3, 5):
        draws = rng.normal(0.9, 0.02, (4000, seeds))
        held = [abs(mean(row) - 0.9) <= compute_ci_half_width(list(row)) for row in draws.tolist()]
        assert np.mean(held) == pytest.approx(0.95, abs=0.012)


class FakeTrial:
    def __init__(self, cell, seed, accuracy, flops=1.0):
        curves = {"train_loss": [2.0, 1.0], "val_accuracy": [0.1, accuracy]}
        result = {
            "accuracy": accuracy,
            "seconds": 1.0,
            "machine": "Box",
            "together": 1,
            "compiled": False,
            "parameters": 10,
            "flops": flops,
            "images_seen": 5,
            "curves": curves,
        }
        self.user_attrs = {"cell": cell, "seeds": [seed], "results": {str(seed): result}}
        self.state = type("State", (), {"name": "COMPLETE"})


@cache
def depths(values: str, seeds: int):
    return parse_and_check_design("digits", [f"model.depth={values}"], seeds)


def fake(accuracies: dict[str, list[float]], flops: dict[str, float] | None = None):
    design = depths(",".join(accuracies), len(next(iter(accuracies.values()))))
    trials = [
        FakeTrial({"model.depth": value}, seed, accuracy, (flops or {}).get(value, 1.0))
        for value, values in accuracies.items()
        for seed, accuracy in enumerate(values, start=1)
    ]
    return collect_results(design, trials)


def test_differences_are_taken_seed_by_seed() -> None:
    """By hand: the seeds differ by 10 points, the cells by 1 with each seed: paired, that is no noise at all."""
    results = fake({"1": [0.50, 0.60, 0.70], "2": [0.51, 0.61, 0.712]})
    assert results.best_combination.settings == {"model.depth": "2"}
    other = results.compute_corrected_difference_from_best(results.combinations[0])
    assert other.mean_difference == pytest.approx(-0.010667, abs=1e-5) and other.verdict == "worse"
    assert other.ci_half_width == pytest.approx(4.302653 * 0.0011547 / 3**0.5, rel=1e-3)
    assert results.combinations[0].ci_half_width > 0.2  # while each mean alone is unsure
    unsure = fake({"1": [0.50, 0.62, 0.69], "2": [0.51, 0.61, 0.71]})
    assert (
        unsure.compute_corrected_difference_from_best(unsure.combinations[0]).verdict == "no significant difference"
        and "The other combination does not differ significantly" in unsure.conclusion
    )
    assert (
        "One seed is not enough to test significance. Run again with --seeds 5."
        in fake({"1": [0.5], "2": [0.6]}).conclusion
    )


def test_a_combination_is_called_best_only_if_another_is_significantly_worse() -> None:
    equal = fake({"1": [0.50, 0.63], "2": [0.51, 0.61]})
    assert equal.conclusion == (
        "Highest mean: depth=1 with 56.50 % (seeds 1, 2: 50.00, 63.00 %). "
        "The other combination does not differ significantly. "
        "Two seeds can show only very large differences."
    )
    head, rows = build_results_table(equal)
    assert "paired difference from the combination with the highest mean (points, seeds 1, 2)" in head and [
        row[4] for row in rows
    ] == [
        "highest mean",
        "no significant difference",
    ]
    five = fake({"1": [0.5, 0.6, 0.7, 0.6, 0.5], "2": [0.6, 0.5, 0.6, 0.7, 0.5]})
    assert five.conclusion.startswith("Highest mean: ") and "Two seeds" not in five.conclusion
    assert fake({"1": [0.5], "2": [0.6]}).conclusion.startswith("Highest accuracy: depth=2 with 60.00 % (one seed).")
    clear = fake({"1": [0.50, 0.60, 0.70], "2": [0.51, 0.61, 0.712]})
    assert clear.conclusion.startswith("Best: depth=2 ") and build_results_table(clear)[1][1][4] == "best"
    assert build_results_table(StudyResults(equal.design, [], [], 0, 2)).rows == []


def test_two_values_are_in_the_order_of_their_seeds() -> None:
    results = fake(
        {"1": [0.70, 0.60], "2": [0.50, 0.55]}
    )  # sorted by size, the differences would belong to other seeds
    head, rows = build_results_table(results)
    assert head[2] == "validation accuracy (seeds 1, 2)"
    assert [row[2:4] for row in rows] == [["70.00, 60.00 %", "–"], ["50.00, 55.00 %", "−20.00, −5.00"]]


def test_notes_and_captions_explain_only_what_is_shown() -> None:
    one, two = fake({"1": [0.5], "2": [0.6]}), fake({"1": [0.5, 0.62], "2": [0.51, 0.61]})
    three = fake({"1": [0.5, 0.6, 0.7], "2": [0.5, 0.6, 0.8], "3": [0.4, 0.5, 0.5]})
    notes = [" ".join(format_notes(results)) for results in (one, two, three)]
    assert [("±" in text, "Bonferroni" in text, "seed by seed" in text) for text in notes] == [
        (False, False, False),
        (False, False, True),
        (True, True, True),
    ]
    front = (
        "Orange: the Pareto front. Any combination that is more accurate than one of these costs more, and any that is "
        "cheaper is less accurate."
    )
    captions = [draw_study_figures(results)["pareto"].get_supxlabel() for results in (two, three)]
    assert [" ".join(caption.split()) for caption in captions] == [
        front,
        f"{front} Bars: 95 % confidence interval of the mean (three seeds or more).",
    ]
    off = [f"data.augment.{name}=0" for name in ("shift", "rotate", "scale", "mixup")]
    for words, augmented in ((["model.depth=1,2"], True), (["model.depth=1,2", *off], False)):
        trials = [FakeTrial({"model.depth": value}, 1, 0.5) for value in "12"]
        caption = draw_study_curves(collect_results(parse_and_check_design("digits", words, 1), trials)).get_supxlabel()
        assert "Training values are" in caption and ("augmented" in caption) == augmented


def test_a_combination_with_fewer_seeds_is_not_the_best_and_no_spread_is_not_testable() -> None:
    lucky = fake({"1": [0.99], "2": [0.6]})
    design = lucky.design
    trials = [FakeTrial({"model.depth": "1"}, 1, 0.99), *(FakeTrial({"model.depth": "2"}, s, 0.6) for s in (1, 2, 3))]
    results = collect_results(design, trials)
    assert (
        results.best_combination.settings == {"model.depth": "2"}
        and results.combinations_tied_with_best
        and "The other combination does not differ significantly" in results.conclusion
    )
    even = fake({"1": [0.5, 0.6], "2": [0.51, 0.61]})  # exactly a point apart with both seeds
    assert even.compute_corrected_difference_from_best(even.combinations[0]).verdict == "not testable"
    assert build_results_table(even)[1][0][3] == "−1.00, −1.00" and any(
        line.startswith("Not testable") for line in format_notes(even)
    )
    assert even.timing_note.startswith("Times (") and even.format_timing_note("All other times").startswith("All other")
    three = fake({"1": [0.5, 0.6, 0.7], "2": [0.51, 0.61, 0.71]})
    assert build_results_table(three)[1][0][3] == "−1.00 in every seed"
    assert not any("Not testable" in line for line in format_notes(fake({"1": [0.5, 0.62], "2": [0.51, 0.61]})))
    image = fake({"1": [61 / 90, 59 / 90], "2": [60 / 90, 58 / 90]})  # an image apart: equal but for rounding
    other = image.compute_corrected_difference_from_best(image.combinations[1])
    assert other.ci_half_width > 0 and other.verdict == "not testable"
    assert "No other combination has finished" in collect_results(design, trials[1:]).conclusion


def test_a_study_that_is_not_finished_names_no_best() -> None:
    trials = [FakeTrial({"model.depth": value}, seed, 0.5) for value in "12" for seed in (1, 2)]
    trials[-1].state = type("State", (), {"name": "WAITING"})
    assert (
        collect_results(depths("1,2", 2), trials).conclusion
        == "Not finished. Best so far: depth=1 with 50.00, 50.00 %."
    )


def test_equal_combinations_are_rarely_called_worse() -> None:
    """Simulated: 1,000 studies of six equal cells and five seeds; some cell is called worse in at most 5 of 100, though
    the best of six, against which all are held, is the luckiest."""
    rng, called = np.random.default_rng(1), 0
    for _ in range(1000):
        results = fake({str(cell): (0.9 + 0.02 * rng.normal(size=5)).tolist() for cell in range(1, 7)})
        called += any(
            other is not None and other.verdict == "worse"
            for other in map(results.compute_corrected_difference_from_best, results.combinations)
        )
    assert 0.01 < called / 1000 < 0.05


def test_no_combination_dominates_the_pareto_front() -> None:
    results = fake({"1": [0.5], "2": [0.7], "3": [0.6], "4": [0.7]}, {"1": 1, "2": 2, "3": 3, "4": 4})
    assert [cell.settings["model.depth"] for cell in results.compute_pareto_front("flops")] == ["1", "2"]


def test_the_report_has_all_results_in_markdown_and_in_one_page(tmp_path) -> None:
    design = parse_and_check_design("digits", ["model.depth=1,2", "model.embed_dim=16,32"], 2)
    trials = [
        FakeTrial(cell, seed, 0.5 + 0.01 * place + 0.001 * seed)
        for place, cell in enumerate(design.combinations)
        for seed in (1, 2)
    ]
    page = write_html_markdown_and_json_report(collect_results(design, trials), tmp_path)
    text, html = (tmp_path / "report.md").read_text(), page.read_text()
    assert "| 2 | 32 | 2 | 53.10, 53.20 % |" in text and "![grid](grid.png)" in text and "±" not in text
    assert html.count("data:image/png;base64") == 4 and 'src="http' not in html and "curves.png" not in html
    assert {file.name for file in tmp_path.glob("*.png")} == {"curves.png", "effects.png", "grid.png", "pareto.png"}
    assert json.loads((tmp_path / "answer.json").read_text())["cells"][0]["by_seed"] == {"1": 0.501, "2": 0.502}


def test_a_searched_range_is_an_axis_and_labels_do_not_overprint(tmp_path) -> None:
    design = parse_and_check_design("digits", ["train.lr=1e-4..1e-2"], 1, num_search_trials=30)
    trials = [FakeTrial({"train.lr": f"{10 ** (-4 + place / 15):.6g}"}, 1, 0.5) for place in range(30)]
    pictures = draw_study_figures(collect_results(design, trials))
    assert (
        pictures["effects"].axes[0].get_xscale() == "log"
        and len(pictures["effects"].axes[0].lines[0].get_xdata()) == 30
    )
    assert [text.get_text() for text in pictures["pareto"].axes[0].texts] == ["A, B, C, … (30 points)"]
    apart = draw_pareto_fronts(
        {"cost": [ParetoPoint(1.0, 0.5, None, "a", True), ParetoPoint(3.0, 0.9, None, "b", True)]}, ""
    )
    assert [text.get_text() for text in apart.axes[0].texts] == ["A", "B"]


def test_runs_without_labels_are_compared_by_a_linear_probe_and_the_report_says_so() -> None:
    design = parse_and_check_design("digits-mae", ["model.depth=1,2"], 1)
    results = collect_results(design, [FakeTrial({"model.depth": value}, 1, 0.5) for value in "12"])
    assert (
        build_results_table(results)[0][2] == "validation linear probe accuracy"
        and "a linear probe measures the features" in format_notes(results)[0]
    )
    assert draw_study_figures(results)["curves"].axes[0].get_ylabel() == "mean squared error on the masked patches"
    assert not fake({"1": [0.5], "2": [0.6]}).uses_linear_probe


def test_the_report_names_runs_that_shared_their_machine(tmp_path) -> None:
    queue = TrialQueue(
        parse_and_check_design("digits", ["model.depth=1,2"], 1), make_sqlite_storage_url(tmp_path), "study"
    )
    mine, other = queue.take_next_trial(), queue.take_next_trial()
    assert queue.count_other_workers_on_this_machine() == 0
    other.set_attribute("worker", [socket.gethostname(), os.getppid()])
    assert queue.count_other_workers_on_this_machine() == 1
    other.set_attribute("worker", ["elsewhere", os.getppid()])
    assert queue.count_other_workers_on_this_machine() == 0 and mine is not None
    trials = [FakeTrial({"model.depth": value}, 1, 0.5) for value in "12"]
    trials[0].user_attrs["results"]["1"]["beside"] = 1
    assert "1 of 2 runs shared their machine with other runs" in collect_results(depths("1,2", 1), trials).timing_note


@pytest.mark.slow
def test_a_search_runs_the_given_number_of_trials_and_finds_the_better_rate(tmp_path) -> None:
    words = ["train.epochs=10", "train.device=cpu", "model.depth=1", "train.lr=1e-6..1e-2", "train.optimizer=adamw"]
    words += ["train.ema=0", "train.batch_size=32", "data.augment.mixup=0"]  # few steps, in which something is learnt
    design = parse_and_check_design("digits", words, 1, num_search_trials=8)
    queue = TrialQueue(design, make_sqlite_storage_url(tmp_path), "search")
    queue.optuna_study.sampler = TPESampler(n_startup_trials=10, seed=5)  # chance would at times try no high rate
    outcomes = list(run_trials(queue, tmp_path))
    assert len(outcomes) == 8
    results = collect_results(design, queue.trials)
    assert len(results.combinations) + results.num_pruned == 8
    assert (
        float(results.best_combination.settings["train.lr"]) > 1e-3
        and results.combinations[0] is results.best_combination
    )
    assert results.best_combination.mean_accuracy > 0.2 and results.num_pruned


def test_the_command_line(tmp_path, vitascope) -> None:
    where = ["--out", str(tmp_path)]
    done = vitascope("study", "digits", *QUICK, "model.embed_dim=16,32", "--seeds", "2", *where)
    assert done.code == 0 and "Report:" in done.out and re.search(r"^(Best|Highest mean): embed_dim=", done.out, re.M)
    assert (
        vitascope("study", "digits", *QUICK, "model.embed_dim=16,32", "--seeds", "2", *where).out.count("seed 1") == 0
    )
    stopped = vitascope("study", "digits", *QUICK, "model.mlp_ratio=1,2", "--seeds", "1", "--budget", "0s", *where)
    assert stopped.code == 0 and "2 unfinished runs. Run the same" in stopped.out and "Times (" not in stopped.out


def test_the_exit_code_is_an_error_if_every_run_fails(tmp_path, vitascope, monkeypatch) -> None:
    def breaks(*_, **__):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr("vitascope.study.workers.train_recipe", breaks)
    done = vitascope("study", "digits", "model.depth=1,2", "--seeds", "1", "--out", str(tmp_path))
    assert done.code == 2 and "Failed: model.depth=2, seed 1: RuntimeError: the disk is full" in done.out
    assert "--retry" in done.out and "Every run failed" in done.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Give a recipe or images first"),
        (["digits", "model.depth=1,2", "--budget", "soon"], "--budget soon is not a duration"),
        (["digits", "model.depth=1,2", "--split", "train"], "--split train is unknown"),
        (["digits", "model.depth=1,2", "--judge", "test"], "--judge was renamed to --split."),
        (["digits", "model.depth=1,2", "--jobs", "0"], "must be at least 1"),
        (["digits", "model.depth=1,2", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["digits", "model.depth=1,2", "--name", "a/b"], "cannot name a folder"),
        (["nothing", "model.depth=1,2"], "There is no recipe 'nothing'"),
    ],
)
def test_wrong_options_are_rejected(words, text, tmp_path, vitascope) -> None:
    answer = vitascope("study", *words, "--out", str(tmp_path))
    assert answer.code == 2 and text in answer.err and not list(tmp_path.iterdir())


def test_a_batched_study_of_three_seeds_is_three_single_runs(tmp_path) -> None:
    words = [*QUICK, "train.lr=1e-3,2e-3", "train.batch_size=64"]
    results = []
    for place, together in (("alone", 1), ("many", 6)):
        queue = TrialQueue(
            parse_and_check_design("digits", words, 3), make_sqlite_storage_url(make(tmp_path / place)), "study"
        )
        outcomes = list(run_trials(queue, tmp_path / place, max_runs_per_batch=together))
        assert len(outcomes) == 6 and not any(one.failure_reason for one in outcomes)
        results.append(collect_results(queue.design, queue.trials))
    alone, many = results
    for one, other in zip(alone.combinations, many.combinations, strict=True):
        assert one.settings == other.settings and list(other.results) == [1, 2, 3]
        for seed, result in one.results.items():
            curves = other.results[seed]["curves"]
            assert curves["val_loss"] == pytest.approx(result["curves"]["val_loss"], abs=2e-4)
            assert curves["train_loss"] == pytest.approx(result["curves"]["train_loss"], abs=2e-4)
            assert curves["train_accuracy"] == pytest.approx(result["curves"]["train_accuracy"], abs=2e-3)
    lines = [file.read_text().splitlines() for file in (tmp_path / "many").rglob("metrics.jsonl")]
    rows = [json.loads(line) for own in lines for line in own]
    assert {row["together"] for row in rows} == {6}  # they did learn together
    assert "in one batch" not in alone.timing_note and "Up to 6 runs were trained in one batch" in "".join(
        format_notes(many)
    )
    runs = sorted((tmp_path / "many").rglob("model.safetensors"))
    assert len(runs) == 6 and vitascope.load(runs[0].parent).evaluate().accuracy > 0


def test_a_failing_run_of_a_batch_does_not_stop_the_others(tmp_path) -> None:
    words = [*QUICK, "train.lr=1e-3,1e30", "train.optimizer=adamw", "train.clip_grad=0"]
    queue = TrialQueue(parse_and_check_design("digits", words, 1), make_sqlite_storage_url(tmp_path), "study")
    outcomes = {one.settings["train.lr"]: one for one in run_trials(queue, tmp_path, max_runs_per_batch=2)}
    assert outcomes["1e-3"].accuracy is not None and "became NaN or infinite" in outcomes["1e30"].failure_reason


def test_if_a_batch_fails_its_runs_are_trained_one_at_a_time(tmp_path, monkeypatch) -> None:
    """Tried once, said once, and no half-design run is left."""
    tried, crowds = [], []

    def out_of_memory(crowd, number):
        tried.append(number)
        crowds.append(weakref.ref(crowd))
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(BatchedTraining, "train_epoch", out_of_memory)
    held, real = [], workers._run_single_trial
    monkeypatch.setattr(workers, "_run_single_trial", lambda *given: held.append(crowds[0]()) or real(*given))
    queue = TrialQueue(
        parse_and_check_design("digits", [*QUICK, "train.lr=1e-3,2e-3"], 2), make_sqlite_storage_url(tmp_path), "study"
    )
    outcomes = list(run_trials(queue, tmp_path, max_runs_per_batch=2))
    assert len(outcomes) == 4 and all(one.accuracy is not None for one in outcomes) and tried == [0]
    assert [bool(one.note) for one in outcomes] == [True, False, False, False]
    assert held == [None] * 4, "what learning together held is free for those that learn alone"
    assert outcomes[0].note == (
        "Training several runs in one batch failed (RuntimeError: CUDA out of memory). "
        "The remaining runs are trained one at a time."
    )
    assert len(list(tmp_path.rglob("metrics.jsonl"))) == len(list(tmp_path.rglob("recipe.yaml"))) == 4


def test_a_batch_that_cannot_be_evaluated_is_not_trained_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(workers, "score_and_collect_run_result", broken_result)
    queue = TrialQueue(
        parse_and_check_design("digits", [*QUICK, "train.lr=1e-3,2e-3"], 1), make_sqlite_storage_url(tmp_path), "study"
    )
    outcomes = list(run_trials(queue, tmp_path, max_runs_per_batch=2))
    assert [one.failure_reason for one in outcomes] == ["ValueError: no test images"] * 2
    assert len(list(tmp_path.rglob("recipe.yaml"))) == 2


def broken_result(*_):
    raise ValueError("no test images")


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_varied_setting_may_make_an_invalid_recipe_valid() -> None:
    """sheet-a's patches of 7 do not divide 8 pixels, but no combination has them."""
    words = ["data.name=digits", "model.img_size=8", "model.patch_size=2,4"]
    design = parse_and_check_design("sheet-a", words, 1)
    assert (
        design.identity_hash
        == parse_and_check_design("sheet-a", [*words[:2], "model.patch_size=4,2,1"], 3).identity_hash
    )
    orders = [
        parse_and_check_design("digits", [f"train.objective={text}"], 1).identity_hash
        for text in ("classify,mae", "mae,classify")
    ]
    assert orders[0] == orders[1]
    assert design.identity_hash != parse_and_check_design("sheet-a", [*words, "train.epochs=3"], 1).identity_hash
    assert (
        design.identity_hash
        != parse_and_check_design("sheet-a", [*words[:2], "model.patch_size=2", "model.depth=1,2"], 1).identity_hash
    )


def test_a_trial_of_a_process_killed_while_it_claimed_it_is_taken_at_once(tmp_path) -> None:
    """It is marked as running, and no worker is stored yet; another trial of a live worker is left alone."""
    design = parse_and_check_design("digits", ["model.depth=1,2"], 1)
    queue = TrialQueue(design, make_sqlite_storage_url(tmp_path), "study")
    claimed = next(trial for trial in queue.trials if trial.state.name == "WAITING")
    queue.optuna_study._storage.set_trial_state_values(claimed._trial_id, state=queue.optuna.trial.TrialState.RUNNING)
    taken = [queue.take_next_trial() for _ in range(3)]
    assert sorted(trial.settings["model.depth"] for trial in taken if trial) == ["1", "2"] and taken[2] is None
