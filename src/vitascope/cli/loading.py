"""A word for a model -> the model; what had to be assumed about weights from outside goes to stderr."""

import sys
from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitascope.evaluation.trained import TrainedTransformer


def loaded(run: str | PathLike[str], **how: Any) -> "TrainedTransformer":
    """`vitascope.load`, and its notes said."""
    from vitascope.evaluation.trained import load

    model = load(run, **how)
    print_notes(model.notes)
    return model


def print_notes(notes: Iterable[str]) -> None:
    for line in notes:
        print(f"vitascope: {line}", file=sys.stderr)
