"""Checkpoints within an epoch: a run resumed from one equals an uninterrupted run, bit by bit, also in its metrics."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import vitascope
from tests.training.test_captured import GraphReplayedByHand
from tests.training.test_objectives import SETTINGS
from tests.training.test_runs import same_weights
from tests.training.tiny import EVERYTHING, TINY, tiny_run, untimed
from vitascope import UserError
from vitascope.run.checkpoint import load_checkpoint
from vitascope.run.directory import Run, open_run_or_newest
from vitascope.training import loop
from vitascope.training.engines.single_run import EagerEngine
from vitascope.training.loop import CheckpointSaver
from vitascope.training.train import resume_run_if_unfinished

STEP = 18  # in the second epoch of the tiny runs
CASES = {
    "everything": EVERYTHING,
    "accumulation": {"train.grad_accum_steps": 4, "data.augment.cutmix": 1.0},
    "DINO, accumulation": SETTINGS["dino"] | {"train.grad_accum_steps": 4},
    "phase with some patches": {"train.epochs": 4, "train.patch_share": 0.5},
    "phase with all patches": {"train.epochs": 3, "train.patch_share": 0.5, "train.patch_share_until": 0.3},
    "two passes": {"data.passes_per_epoch": 2},
    "MAE": SETTINGS["mae"],
    "SimMIM": SETTINGS["simmim"],
    "SOAP": {"train.optimizer": "soap"},
    "Lion": {"train.optimizer": "lion", "train.lr": 1e-4},
}
FAST = ("everything", "DINO, accumulation")


def interrupt_within_epoch(monkeypatch, train: Callable[[], object], step: int = STEP) -> None:
    """Save the state after this step, and stop two steps later. There is no other save, but those between epochs."""

    def stop_or_check_step(saver: CheckpointSaver, now: float) -> bool:
        if saver.state.step == step + 2:
            raise KeyboardInterrupt
        return saver.state.step == step

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointSaver, "is_due_within_epoch", stop_or_check_step)
        with pytest.raises(KeyboardInterrupt):
            train()


def resume_within_epoch(run: Run, step: int = STEP) -> None:
    checkpoint = load_checkpoint(run).state
    assert checkpoint is not None and checkpoint["step"] == step
    torch.manual_seed(99)  # another process would not share our generator either
    output = io.StringIO()
    resume_run_if_unfinished(run, Console(file=output, width=1000))
    assert f"resuming in epoch {checkpoint['epoch'] + 1}, after " in output.getvalue()


def check_resumes_within_epoch(folder: Path, monkeypatch, **settings) -> Run:
    whole = tiny_run(folder / "whole", **settings)
    interrupt_within_epoch(monkeypatch, lambda: tiny_run(folder / "cut", **settings))
    run = open_run_or_newest(folder / "cut" / "digits")
    resume_within_epoch(run)
    assert untimed(run) == untimed(whole) and same_weights(run, whole)
    return run


@pytest.mark.parametrize(
    "settings", [pytest.param(CASES[name], id=name, marks=[] if name in FAST else pytest.mark.slow) for name in CASES]
)
def test_a_run_is_resumed_exactly_from_the_middle_of_an_epoch(tmp_path, monkeypatch, settings) -> None:
    check_resumes_within_epoch(tmp_path, monkeypatch, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        EVERYTHING,
        pytest.param(CASES["phase with some patches"] | {"train.ema": 0.9}, marks=pytest.mark.slow),
        pytest.param(CASES["DINO, accumulation"], marks=pytest.mark.slow),
    ],
    ids=["everything", "two phases", "DINO, accumulation"],
)
def test_a_recorded_step_is_resumed_exactly_from_the_middle_of_an_epoch(tmp_path, monkeypatch, settings) -> None:
    """The twin of the CUDA graph: recording it again must change neither the state nor the sums of the epoch."""
    monkeypatch.setattr(loop, "make_engine", GraphReplayedByHand)
    check_resumes_within_epoch(tmp_path, monkeypatch, **settings)


def test_the_first_epoch_is_resumed_exactly_and_its_seconds_are_added_up(tmp_path, monkeypatch) -> None:
    whole = tiny_run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(now=0.0)

        def run_next_step(engine):
            clock.now += 1.0
            real(engine)

        real = EagerEngine.run_next_step
        patch.setattr(EagerEngine, "run_next_step", run_next_step)
        patch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
        interrupt_within_epoch(monkeypatch, lambda: tiny_run(tmp_path / "cut"), step=5)
        run = open_run_or_newest(tmp_path / "cut" / "digits")
        assert run.metrics == []
        resume_within_epoch(run, step=5)
    assert untimed(run) == untimed(whole) and same_weights(run, whole)
    num_steps = run.metrics[0]["step"]
    assert [row["train_seconds"] for row in run.metrics] == [num_steps] * 3  # the two steps that were lost do not count


def test_a_long_epoch_is_saved_when_the_seconds_have_passed_and_never_with_zero(tmp_path, monkeypatch) -> None:
    """One second per step on the test's clock. The end of an epoch is saved once, as the end of the epoch."""
    for interval, expected in ((0, []), (5, [5, 10, 15, 20]), (6, [6, 18]), (1000, [])):
        with monkeypatch.context() as patch:
            clock, steps = SimpleNamespace(now=0.0), []
            real_step, real_save = EagerEngine.run_next_step, CheckpointSaver.save_within_epoch

            def run_next_step(engine, clock=clock, real_step=real_step):
                clock.now += 1.0
                real_step(engine)

            def save_within_epoch(saver, start, steps=steps, real_save=real_save):
                steps.append(saver.state.step)
                real_save(saver, start)

            patch.setattr(EagerEngine, "run_next_step", run_next_step)
            patch.setattr(CheckpointSaver, "save_within_epoch", save_within_epoch)
            patch.setattr(loop, "time", SimpleNamespace(monotonic=lambda clock=clock: clock.now))
            run = tiny_run(tmp_path, **{"train.epochs": 2, "train.save_seconds": interval})
        assert run.metrics[0]["step"] == 12 and steps == expected


