"""`vitascope data list | describe | preview`: list data sets, describe them and preview augmentation."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="List, describe and preview data sets.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A data set name, a folder with one subfolder per class, or an .npz file.")]
Root = Annotated[
    str | None, typer.Option(help="Folder of the named data sets. Default: $VITASCOPE_DATA, or the cache folder.")
]


@app.command("list")
def list_(root: Root = None) -> None:
    """List the named data sets and show which are on this machine."""
    from vitascope.data.named import NAMED, find
    from vitascope.data.places import data_root

    place = data_root(root)
    print(f"Data root: {place}")
    print(f"  {'digits':<14} {'built in':<10} handwritten digits, 8×8 grayscale, 898 training and 899 test images")
    for name, facts in NAMED.items():
        print(f"  {name:<14} {'available' if find(name, place) else 'not found':<10} {facts.words}")
    print("Your own data: a folder with one subfolder of images per class, or an .npz file with the arrays")
    print("x_train, y_train, x_test and y_test.")


@app.command()
def describe(
    name: Name,
    root: Root = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Show image counts and sizes, class balance, pixel mean and standard deviation, and duplicate images."""
    from vitascope.data.description import describe_data

    found = describe_data(name, root)
    print(json.dumps(found.as_dict(), indent=1) if as_json else found.as_text())


@app.command()
def preview(
    name: Name,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Settings, such as data.augment.flip=0.")
    ] = None,
    root: Root = None,
    seed: Annotated[int, typer.Option(help="Random seed of the augmentation.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "preview.png"
    ),
) -> None:
    """Draw some images and their augmented versions, as used in training.

    Example: vitascope data preview cifar10 data.augment.flip=0
    """
    from vitascope.cli.preview import draw_preview

    print(f"Figure: {draw_preview(name, settings or [], root, seed, out)}")
