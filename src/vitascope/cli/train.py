"""`vitascope train`, `resume` and `lr-find`: train from the command line."""

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
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [KEY=VALUE]…",
        help="A recipe name or file, then settings such as train.epochs=20. Without arguments, the recipes are listed.",
    ),
]


def train(
    words: Words = None,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
) -> None:
    """Train a model from a recipe, a YAML file of settings. Results go to runs/<recipe>/<date>-seed<n>/.

    Example: vitascope train digits train.epochs=20 model.depth=4
    """
    recipe = _read(words)
    from vitascope.training.train import train_recipe

    _stoppable(lambda: train_recipe(recipe, runs, console()))


def resume(run: RunPath) -> None:
    """Resume an interrupted run. The result is bit-identical to an uninterrupted run.

    Example: vitascope resume runs/digits
    """
    from vitascope.run.directory import open_run
    from vitascope.training.train import resume_run

    found = open_run(run)
    _stoppable(lambda: resume_run(found, console()))


def lr_find(
    words: Words = None,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "lr-find.png"
    ),
) -> None:
    """Suggest a learning rate: raise it step by step and measure the loss.

    Example: vitascope lr-find digits
    """
    recipe = _read(words)
    from vitascope.training.rate_finder import RULE, find_rate

    found = find_rate(recipe, console())
    found.draw(out)
    end = f"The loss diverges above {found.broken:.2g}." if found.broken else "The loss did not diverge."
    if found.suggested is None:
        print(f"No suggestion: the loss hardly fell in {len(found.rates)} steps. {end}")
    else:
        muon = ""
        if recipe.train.optimizer == "muon":  # lr-find raises both rates in proportion
            muon = f" train.muon_lr={recipe.train.muon_lr * found.suggested / recipe.train.lr:.2g}"
        print(f"Suggested: train.lr={found.suggested:.2g}{muon}\nThis is {RULE} {end}")
        if muon:
            print("train.muon_lr was raised in proportion to train.lr. Change both together.")
    print(f"Figure: {out}")


def _read(words: list[str] | None) -> Recipe:
    return read_recipe(*recipe_first(words))


def _stoppable(work: Callable[[], object]) -> None:
    """Run training. Ctrl-C and SIGTERM stop it after a save, with exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work()
    except KeyboardInterrupt:
        sys.exit(130)
