"""`vitascope train`, `resume` and `lr-find`: train from the command line."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.console import create_console
from vitascope.cli.evaluate import RunPath
from vitascope.recipe.reading import read_recipe, split_required_recipe_args
from vitascope.recipe.schema import Recipe

RecipeArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE [KEY=VALUE]…",
        help="A recipe name or file, then settings such as train.epochs=20. Without arguments, the recipes are listed.",
    ),
]


def train(
    words: RecipeArguments = None,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
) -> None:
    """Train a model from a recipe, a YAML file of settings. Results go to runs/<recipe>/<date>-seed<n>/.

    Example: vitascope train digits train.epochs=20 model.depth=4
    """
    recipe = _read_recipe_arguments(words)
    from vitascope.training.train import train_recipe

    _run_and_exit_on_interrupt(lambda: train_recipe(recipe, runs, create_console()))


def resume(run: RunPath) -> None:
    """Resume an interrupted run. The result is bit-identical to an uninterrupted run.

    Example: vitascope resume runs/digits
    """
    from vitascope.run.directory import open_run_or_newest
    from vitascope.training.train import resume_run_if_unfinished

    interrupted_run = open_run_or_newest(run)
    _run_and_exit_on_interrupt(lambda: resume_run_if_unfinished(interrupted_run, create_console()))


def suggest_learning_rate(
    words: RecipeArguments = None,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "lr-find.png"
    ),
) -> None:
    """Suggest a learning rate: raise it step by step and measure the loss.

    Example: vitascope lr-find digits
    """
    recipe = _read_recipe_arguments(words)
    from vitascope.training.rate_finder import RULE, measure_learning_rate_curve

    result = measure_learning_rate_curve(recipe, create_console())
    result.save_figure(out)
    end = result.describe_divergence()
    if result.suggested_lr is None:
        print(f"No suggestion: the loss hardly fell in {len(result.learning_rates)} steps. {end}")
    else:
        muon = ""
        if recipe.train.optimizer == "muon":  # lr-find raises both rates in proportion
            muon = f" train.muon_lr={recipe.train.muon_lr * result.suggested_lr / recipe.train.lr:.2g}"
        print(f"Suggested: train.lr={result.suggested_lr:.2g}{muon}\nThis is {RULE} {end}")
        if muon:
            print("train.muon_lr was raised in proportion to train.lr. Change both together.")
    print(f"Figure: {out}")


def _read_recipe_arguments(arguments: list[str] | None) -> Recipe:
    return read_recipe(*split_required_recipe_args(arguments))


def _run_and_exit_on_interrupt(run_training: Callable[[], object]) -> None:
    """Run training. Ctrl-C and SIGTERM stop it after a save, with exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_training()
    except KeyboardInterrupt:
        sys.exit(130)
