"""`vitascope probe`: what a run's features are worth, without training it any further."""

import json
from typing import Annotated

import typer
from rich.console import Console

from vitascope.cli.evaluate import RunPath
from vitascope.cli.loading import loaded
from vitascope.cli.tables import console, table


def probe(
    run: RunPath,
    split: Annotated[str, typer.Option(help="val (images held back from training) or test.")] = "val",
    neighbours: Annotated[int, typer.Option(help="How many training images vote.")] = 20,
    labels: Annotated[float, typer.Option(help="Share of the training images whose labels may be used.")] = 1.0,
    most: Annotated[int, typer.Option(help="Use at most so many training images, 0: all.")] = 0,
    best: Annotated[bool, typer.Option("--best", help="The best epoch on validation images, not the last.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Nearest neighbours and a linear probe on a run's frozen features: how much it has learnt, with or without labels.

    Example: vitascope probe runs/cifar10-dino --labels 0.1
    """
    from vitascope.evaluation.probe import probe as look

    model = loaded(run, best=best, device="auto")
    with Console(stderr=True).status("Looking at the training images; on a CPU this may take minutes (--most: less) …"):
        found = look(model, split, neighbours=neighbours, most=most, labels=labels)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    print(f"Run: {model.run.path}")
    rows = [
        [f"{found.neighbours} nearest neighbours", f"{found.knn:.2%}", _range(found.knn_interval)],
        ["linear probe", f"{found.linear:.2%}", _range(found.linear_interval)],
    ]
    title = f"{found.images:,} {found.split} images, by features and labels of {found.known:,} training images"
    console().print(table(title, ["by", "recognised", "95 % interval"], rows, right=("recognised",)))
    print(f"Spread of the features: {found.spread:.3f} (0: the same for all images).")


def _range(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2%} to {interval[1]:.2%}"
