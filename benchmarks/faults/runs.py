"""Tiny runs to attack, and the comparison of results without times."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.processes import Outcome, run_forked_command, start_forked_command

TINY = (
    "model.embed_dim=16",
    "model.depth=2",
    "model.num_heads=2",
    "train.batch_size=64",
    "train.device=cpu",
    "train.precision=float32",
    "train.threads=1",
)
TRAIN = ("train", "digits", *TINY, "train.epochs=4", "train.save_seconds=0")
TRAIN_WITH_ALL_STATE = (  # the state of every part; checkpoints within epochs
    *("train", "digits", *TINY, "train.epochs=3", "train.save_seconds=0.02", "train.optimizer=muon", "train.ema=0.9"),
    *("model.drop_path_rate=0.2", "model.proj_drop_rate=0.1", "data.augment.cutmix=1.0", "data.augment.erase=0.25"),
)
WEIGHTS_FILES = ("model.safetensors", "best.safetensors")
Fingerprint = dict[str, Any]


class TimedRun(NamedTuple):
    """A finished run, how it was made, and the seconds it took."""

    path: Path
    seconds: float
    fingerprint: Fingerprint


def find_run(folder: Path) -> Path | None:
    """Return the only run under a folder of runs; None before it has a recipe."""
    return next((path.parent for path in sorted(folder.glob("runs/*/*/recipe.yaml"))), None)


def train_reference(folder: Path, command: Sequence[str] = TRAIN) -> TimedRun:
    """Train without interruption."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    check_success(run_forked_command(command, folder))
    seconds, run_path = time.monotonic() - started, find_run(folder)
    if run_path is None:
        raise RuntimeError(f"{command} left no run")
    return TimedRun(run_path, seconds, read_fingerprint(run_path))


def make_interrupted_run(folder: Path, command: Sequence[str] = TRAIN) -> Path:
    """Train, and kill the process when it has two checkpoints and is not finished."""
    for attempt in range(20):
        place = folder / f"interrupted-{attempt}"
        place.mkdir(parents=True)
        process = start_forked_command(command, place)
        while not list(place.glob("runs/*/*/resume.previous.pt")) and time.monotonic() < process.started + 60:
            time.sleep(0.001)
        process.kill()
        process.wait()
        run_path = find_run(place)
        if run_path and (run_path / "resume.pt").is_file() and not (run_path / "model.safetensors").is_file():
            return run_path
    raise RuntimeError("no run could be interrupted between its second checkpoint and its end")


def check_success(outcome: Outcome) -> None:
    if outcome.exit_code:
        raise RuntimeError(f"exit code {outcome.exit_code}: {outcome.errors or outcome.output}")


def read_fingerprint(run_path: Path) -> Fingerprint:
    """Return hashes of a run's weights, and its metrics without times."""
    weights = {name: hash_file(run_path / name) for name in WEIGHTS_FILES if (run_path / name).is_file()}
    lines = (run_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"weights": weights, "metrics": [remove_times(json.loads(line)) for line in lines]}


def remove_times(value: Any) -> Any:
    """Return JSON data without values that a clock or a folder's name decides."""
    if isinstance(value, dict):
        return {key: remove_times(entry) for key, entry in value.items() if not _is_time(key)}
    return [remove_times(entry) for entry in value] if isinstance(value, list) else value


def _is_time(key: str) -> bool:
    return "seconds" in key or key in ("images_per_second", "run", "date")


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_same_result(read: Callable[[], Any], reference: Any) -> bool:
    """Whether the results can be read and are identical."""
    try:
        return read() == reference
    except (OSError, ValueError):
        return False


def copy_run(run_path: Path, folder: Path) -> Path:
    """Copy a run into `folder`/runs/digits."""
    return Path(shutil.copytree(run_path, folder / "runs" / "digits" / run_path.name))
