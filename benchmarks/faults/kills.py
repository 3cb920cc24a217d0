"""SIGKILL at random moments of train, resume, study, evaluate and export, then the same command again."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.counts import Attack, FaultCounts, classify_outcome, shorten_outcome
from benchmarks.faults.processes import run_forked_command, start_forked_command, start_new_command
from benchmarks.faults.runs import (
    TINY,
    TRAIN,
    TRAIN_WITH_ALL_STATE,
    check_success,
    find_run,
    hash_file,
    is_same_result,
    read_fingerprint,
    remove_times,
    train_reference,
)

SECOND_KILL_PROBABILITY = 0.4
MAX_KILLS = 6  # of one result
STUDY = ("study", "digits", "model.depth=1,2", "--seeds", "1", "train.epochs=2", "train.save_seconds=0")
STUDY = (*STUDY, *(setting for setting in TINY if not setting.startswith("model.depth")))


class Interrupted(NamedTuple):
    """How often a command was killed, and the error of the last try, if it failed."""

    num_kills: int
    error: str


def kill_until_finished(
    attack: Attack, choose_command: Callable[[], Sequence[str]], folder: Path, max_seconds: float
) -> Interrupted:
    """Kill the command at a random moment, run it again, at times kill that too, and so on until it ends."""
    num_kills = 0
    while num_kills == 0 or (num_kills < MAX_KILLS and attack.rng.random() < SECOND_KILL_PROBABILITY):
        process = start_forked_command(choose_command(), folder)
        outcome = process.kill_after(attack.rng.uniform(0, max_seconds))
        if outcome is not None:
            kind = classify_outcome(outcome)
            return Interrupted(num_kills, "" if kind == "completed" else f"{kind}, {shorten_outcome(outcome)}")
        num_kills += 1
    outcome = run_forked_command(choose_command(), folder)
    kind = classify_outcome(outcome)
    return Interrupted(num_kills, "" if kind == "completed" else f"{kind}, {shorten_outcome(outcome)}")


def _choose_train_or_resume(folder: Path, train_command: Sequence[str]) -> Sequence[str]:
    run_path = find_run(folder)
    return train_command if run_path is None else ("resume", str(run_path))


def _count_kills(
    attack: Attack,
    counts: FaultCounts,
    choose_command: Callable[[Path], Sequence[str]],
    seconds: float,
    is_intact: Callable[[Path], bool],
) -> None:
    """Count every kill of a command. A try whose command ended before the signal does not count."""
    for folder in attack.list_tries():
        interrupted = kill_until_finished(attack, lambda folder=folder: choose_command(folder), folder, seconds)
        is_recovered = not interrupted.error and is_intact(folder)
        for _ in range(interrupted.num_kills):
            counts.count_recovery(
                is_recovered, f"after {interrupted.num_kills} kills: {interrupted.error or 'differs'}"
            )
        if is_recovered:
            shutil.rmtree(folder)


def kill_train(attack: Attack) -> list[FaultCounts]:
    result = "`vitascope resume` (or `train`, before the run folder has a recipe) gives the same weights and metrics."
    total = FaultCounts("SIGKILL in train and resume", result)
    commands = (TRAIN, TRAIN_WITH_ALL_STATE)
    for index, command in enumerate(commands):
        reference = train_reference(attack.folder / f"reference-{index}", command)
        part = Attack(attack.folder / str(index), attack.rng, -(-attack.num_tries // len(commands)), attack.end)

        def is_intact(folder: Path, reference=reference) -> bool:
            run_path = find_run(folder)
            return run_path is not None and is_same_result(lambda: read_fingerprint(run_path), reference.fingerprint)

        choose = lambda folder, command=command: _choose_train_or_resume(folder, command)  # noqa: E731
        _count_kills(part, total, choose, reference.seconds, is_intact)
    return [total]


def kill_new_processes(attack: Attack) -> list[FaultCounts]:
    """The same with processes that a user starts: `python -m vitascope`, not a fork."""
    counts = FaultCounts("SIGKILL in train, `python -m vitascope`", "The same.")
    reference = train_reference(attack.folder / "reference")
    started = time.monotonic()
    check_success(start_new_command(TRAIN, reference.path.parent).wait())
    seconds = time.monotonic() - started
    for folder in attack.list_tries():
        outcome = start_new_command(TRAIN, folder).kill_after(attack.rng.uniform(0.3 * seconds, seconds))
        if outcome is not None:
            continue
        outcome = start_new_command(_choose_train_or_resume(folder, TRAIN), folder).wait()
        run_path = find_run(folder)
        is_recovered = run_path is not None and is_same_result(
            lambda run_path=run_path: read_fingerprint(run_path), reference.fingerprint
        )
        counts.count_recovery(is_recovered and outcome.exit_code == 0, shorten_outcome(outcome))
    return [counts]


def kill_study(attack: Attack) -> list[FaultCounts]:
    counts = FaultCounts("SIGKILL in study", "The same command gives the same runs and the same results.")
    reference = attack.folder / "reference"
    reference.mkdir(parents=True)
    started = time.monotonic()
    check_success(run_forked_command(STUDY, reference))
    seconds, expected = time.monotonic() - started, read_study_results(reference)
    _count_kills(
        attack,
        counts,
        lambda _: STUDY,
        seconds,
        lambda folder: is_same_result(lambda: read_study_results(folder), expected),
    )
    return [counts]


def read_study_results(folder: Path) -> dict[str, Any]:
    """Return the study's results without times, and the weights and metrics of its finished runs, by recipe."""
    study = next(folder.glob("studies/*"))
    runs = {
        (path.parent / "recipe.yaml").read_text(encoding="utf-8"): read_fingerprint(path.parent)
        for path in study.glob("runs/*/*/model.safetensors")
    }
    return {"answer": remove_times(json.loads((study / "answer.json").read_text(encoding="utf-8"))), "runs": runs}


