"""`vitascope data list | describe | preview`: what is there to train on, and what augmentation makes of it."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Data sets: what there is, what is in them, what augmentation makes of them.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(help="A data set's name, a folder of class folders, or an .npz file.")]
Root = Annotated[str | None, typer.Option(help="Where named data lies; else $VITASCOPE_DATA, else the cache folder.")]


@app.command("list")
def list_(root: Root = None) -> None:
    """The data sets known by name, and which are here."""
    from vitascope.data.named import NAMED, find
    from vitascope.data.places import data_root

    place = data_root(root)
    print(f"Data root: {place}")
    print(f"  {'digits':<14} {'embedded':<10} handwritten digits, 8×8 grey, 898 + 899")
    for name, facts in NAMED.items():
        print(f"  {name:<14} {'here' if find(name, place) else 'not here':<10} {facts.words}")
    print("Your own: a folder with a folder of images per class, or a .npz file with x_train y_train x_test y_test.")


@app.command()
def describe(
    name: Name,
    root: Root = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Counts, sizes, class balance, mean and deviation, exact copies within and across splits."""
    from vitascope.data.description import describe_data

    found = describe_data(name, root)
    print(json.dumps(found.as_dict(), indent=1) if as_json else found.as_text())


@app.command()
def preview(
    name: Name,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Such as data.augment.flip=0.")
    ] = None,
    root: Root = None,
    seed: Annotated[int, typer.Option(help="For the draws.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Where the picture goes; the ending is the format.")] = Path("preview.png"),
) -> None:
    """A picture of some images and what the training will see of them."""
    from vitascope.cli.preview import draw_preview

    print(f"Picture: {draw_preview(name, settings or [], root, seed, out)}")
