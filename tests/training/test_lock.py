"""Locks on runs: one process at a time trains or deletes a run, and the lock of an ended process is taken over."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vitascope as library
from tests.training.test_runs import build_state_and_run, same_weights
from tests.training.tiny import shared_run, untimed
from vitascope import UserError
from vitascope.run import lock as lock_module
from vitascope.run.directory import Run
from vitascope.run.lock import LOCK_FILE, RunInUseError, find_process_start, lock_run
from vitascope.training.loop import train_and_checkpoint_remaining_epochs

HOLD = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from vitascope.run.directory import Run
from vitascope.run.lock import lock_run
with lock_run(Run(Path(sys.argv[1]))):
    if {fork} and os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print("locked", flush=True)
    sys.stdin.read()
"""
RESUME_AND_WAIT = """
import sys
from vitascope.training import loop
finish_epoch = loop.log_epoch_and_keep_best

def finish_epoch_and_wait(*args):
    print("an epoch is trained", flush=True)
    sys.stdin.readline()
    return finish_epoch(*args)

loop.log_epoch_and_keep_best = finish_epoch_and_wait
from vitascope.cli import main
main()
"""


@contextmanager
def start_python(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A process, which is killed when the context ends."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, args)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    if process.stdout is None or not any(text in line for line in process.stdout):
        pytest.fail(f"the process ended without {text!r}")


@pytest.fixture(params=["flock", "lock file alone"])
def run(tmp_path: Path, request, monkeypatch) -> Run:
    """An empty run folder. Without flock, as on Windows, the same holds."""
    if request.param != "flock":
        monkeypatch.setattr(lock_module, "fcntl", None)
    return Run(tmp_path)


def write_lock_of(run: Run, **changes: object) -> None:
    """The lock file that a process killed by SIGKILL leaves; without changes, that of this process."""
    start = find_process_start(os.getpid())
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "process_start": start, "since": "2026-01-02 03:04:05"}
    run.get_path(LOCK_FILE).write_text(json.dumps(holder | changes))


def test_a_lock_is_held_once_and_leaves_no_file(run) -> None:
    with lock_run(run):
        text = rf"used by process {os.getpid()} on \S+ since 2.*; wait until it ends"
        with pytest.raises(RunInUseError, match=text), lock_run(run, force=True):
            pass
        assert [path.name for path in run.path.iterdir()] == [LOCK_FILE]
    assert not list(run.path.iterdir())
    with lock_run(run):
        pass


def test_an_ended_process_blocks_no_other(run) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_lock_of(run, pid=ended.pid)
    with lock_run(run):
        assert json.loads(run.get_path(LOCK_FILE).read_text())["pid"] == os.getpid()


def test_another_process_with_the_same_id_is_not_the_holder(tmp_path, monkeypatch) -> None:
    """With flock, the operating system knows; without it, the start of the process tells them apart."""
    monkeypatch.setattr(lock_module, "fcntl", None)
    run = Run(tmp_path)
    write_lock_of(run)
    with pytest.raises(RunInUseError, match="since 2026-01-02 03:04:05"), lock_run(run):
        pass
    write_lock_of(run, process_start="another boot 17")
    with lock_run(run):
        pass


def test_the_lock_of_another_host_is_taken_only_by_force(run) -> None:
    write_lock_of(run, host="elsewhere", pid=7)
    with pytest.raises(RunInUseError, match=r"process 7 on elsewhere since .*add --force") as refused, lock_run(run):
        pass
    assert str(refused.value).count(". ") == 0 and run.get_path(LOCK_FILE).is_file()
    with lock_run(run, force=True):
        pass


def test_a_copy_of_a_run_that_is_trained_is_free(tmp_path) -> None:
    original, copy = Run(tmp_path / "original"), tmp_path / "copy"
    original.path.mkdir()
    with lock_run(original):
        shutil.copytree(original.path, copy)
        with lock_run(Run(copy)):
            pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path) -> None:
    for target in ("notes.txt", "missing.txt"):
        (tmp_path / "notes.txt").write_text("keep me")
        (tmp_path / LOCK_FILE).symlink_to(tmp_path / target)
        with pytest.raises(UserError, match=r"lock\.json could not be written"), lock_run(Run(tmp_path)):
            pass
        (tmp_path / LOCK_FILE).unlink()
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_a_lock_of_another_user_names_its_holder(run, monkeypatch) -> None:
    write_lock_of(run)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lock_module, "_open_lock_file", refuse)
    with pytest.raises(RunInUseError, match=f"used by process {os.getpid()} "), lock_run(run):
        pass


def test_a_missing_folder_is_named(tmp_path) -> None:
    with (
        pytest.raises(UserError, match=r"gone/lock\.json could not be written: No such file"),
        lock_run(Run(tmp_path / "gone")),
    ):
        pass


