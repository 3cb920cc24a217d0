"""Load a model for a command; print assumptions about pretrained weights to stderr."""

import sys
from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitascope.evaluation.trained import TrainedTransformer


def loaded(run: str | PathLike[str], **how: Any) -> "TrainedTransformer":
    """Load a model with `vitascope.load` and print its notes."""
    from vitascope.evaluation.trained import load

    model = load(run, **how)
    print_notes(model.notes)
    return model


def print_notes(notes: Iterable[str]) -> None:
    for line in notes:
        print(f"vitascope: {line}", file=sys.stderr)
