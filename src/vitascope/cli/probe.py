"""`vitascope probe`: evaluate a run's frozen features."""

import json
from typing import Annotated

import typer
from rich.console import Console

from vitascope.cli.evaluate import Best, RunPath
from vitascope.cli.loading import loaded
from vitascope.cli.tables import console, table


def probe(
    run: RunPath,
    split: Annotated[str, typer.Option(help="val (validation images) or test.")] = "val",
    neighbours: Annotated[int, typer.Option(help="Number of nearest neighbours.")] = 20,
    labels: Annotated[float, typer.Option(help="Fraction of the training labels to use.")] = 1.0,
    max_images: Annotated[int, typer.Option(help="Use at most this many training images. 0: all.")] = 0,
    best: Best = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Evaluate a run's frozen features with k-nearest neighbours and a linear probe.

    Example: vitascope probe runs/cifar10-dino --labels 0.1
    """
    from vitascope.evaluation.probe import probe as look
    from vitascope.evaluation.report import split_name

    model = loaded(run, best=best, device="auto")
    with Console(stderr=True).status(
        "Computing features. On a CPU this can take minutes; --max-images limits the images …"
    ):
        found = look(model, split, neighbours=neighbours, max_images=max_images, labels=labels)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    print(f"Run: {model.run.path}")
    rows = [
        [f"k-nearest neighbours (k={found.neighbours})", f"{found.knn:.2%}", _range(found.knn_interval)],
        ["linear probe", f"{found.linear:.2%}", _range(found.linear_interval)],
    ]
    title = f"Accuracy on {found.images:,} {split_name(found.split)} images, fitted on {found.known:,} training images"
    console().print(table(title, ["classifier", "accuracy", "95 % confidence interval"], rows, right=("accuracy",)))
    print(f"Feature spread: {found.spread:.3f} (0: collapsed, all images have the same features; 1: maximal)")


def _range(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2%} to {interval[1]:.2%}"
