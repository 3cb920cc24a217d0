"""A finished run -> its score on the test images; every opening of them is written into the run."""

from dataclasses import dataclass
from datetime import UTC, datetime

from vitascope.data.opening import open_source
from vitascope.data.training_data import open_training_data
from vitascope.errors import UserError
from vitascope.run.directory import Run, append_line
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
        images = source.load("test")
    else:
        data = open_training_data(recipe.data, size, channels, recipe.train.seed)
        images = data.train if split == "train" else data.validation
    if images is None:
        raise UserError("data.validation=0 held no images back. Use --split test or train.")
    found = score(model.to(hardware.device), images, facts.preparation, hardware)
    return Evaluation(split, found, _note_opening(run, found) if split == "test" else None)


def _note_opening(run: Run, found: Score) -> int:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    append_line(
        run,
        "test-openings.jsonl",
        {"when": when, "accuracy": found.accuracy, "loss": found.loss, "images": found.images},
    )
    return len(run.file("test-openings.jsonl").read_text().splitlines())
