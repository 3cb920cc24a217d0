"""What a run shows while it learns."""

import io

import pytest
from rich.console import Console

from vitascope.training import progress
from vitascope.training.loop import StepProgress


@pytest.mark.parametrize(
    ("seconds_a_step", "said"),
    [(36.0, "about 40 hours"), (1.0, "about 66 minutes"), (0.8, None)],
)
def test_a_run_of_hours_says_so_once_after_its_first_seconds(monkeypatch, seconds_a_step, said) -> None:
    """By hand: 4 epochs of 1,000 steps less the first 11. Setting up, 500 s, is not taken for the run's speed."""
    clock = iter([500.0 + seconds_a_step * step for step in range(60)])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    told = io.StringIO()
    records = (StepProgress(0, step + 1, 1000, 1.0) for step in range(60))
    assert list(progress.show_progress(records, 4, 0, Console(file=told))) == []
    assert told.getvalue().count("Estimated duration") == (said is not None)
    assert said is None or f"Estimated duration: {said}." in told.getvalue()


def test_what_is_left_counts_not_what_a_resumed_run_has_done(monkeypatch) -> None:
    clock = iter([20.0 * step for step in range(5)])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    told = io.StringIO()
    records = (StepProgress(3, step + 900, 1000, 1.0) for step in range(3))
    list(progress.show_progress(records, 4, 3, Console(file=told)))
    assert "Estimated duration" not in told.getvalue()
