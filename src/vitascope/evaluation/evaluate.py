"""Evaluate a model on images: accuracy, calibration, scores per class, worst errors and robustness."""

import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitascope.data.source import Labels, Split, UInt8Images
from vitascope.data.statistics import data_hash
from vitascope.errors import UserError
from vitascope.evaluation.calibration import calibration, fit_temperature, scaled
from vitascope.evaluation.choosing import Choice, choose, own_images
from vitascope.evaluation.confusion import confusion, per_class
from vitascope.evaluation.openings import note_opening, note_result, read_openings
from vitascope.evaluation.report import Evaluation, Mistake, describe_reduction
from vitascope.evaluation.robustness import robustness
from vitascope.model.vit import VisionTransformer
from vitascope.run.directory import Run
from vitascope.run.machine import device_names, machine_name
from vitascope.run.wall_clock import EVALUATE, begin_task, measure_task_seconds, was_trained_here
from vitascope.shapes import Logits
from vitascope.training.hardware import hardware_of
from vitascope.training.scoring import batch_for, logits_of
from vitascope.training.views import check_views
from vitascope.weights.facts import ModelFacts

WORST = 24
UNSCALED = "No temperature scaling"


def evaluate(
    model: VisionTransformer,
    run: Run,
    facts: ModelFacts,
    *,
    split: str | None = None,
    data: str | None = None,
    views: int = 1,
    weights: str = "last",
    robust: bool = True,
) -> Evaluation:
    """Evaluate in float32 on the model's device. Each use of test images is logged in the run, before and after."""
    check_views(run.recipe, views)
    choice = choose(run, facts, split, data)
    value, words = temperature_for(model, run, facts, choice, views)
    tie = _noted(model, run, choice, views, weights) if choice.split in ("test", "all") else None
    logits, seconds, set_up, wall = _compute_logits_timed(model, run, choice.images.images, facts, views)
    labels, classes = choice.images.labels, facts.classes
    counts = confusion(labels, logits.argmax(1), len(classes))
    found = Evaluation(
        run=run,
        choice=choice,
        classes=classes,
        views=views,
        weights=weights,
        opening=next((known.number for known in read_openings(run) if known.line == tie), None),
        seconds=seconds,
        set_up_seconds=set_up,
        wall_seconds=wall,
        top5=top_share(logits, labels, 5),
        confusion=counts,
        calibration=calibration(logits, labels),
        temperature=scaled(logits, labels, *value) if value else None,
        temperature_words=words,
        per_class=per_class(counts, classes),
        worst=worst_mistakes(logits, choice.images, classes),
    )
    if tie is not None:  # before the slow part, so that an interrupted evaluation has its result
        note_result(run, tie, _for_the_record(found))
    declines = robustness(model, choice.images, facts.preparation, hardware_of(model), views) if robust else {}
    return replace(found, reduction=describe_reduction(facts.model), robustness=declines)


def temperature_for(
    model: VisionTransformer, run: Run, facts: ModelFacts, choice: Choice, views: int
) -> tuple[tuple[float, int] | None, str]:
    """Return the temperature and the number of validation images, and a text; or None and the reason."""
    if choice.own and choice.split == "val":
        return None, f"{UNSCALED}: it would be fitted on these same images."
    try:
        watched = own_images(run, facts, "val")
    except UserError as error:
        return None, f"{UNSCALED}: {error}"
    if watched is None:
        return None, f"{UNSCALED}: the run has no validation images (data.validation=0)."
    seen = logits_of(model, watched.images, facts.preparation, hardware_of(model), views=views)
    value = fit_temperature(seen, watched.labels)
    if value is None:
        right = bool((seen.argmax(1) == watched.labels.to(seen.device)).all())
        why = "all correct" if right else "no better than random guessing"
        return None, f"{UNSCALED}: predictions on the {len(watched):,} validation images are {why}."
    return (value, len(watched)), f"fitted on {len(watched):,} validation images"


def _noted(model: VisionTransformer, run: Run, choice: Choice, views: int, weights: str) -> int:
    return note_opening(
        run,
        data=choice.data,
        split=choice.split,
        images=len(choice.images),
        views=views,
        weights=weights,
        machine=machine_name(device_names(), hardware_of(model).device),
        data_hash=data_hash(choice.images.images, choice.images.labels),
    )


def top_share(logits: Logits, labels: Labels, count: int) -> float:
    """Return the top-`count` accuracy: the fraction of images whose class is among the `count` most probable."""
    likely = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return (likely == labels[:, None]).any(1).double().mean().item()


def worst_mistakes(logits: Logits, split: Split, classes: list[str], most: int = WORST) -> list[Mistake]:
    """Return the wrong predictions with the lowest probability of the true class, worst first."""
    shares = logits.double().softmax(1)
    said = logits.argmax(1)
    truth = shares.gather(1, split.labels[:, None])[:, 0]
    wrong = (said != split.labels).nonzero().flatten()
    order = wrong[torch.argsort(truth[wrong], stable=True)][:most].tolist()
    return [
        Mistake(
            index,
            split.names[index] if split.names else None,
            classes[int(split.labels[index])],
            classes[int(said[index])],
            shares[index, said[index]].item(),
            truth[index].item(),
        )
        for index in order
    ]


def _for_the_record(found: Evaluation) -> dict[str, Any]:
    """Return what `vitascope record` reads from the log of test set uses."""
    wall = {}
    if found.wall_seconds is not None:
        wall = {"wall_seconds": round(found.wall_seconds, 2), "wall_includes_training": was_trained_here(found.run)}
    return {
        "accuracy": found.accuracy,
        "loss": found.loss,
        "top5": found.top5,
        "ece": found.ece,
        "recall": {name: row.recall for name, row in found.per_class.items()},
        "seconds": round(found.seconds, 3),
        "set_up_seconds": round(found.set_up_seconds, 3),
        **wall,
    }


class TimedLogits(NamedTuple):
    """Logits and their computing time. On a GPU, a first empty batch loads the kernels; it counts as set-up."""

    logits: Tensor
    seconds: float
    set_up_seconds: float
    wall_seconds: float | None  # from the process's start


def _compute_logits_timed(
    model: VisionTransformer, run: Run, images: UInt8Images, facts: ModelFacts, views: int
) -> TimedLogits:
    begin_task(EVALUATE, run)
    hardware, start = hardware_of(model), time.monotonic()
    if hardware.device == "cuda":
        logits_of(model, torch.zeros_like(images[: batch_for(model, hardware.device)]), facts.preparation, hardware)
    ready = time.monotonic()
    logits = logits_of(model, images, facts.preparation, hardware, views=views)
    return TimedLogits(logits, time.monotonic() - ready, ready - start, measure_task_seconds(run))
