"""A run's model and some images -> everything that is known about how good it is on them."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vitascope.data.source import Labels, Split
from vitascope.errors import UserError
from vitascope.evaluation.calibration import Calibration, Temperature, calibration, fit_temperature, scaled
from vitascope.evaluation.choosing import Choice, choose, watched_or_learnt
from vitascope.evaluation.confusion import ClassScore, confusion, per_class
from vitascope.evaluation.intervals import wilson
from vitascope.evaluation.openings import note_opening, note_result, read_openings
from vitascope.evaluation.robustness import Decline, robustness
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.schema import Recipe
from vitascope.run.directory import Run
from vitascope.run.weights import ModelFacts
from vitascope.shapes import Logits
from vitascope.training.hardware import hardware_of
from vitascope.training.scoring import logits_of

WORST = 24


@dataclass(frozen=True)
class Mistake:
    """An image, what it is, what the model said, and how sure it was of both."""

    index: int  # in the split
    file: str | None
    label: str
    said: str
    probability: float  # of what was said
    probability_of_label: float


@dataclass(frozen=True)
class Evaluation:
    """The numbers; `choice` holds the images they were found on."""

    run: Run
    choice: Choice
    classes: list[str]
    views: int
    weights: str  # last or best
    opening: int | None  # the how-manieth opening of these test images by this run; None for other splits
    seconds: float  # for the logits
    accuracy: float
    interval: tuple[float, float]
    top5: float
    confusion: Tensor
    calibration: Calibration
    temperature: Temperature | None  # None: no validation images to fit it on
    per_class: dict[str, ClassScore]
    worst: list[Mistake]
    robustness: dict[str, Decline]  # empty where it was not asked for

    def as_dict(self) -> dict[str, Any]:
        """For --json and report.json; shares are fractions."""
        told = asdict(self.calibration)
        return {
            "run": str(self.run.path),
            "data": self.choice.data,
            "split": self.choice.split,
            "images": len(self.choice.images),
            "views": self.views,
            "weights": self.weights,
            "opening": self.opening,
            "seconds": round(self.seconds, 3),
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "top5": self.top5,
            "loss": told.pop("loss"),
            "brier": told.pop("brier"),
            "ece": told.pop("ece"),
            "calibration": told,
            "temperature": asdict(self.temperature) if self.temperature else None,
            "per_class": {name: asdict(row) for name, row in self.per_class.items()},
            "confusion": self.confusion.tolist(),
            "worst": [asdict(mistake) for mistake in self.worst],
            "robustness": {name: asdict(decline) for name, decline in self.robustness.items()},
        }

    def _repr_html_(self) -> str:
        from vitascope.evaluation.figures import as_html

        return as_html(self)


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
    """In float32, on the device the model is on. A look at test images is written into the run, before and after."""
    recipe = run.recipe
    check_views(recipe, views)
    choice = choose(recipe, facts, split, data)
    number = None
    if choice.split in ("test", "all"):
        number = note_opening(run, choice.data, len(choice.images), views, weights)
    start = time.monotonic()
    logits = logits_of(model, choice.images.images, facts.preparation, hardware_of(model), views=views)
    seconds = time.monotonic() - start
    opening = None
    if number is not None:
        opening = sum(known.data == choice.data for known in read_openings(run))
    found = judged(model, run, facts, choice, logits, views, weights, opening, seconds, robust)
    if number is not None:
        note_result(run, number, _for_the_record(found))
    return found


def judged(
    model: VisionTransformer,
    run: Run,
    facts: ModelFacts,
    choice: Choice,
    logits: Logits,
    views: int,
    weights: str,
    opening: int | None,
    seconds: float,
    robust: bool,
) -> Evaluation:
    """Logits -> all the numbers."""
    labels, hardware = choice.images.labels, hardware_of(model)
    said = logits.argmax(1)
    counts = confusion(labels, said, len(facts.classes))
    right = int(counts.diagonal().sum())
    watched = watched_or_learnt(run.recipe, facts, "val")
    temperature = None
    if watched is not None:
        seen = logits_of(model, watched.images, facts.preparation, hardware, views=views)
        temperature = scaled(logits, labels, fit_temperature(seen, watched.labels), len(watched))
    return Evaluation(
        run=run,
        choice=choice,
        classes=facts.classes,
        views=views,
        weights=weights,
        opening=opening,
        seconds=seconds,
        accuracy=right / len(labels),
        interval=wilson(right, len(labels)),
        top5=top_share(logits, labels, 5),
        confusion=counts,
        calibration=calibration(logits, labels),
        temperature=temperature,
        per_class=per_class(counts, facts.classes),
        worst=worst_mistakes(logits, choice.images, facts.classes),
        robustness=robustness(model, choice.images, facts.preparation, hardware, views) if robust else {},
    )


def check_views(recipe: Recipe, views: int) -> None:
    if views not in (1, 2):
        raise UserError(f"--views {views}: choose 1 (the image) or 2 (the image and its mirror image).")
    if views == 2 and not recipe.data.augment.flip:
        raise UserError("--views 2 adds the mirror image, which this run never saw: data.augment.flip was 0. Use 1.")


def top_share(logits: Logits, labels: Labels, count: int) -> float:
    """The share of images whose class is among the `count` likeliest (all of them, where there are fewer classes)."""
    likely = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return (likely == labels[:, None]).any(1).double().mean().item()


def worst_mistakes(logits: Logits, split: Split, classes: list[str], most: int = WORST) -> list[Mistake]:
    """The wrong answers with the smallest probability of the truth, worst first."""
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
    """What `vitascope record` takes from an opening."""
    return {
        "accuracy": found.accuracy,
        "loss": found.calibration.loss,
        "top5": found.top5,
        "ece": found.calibration.ece,
        "recall": {name: row.recall for name, row in found.per_class.items()},
        "seconds": round(found.seconds, 3),
    }
