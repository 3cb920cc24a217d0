"""`vitascope predict`, `embed` and `similar`: apply a trained model to new images."""

import csv
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.evaluate import RunPath, Views, print_broken
from vitascope.cli.loading import loaded
from vitascope.cli.tables import console, table
from vitascope.errors import UserError, format_count


def predict(
    run: RunPath,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…|FOLDER", help="Image files or folders of images.")],
    views: Views = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only JSON, with the probability of every class.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print only CSV: file, class, probability.")] = False,
) -> None:
    """Predict the class of image files, with probabilities. Images are preprocessed as in training.

    Example: vitascope predict runs/digits photos/ --csv
    """
    if as_json and as_csv:
        raise UserError("Choose one of --json and --csv.")

    model = loaded(run, device="auto")
    found = model.predict(images, views=views)
    print_broken(found.broken)
    if as_json:
        print(json.dumps([item.as_dict() for item in found]))
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["file", "class", "probability"])
        writer.writerows([item.file, item.label, f"{item.probability:.6f}"] for item in found)
    else:
        rows = [[str(item.file), *(f"{name} {share:.1%}" for name, share in item.likeliest[:3])] for item in found]
        columns = ["file", "prediction", "second", "third"][: len(rows[0])]
        console().print(table(f"Predictions of {model.name} for {format_count(len(rows), 'image')}", columns, rows))


def embed(
    run: RunPath,
    folder: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Folders of images or image files.")],
    out: Annotated[Path, typer.Option(help="Output file: .npz, or .parquet (requires pyarrow).")],
) -> None:
    """Save the features of images (the classifier's input) with file, folder and predicted class.

    Example: vitascope embed runs/digits photos/ --out features.npz
    """
    from vitascope.evaluation import embedding

    embedding.check_ending(out)
    found = embedding.embed(loaded(run, device="auto"), folder)
    found.save(out)
    print_broken(found.broken)
    print(f"{len(found.files):,} images × {found.features.shape[1]} features: {out}")


def similar(
    run: RunPath,
    image: Annotated[Path, typer.Argument(help="An image file.")],
    among: Annotated[Path | None, typer.Option(help="Folder to search. Default: the run's training images.")] = None,
    count: Annotated[int, typer.Option(help="Number of images to show.", min=1, max=59)] = 11,
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "similar.png"
    ),
) -> None:
    """Find and draw the images whose features are most similar to those of an image."""
    from vitascope.draw.look import check_ending, save
    from vitascope.evaluation import neighbours
    from vitascope.evaluation.figures import SAME, draw_neighbours

    check_ending(out)
    found = neighbours.similar(loaded(run, device="auto"), image, among, count)
    print_broken(found.broken)
    labels = [name + SAME * same for name, same in zip(found.labels, found.identical, strict=True)]
    columns = {"class" if among is None else "folder": labels}
    columns["cosine similarity"] = [f"{cosine:.3f}" for cosine in found.similarity]
    if found.found.names:
        columns["file"] = found.found.names
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    prediction = f", predicted {found.said.label} ({found.said.probability:.1%})" if found.said else ""
    title = f"{image}{prediction}: most similar of {found.searched}"
    console().print(table(title, list(columns), rows, right={"cosine similarity"}))
    print(f"Figure: {save(draw_neighbours(found), out)}")