DAMAGED = [b"", b"{", b"[]", b'{"host": 1}', b"\xff\xfe", b"[" * 5000]
DAMAGED += [
    b'{"host": "x", "pid": %s, "process_start": "", "since": ""}' % pid for pid in (b"-1", b"Infinity", b"1e99")
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_lock_file_of_an_ended_process_blocks_no_other(run, monkeypatch, content) -> None:
    monkeypatch.setattr(lock_module, "WAIT_FOR_NAME_SECONDS", 0.05)
    run.get_path(LOCK_FILE).write_bytes(content)
    with lock_run(run):
        pass


def test_a_live_lock_of_another_host_that_was_forced_is_left_to_its_new_holder(run) -> None:
    with lock_run(run):
        write_lock_of(run, host="elsewhere")
    assert json.loads(run.get_path(LOCK_FILE).read_text())["host"] == "elsewhere"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot fork here")
@pytest.mark.parametrize("fork", [False, True])
def test_a_killed_process_gives_its_lock_back_even_if_a_forked_worker_survives(tmp_path, fork) -> None:
    with start_python(HOLD.format(fork=fork), tmp_path) as holder:
        wait_for_line(holder, "locked")
        with pytest.raises(RunInUseError, match=f"used by process {holder.pid} on"), lock_run(Run(tmp_path)):
            pass
        holder.kill()
        holder.wait()
        with lock_run(Run(tmp_path)):  # the forked process ends when its standard input is closed
            pass


def make_interrupted_run(folder: Path) -> Run:
    state, run = build_state_and_run(folder, **{"train.save_seconds": 1000})
    records = train_and_checkpoint_remaining_epochs(state, run)
    while state.epoch < 1:
        next(records)
    records.close()
    return run


def test_a_run_that_is_trained_is_neither_resumed_nor_deleted_by_another_process(tmp_path, vitascope) -> None:
    run = make_interrupted_run(tmp_path / "cut")
    with start_python(RESUME_AND_WAIT, "resume", run.path) as trainer:
        wait_for_line(trainer, "an epoch is trained")
        for command in (["resume", str(run.path)], ["runs", "delete", "--yes", str(run.path)]):
            answer = vitascope(*command)
            assert answer.code == 2 and answer.out == ""
            assert f"{run.path} is used by process {trainer.pid} on {socket.gethostname()} since 2" in answer.err
        trainer.communicate("\n\n\n")
    whole = shared_run(tmp_path / "whole")
    assert trainer.returncode == 0 and run.is_finished and not run.get_path(LOCK_FILE).exists()
    assert untimed(run) == untimed(whole) and same_weights(run, whole)


def test_a_run_is_locked_while_it_is_trained_and_free_afterwards(tmp_path, monkeypatch) -> None:
    from vitascope.training import loop

    locked, finish_epoch = [], loop.log_epoch_and_keep_best

    def check_lock_and_finish_epoch(state, run, *args):
        with pytest.raises(RunInUseError), lock_run(run):
            pass
        locked.append(run)
        return finish_epoch(state, run, *args)

    monkeypatch.setattr(loop, "log_epoch_and_keep_best", check_lock_and_finish_epoch)
    run = library.train("digits", runs=tmp_path, quiet=True, **{"train.epochs": 1, "model.depth": 1})
    assert locked and not run.get_path(LOCK_FILE).exists()


def test_batched_runs_are_locked_while_they_are_trained(tmp_path, monkeypatch) -> None:
    from tests.training.test_runs import TINY
    from vitascope.recipe.reading import read_recipe
    from vitascope.training.engines import batched_runs

    locked, train_epoch = [], batched_runs._train_validate_and_log_epoch

    def check_locks_and_train_epoch(batched, runs, epoch):
        for run in runs:
            with pytest.raises(RunInUseError), lock_run(run):
                pass
            locked.append(run)
        return train_epoch(batched, runs, epoch)

    monkeypatch.setattr(batched_runs, "_train_validate_and_log_epoch", check_locks_and_train_epoch)
    words = [f"{key}={value}" for key, value in (TINY | {"train.epochs": 1}).items()]
    recipes = [read_recipe("digits", [*words, f"train.seed={seed}"]) for seed in (0, 1)]
    runs = batched_runs.train_batched_runs(recipes, tmp_path)
    assert len(locked) == 2 and not any(run.get_path(LOCK_FILE).exists() for run in runs)


def test_force_resumes_and_deletes_what_another_host_has_left(tmp_path, vitascope) -> None:
    run = make_interrupted_run(tmp_path)
    for command in (["resume"], ["runs", "delete", "--yes"]):
        write_lock_of(run, host="elsewhere")
        refused = vitascope(*command, str(run.path))
        assert refused.code == 2 and "elsewhere" in refused.err and refused.err.count("\n") == 1
        assert vitascope(*command, str(run.path), "--force").code == 0
    assert not run.path.exists()


@pytest.mark.slow
def test_of_two_concurrent_resumes_one_trains_and_the_other_is_refused(tmp_path) -> None:
    run = make_interrupted_run(tmp_path / "cut")
    with (
        start_python(RESUME_AND_WAIT, "resume", run.path) as first,
        start_python(RESUME_AND_WAIT, "resume", run.path) as second,
    ):
        while first.poll() is None and second.poll() is None:
            time.sleep(0.1)
        trainer = second if first.poll() is not None else first
        trainer.communicate("\n\n\n")
        assert sorted(process.wait() for process in (first, second)) == [0, 2]
    whole = shared_run(tmp_path / "whole")
    assert untimed(run) == untimed(whole) and same_weights(run, whole)


def test_a_study_trains_another_run_if_a_worker_still_has_the_first_and_takes_over_that_of_another_host(
    tmp_path, monkeypatch
) -> None:
    from vitascope.study import workers

    run = make_interrupted_run(tmp_path)
    trial: Any = SimpleNamespace(seeds=[0], attributes={"begun": (0, str(run.path.relative_to(tmp_path)))}, settings={})
    queue: Any = SimpleNamespace(design=SimpleNamespace(num_search_trials=0, build_recipe=lambda settings, seed: None))
    monkeypatch.setattr(workers, "TrialPruningCallback", lambda *args, **options: callback)
    monkeypatch.setattr(workers, "train_recipe", lambda *args: "another run")
    callback = SimpleNamespace(begin_run=lambda run: None, log_epoch=lambda row: None, close=lambda: None)
    with lock_run(run):
        assert workers._train_or_resume_run(queue, trial, 0, tmp_path) == "another run"
    assert not run.is_finished
    write_lock_of(run, host="elsewhere")
    assert workers._train_or_resume_run(queue, trial, 0, tmp_path) == run and run.is_finished
