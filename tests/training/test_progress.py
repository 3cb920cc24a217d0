"""The progress line and the messages printed before and during training."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from vitascope.data.config import resolve_augmentation
from vitascope.draw.curves import draw_learning_curves
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.training import messages
from vitascope.training.loop import EpochRecord, StepProgress
from vitascope.training.messages import (
    describe_teacher,
    explain_worse_training_metrics,
    make_curves_title,
)


@pytest.mark.parametrize(
    ("seconds_per_step", "duration"),
    [(36.0, "about 40 hours"), (1.0, "about 66 minutes"), (0.8, None)],
)
def test_a_long_run_prints_its_estimated_duration_once(monkeypatch, seconds_per_step, duration) -> None:
    """By hand: 4 epochs of 1,000 steps less the first 11. The 500 s before the first step are not counted."""
    clock = iter([500.0 + seconds_per_step * step for step in range(60)])
    monkeypatch.setattr(messages.time, "monotonic", lambda: next(clock))
    output = io.StringIO()
    records = (StepProgress(0, step + 1, 1000, 1.0) for step in range(60))
    assert list(messages.show_progress_and_yield_epochs(records, 4, 0, Console(file=output))) == []
    assert output.getvalue().count("Estimated duration") == (duration is not None)
    assert duration is None or f"Estimated duration: {duration}." in output.getvalue()


def test_the_estimate_of_a_resumed_run_counts_only_remaining_epochs(monkeypatch) -> None:
    clock = iter([20.0 * step for step in range(5)])
    monkeypatch.setattr(messages.time, "monotonic", lambda: next(clock))
    output = io.StringIO()
    records = (StepProgress(3, step + 900, 1000, 1.0) for step in range(3))
    list(messages.show_progress_and_yield_epochs(records, 4, 3, Console(file=output)))
    assert "Estimated duration" not in output.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_the_progress_line_shows_the_remaining_time(width) -> None:
    metrics = {
        "epoch": 100,
        "train_loss": 1.234,
        "train_accuracy": 1.0,
        "val_accuracy": 1.0,
        "images_per_second": 12345,
    }
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None)
    list(messages.show_progress_and_yield_epochs(iter([EpochRecord(metrics)]), 300, 0, console))
    line = [line for line in output.getvalue().splitlines() if "epoch 100/300" in line][-1]
    assert (
        f"epoch 100/300  {'train ' if width == 160 else ''}loss 1.234  train" in line
        and ":" in line.split("left" if width == 80 else "remaining")[1]
    )


def complete(name: str, *overrides: str) -> Recipe:
    """The recipe with the augmentation of its data set, as training uses it."""
    recipe = read_recipe(name, list(overrides))
    augment = resolve_augmentation(recipe.data.augment, recipe.data.name, recipe.model.in_chans)
    return replace(recipe, data=replace(recipe.data, augment=augment))


def test_the_curves_name_only_what_changes_the_training_values() -> None:
    title = make_curves_title(complete("digits"))
    names = "augmentation, mixup and label smoothing"
    assert title == (
        f"digits, seed 0. Training values include {names}, so they can be worse than validation values. "
        "Validation uses the averaged weights (EMA)"
    )
    off = [f"data.augment.{name}=0" for name in ("mixup", "shift", "rotate", "scale")]
    assert make_curves_title(complete("digits", *off, "train.label_smoothing=0", "train.ema=0")) == "digits, seed 0"
    curves = {"loss": {"train": [(1.0, 2.0)]}, "accuracy": {"train": [(1.0, 1.0)]}}
    caption = draw_learning_curves(curves, title).get_supxlabel()
    assert "CutMix" not in caption and names in caption.replace("\n", " ")


def test_the_curves_name_distillation_and_class_weights() -> None:
    recipe = read_recipe("digits", ["train.distill=runs/teacher", "data.balance=loss"])
    title = make_curves_title(recipe)
    assert "Training loss includes class weights (data.balance=loss). Training values include " in title
    assert "label smoothing and distillation, so they can be worse than validation values" in title
    assert describe_teacher(recipe).startswith("Teacher: runs/teacher (")
    assert describe_teacher(read_recipe("digits", [])) is None


def test_the_caption_and_the_screen_say_that_validation_uses_averaged_weights() -> None:
    sentence = "Validation uses the averaged weights (EMA)"
    plain = ["train.label_smoothing=0", "data.augment.mixup=0"]
    for settings, uses_ema in (([], True), (["train.ema=0"], False), (plain, True), ([*plain, "train.ema=0"], False)):
        recipe = read_recipe("digits", settings)
        assert (sentence in make_curves_title(recipe)) == uses_ema
        assert (f"{sentence}." in (explain_worse_training_metrics(recipe) or "")) == uses_ema
    assert sentence in make_curves_title(read_recipe("cifar10-dino", ["train.ema=0"]))


@pytest.mark.parametrize(("seconds", "text"), [(60.0, "Remaining: about 18 minutes"), (1.0, None)])
def test_without_a_terminal_the_remaining_time_is_printed_after_the_second_epoch(monkeypatch, seconds, text) -> None:
    """By hand: 18 epochs remain after the second of 20. The slow first epoch is not counted."""
    clock = iter([0.0, 1000.0, *(1000.0 + seconds * epoch for epoch in range(1, 9))][1:])
    monkeypatch.setattr(messages.time, "monotonic", lambda: next(clock))
    output, row = io.StringIO(), {"train_loss": 1.0, "val_accuracy": 0.5, "images_per_second": 100.0}
    records = iter([EpochRecord({"epoch": epoch} | row) for epoch in (1, 2, 3)])
    list(messages.show_progress_and_yield_epochs(records, 20, 0, Console(file=output)))
    assert output.getvalue().count("Remaining") == (text is not None) and (text or "") in output.getvalue()
