"""`vitascope data list | describe | preview`: list data sets, describe them and preview augmentation."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="List, describe and preview data sets.", no_args_is_help=True)
DataName = Annotated[
    str, typer.Argument(help="A data set name, a folder with one subfolder per class, or an .npz file.")
]
DataRoot = Annotated[
    str | None, typer.Option(help="Folder of the named data sets. Default: $VITASCOPE_DATA, or the cache folder.")
]


@app.command("list")
def print_data_sets(root: DataRoot = None) -> None:
    """List the named data sets and show which are on this machine."""
    from vitascope.data.data_root import resolve_data_root
    from vitascope.data.sources.named import PUBLISHED_DATASETS, open_published_dataset_if_found

    data_root = resolve_data_root(root)
    print(f"Data root: {data_root}")
    print(f"  {'digits':<14} {'built in':<10} handwritten digits, 8×8 grayscale, 898 training and 899 test images")
    for name, dataset in PUBLISHED_DATASETS.items():
        status = "available" if open_published_dataset_if_found(name, data_root) else "not found"
        print(f"  {name:<14} {status:<10} {dataset.description}")
    print("Your own data: a folder with one subfolder of images per class, or an .npz file with the arrays")
    print("x_train, y_train, x_test and y_test.")


@app.command("describe")
def print_data_summary(
    name: DataName,
    root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Show image counts and sizes, class balance, pixel mean and standard deviation, and duplicate images."""
    from vitascope.data.statistics import open_and_summarize_all_splits

    summary = open_and_summarize_all_splits(name, root)
    print(json.dumps(summary.as_dict(), indent=1) if as_json else summary.format_text())


@app.command("preview")
def save_preview_figure(
    name: DataName,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Settings, such as data.augment.flip=0.")
    ] = None,
    root: DataRoot = None,
    seed: Annotated[int, typer.Option(help="Random seed of the augmentation.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "preview.png"
    ),
) -> None:
    """Draw some images and augmented versions of them, with the data's default augmentation or your settings.

    A recipe can have its own augmentation. To see it, repeat the recipe's settings here.

    Example: vitascope data preview cifar10 data.augment.flip=0
    """
    from vitascope.cli.augmentation_preview import draw_and_save_augmentation_preview

    print(f"Figure: {draw_and_save_augmentation_preview(name, settings or [], root, seed, out)}")