def kill_evaluate(attack: Attack) -> list[FaultCounts]:
    counts = FaultCounts(
        "SIGKILL in evaluate", "`vitascope evaluate` again gives the same report; the run is unchanged."
    )
    run = train_reference(attack.folder / "reference")
    command = ("evaluate", "run", "--split", "val", "--quick")
    reference = attack.folder / "whole"
    shutil.copytree(run.path, reference / "run")
    started = time.monotonic()
    check_success(run_forked_command(command, reference))
    seconds, expected = time.monotonic() - started, read_evaluation(reference)

    def choose_command(folder: Path) -> Sequence[str]:
        if not (folder / "run").is_dir():
            shutil.copytree(run.path, folder / "run")
        return command

    _count_kills(
        attack,
        counts,
        choose_command,
        seconds,
        lambda folder: is_same_result(lambda: read_evaluation(folder), expected),
    )
    return [counts]


def read_evaluation(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "run/evaluation/val/report.json").read_text(encoding="utf-8"))
    return read_fingerprint(folder / "run") | {"report": remove_times(report)}


EXPORTS = {
    "folder": ("export", "folder", "run", "--out", "exported"),
    "torch": ("export", "torch", "run", "--out", "exported/model.pt2"),
    "onnx": ("export", "onnx", "run", "--out", "exported/model.onnx"),
}


def kill_export(attack: Attack) -> list[FaultCounts]:
    counts = FaultCounts("SIGKILL in export", "`vitascope export` again gives the same files, byte by byte.")
    run = train_reference(attack.folder / "reference")
    for index, (name, command) in enumerate(EXPORTS.items()):
        num_tries = -(-attack.num_tries * 8 // 10) if name == "folder" else attack.num_tries // 10
        if not num_tries:
            continue
        reference = attack.folder / f"whole-{name}"
        _copy_run_to_export(run.path, reference)
        started = time.monotonic()
        check_success(run_forked_command(command, reference))
        seconds, expected = time.monotonic() - started, hash_exported_files(reference)
        part = Attack(attack.folder / str(index), attack.rng, num_tries, attack.end)

        def choose_command(folder: Path, command=command) -> Sequence[str]:
            if not (folder / "run").is_dir():
                _copy_run_to_export(run.path, folder)
            return command

        _count_kills(
            part,
            counts,
            choose_command,
            seconds,
            lambda folder, expected=expected: hash_exported_files(folder) == expected,
        )
    return [counts]


def _copy_run_to_export(run_path: Path, folder: Path) -> None:
    shutil.copytree(run_path, folder / "run")
    (folder / "exported").mkdir(exist_ok=True)


def hash_exported_files(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in (folder / "exported").glob("*") if not path.name.endswith(".part")}
