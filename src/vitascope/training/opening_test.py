"""A finished run -> its score on the test images; every opening of them is written into the run."""

from dataclasses import dataclass
from datetime import UTC, datetime

from vitascope.data.opening import open_source
from vitascope.data.training_data import open_training_data
from vitascope.errors import UserError
from vitascope.run.directory import Run
from vitascope.run.files import append_line
from vitascope.run.weights import load, read_facts
from vitascope.training.evaluation import Score, score
from vitascope.training.hardware import plain_hardware

SPLITS = ("test", "val", "train")


@dataclass(frozen=True)
class Evaluation:
    """What was scored, on which images, for which time."""

    split: str
    score: Score
    opening: int | None  # the how-manieth opening of the test set by this run; None for other splits


def evaluate(run: Run, split: str = "test") -> Evaluation:
    """Last epoch's weights, float32."""
    facts, recipe, model = read_facts(run), run.recipe, load(run)
    hardware = plain_hardware()
    size, channels = facts.model.image_shape, facts.model.in_chans
    if split == "test":
        source = open_source(recipe.data, size, channels)
        if "test" not in source.splits:
            raise UserError(f"{recipe.data.name} has no test images. Add a test/ folder, or use --split val.")
        if source.classes != facts.classes:
            raise UserError(f"{recipe.data.name} has other classes now than the run learnt: {source.classes[:5]} …")
        images = source.load("test")
    else:
        data = open_training_data(recipe.data, size, channels, recipe.train.seed)
        images = data.train if split == "train" else data.validation
    if images is None:
        raise UserError("data.validation=0 held no images back. Use --split test or train.")
    opening = _note_opening(run, len(images)) if split == "test" else None
    found = score(model.to(hardware.device), images, facts.preparation, hardware)
    if opening:
        append_line(
            run.file("test-openings.jsonl"), {"opening": opening, "accuracy": found.accuracy, "loss": found.loss}
        )
    return Evaluation(split, found, opening)


def _note_opening(run: Run, images: int) -> int:
    """Written before the images are looked at, so that none goes unnoticed; the result follows on a line of its own."""
    path = run.file("test-openings.jsonl")
    lines = path.read_text().splitlines() if path.is_file() else []
    opening = 1 + sum('"when"' in line for line in lines)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    append_line(path, {"opening": opening, "when": when, "images": images})
    return opening
