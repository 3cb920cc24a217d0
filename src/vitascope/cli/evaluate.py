"""`vitascope evaluate`: how good is a run, on images it has not seen."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitascope.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from vitascope.training.opening_test import Evaluation


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's directory, or a recipe's: its newest run.")],
    split: Annotated[str, typer.Option(help="test, val or train.")] = "test",
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Accuracy of the last epoch's weights. Each opening of the test set is written into the run."""
    from vitascope.run.directory import open_run
    from vitascope.training.opening_test import SPLITS, evaluate

    if split not in SPLITS:
        raise UserError(f"--split {split} is unknown. {did_you_mean(split, SPLITS)}")
    found = evaluate(open_run(run), split)
    if as_json:
        print(
            json.dumps(
                {"split": split, "accuracy": found.score.accuracy, "loss": found.score.loss, "n": found.score.images}
            )
        )
        return
    print_evaluation(found)


def print_evaluation(found: "Evaluation") -> None:
    share, images = found.score.accuracy, found.score.images
    print(f"{found.split} accuracy {share:.2%} on {images:,} images, loss {found.score.loss:.3f}")
    if found.opening and found.opening > 1:
        print(f"This run has opened the test set {found.opening} times; only its first number is free of your choices.")