def test_a_state_that_is_not_finite_is_never_saved_within_an_epoch(tmp_path, monkeypatch) -> None:
    from vitascope.training.objectives import classify

    states, real = [], classify.cross_entropy

    def save_within_epoch_at_every_step(saver, now):
        states.append(saver.state)
        return True

    def return_nan_at_step_15(*args):
        return real(*args) * (float("nan") if states and states[-1].step == 15 else 1)

    monkeypatch.setattr(CheckpointSaver, "is_due_within_epoch", save_within_epoch_at_every_step)
    monkeypatch.setattr(classify, "cross_entropy", return_nan_at_step_15)
    with pytest.raises(UserError, match=r"NaN or infinite at step 16 \(epoch 2\)"):
        tiny_run(tmp_path)
    checkpoint = load_checkpoint(open_run_or_newest(tmp_path / "digits")).state
    assert checkpoint is not None and checkpoint["step"] == 15
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())


KILLED = """
import os, signal, sys
from vitascope.training.loop import CheckpointSaver

def die_or_check_step(saver, now):
    if saver.state.step == {step} + 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return saver.state.step == {step}

CheckpointSaver.is_due_within_epoch = die_or_check_step
from vitascope.cli import main
main()
"""


@pytest.mark.slow
def test_a_run_killed_within_an_epoch_is_resumed_bit_by_bit(tmp_path) -> None:
    settings = TINY | EVERYTHING | {"train.threads": 1}
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [
        sys.executable,
        "-c",
        KILLED.format(step=STEP),
        "train",
        "digits",
        "--runs",
        str(tmp_path / "cut"),
        *words,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    assert killed.returncode == -signal.SIGKILL
    run = open_run_or_newest(tmp_path / "cut" / "digits")
    resume_within_epoch(run)
    whole = vitascope.train("digits", runs=tmp_path / "whole", quiet=True, **settings)
    assert untimed(run) == untimed(whole) and same_weights(run, whole)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "settings", [EVERYTHING, CASES["DINO, accumulation"]], ids=["everything", "DINO, accumulation"]
)
def test_a_cuda_graph_is_resumed_exactly_from_the_middle_of_an_epoch(tmp_path, monkeypatch, settings) -> None:
    settings = settings | {"train.device": "cuda", "train.cuda_graph": "always"}
    check_resumes_within_epoch(tmp_path, monkeypatch, **settings)
