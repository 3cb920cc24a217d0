"""`vitascope train`, `resume`, `lr-find`: learning, as a user starts it."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.evaluate import RunPath
from vitascope.cli.tables import console
from vitascope.recipe.reading import read_recipe, recipe_first
from vitascope.recipe.schema import Recipe

Words = Annotated[
    list[str] | None, typer.Argument(metavar="RECIPE [KEY=VALUE]…", help="A recipe's name or path, and settings.")
]


def train(
    words: Words = None,
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
) -> None:
    """Train a recipe; everything it leaves is in runs/<recipe>/<when>-seed<n>/.

    Example: vitascope train digits train.epochs=20 model.depth=4
    """
    recipe = _read(words)
    from vitascope.training.train import train_recipe

    _stoppable(lambda: train_recipe(recipe, runs, console()))


def resume(run: RunPath) -> None:
    """Go on with a run that was stopped, exactly as if it had not been."""
    from vitascope.run.directory import open_run
    from vitascope.training.train import resume_run

    found = open_run(run)
    _stoppable(lambda: resume_run(found, console()))


def lr_find(
    words: Words = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes; the ending is the format.")] = Path("lr-find.png"),
) -> None:
    """Raise the learning rate step by step and see where the loss falls fastest, and where it breaks."""
    recipe = _read(words)
    from vitascope.training.rate_finder import find_rate

    found = find_rate(recipe, console())
    found.draw(out)
    if found.suggested is None:
        print(
            f"The loss hardly fell in {len(found.rates)} steps, no rate is suggested; it breaks at {found.broken:.1e}."
        )
    else:
        print(f"Suggested: train.lr={found.suggested:.1e}   (the loss breaks at {found.broken:.1e})")
    print(f"Picture: {out}")


def _read(words: list[str] | None) -> Recipe:
    return read_recipe(*recipe_first(words))


def _stoppable(work: Callable[[], object]) -> None:
    """Ctrl-C and a polite kill end the loop, which saves; the exit code says so."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work()
    except KeyboardInterrupt:
        sys.exit(130)
