"""`vitascope explain` and `report`: explain predictions and measure how faithful each explanation is."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vitascope.cli.evaluate import Best, print_broken
from vitascope.cli.loading import print_notes
from vitascope.cli.tables import console, table
from vitascope.errors import UserError, did_you_mean, format_count

if TYPE_CHECKING:
    from vitascope.evaluation.reading import Pictures
    from vitascope.explain.figures import Written
    from vitascope.explain.subject import Subject

Analysis = Annotated[bool, typer.Option(help="Also analyse heads, blocks and features on validation images.")]
SHOWN = 30  # number of files that are listed


def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, timm:NAME or a weights file.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files or folders of images.")],
    out: Annotated[Path | None, typer.Option(help="Folder for figures and numbers. Default: explained/.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, such as rollout,occlusion. Default: all seven.")] = None,
    blocks: Annotated[str | None, typer.Option(help="Blocks to draw, from 1, such as 1,4,8. Default: all.")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads to draw, from 1. Default: all.")] = None,
    query: Annotated[
        str | None, typer.Option(help="ROW,COLUMN of the query patch, from 1. Default: the classifier's input.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Class name or index to explain. Default: the prediction.")] = None,
    best: Best = False,
    analysis: Analysis = True,
    split: Annotated[str | None, typer.Option(help="Images for --analysis: val (default), train or test.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON, with every number of the figures.")] = False,
) -> None:
    """Explain predictions: attention maps, seven attribution methods, and how faithful each method is.

    Example: vitascope explain runs/digits photo.png
    """
    from vitascope.evaluation.reading import read_files
    from vitascope.explain.subject import open_subject

    names, place = _methods(methods), _numbers(query, "--query")
    if place is not None and len(place) != 2:
        raise UserError(f"--query {query} must be ROW,COLUMN, such as 3,5.")
    subject = open_subject(run, best=best)
    print_notes(subject.notes)
    pictures = read_files(images, subject.stored)
    number = None if target is None else subject.number_of(target)
    shown = _numbers(blocks, "--blocks"), _numbers(heads, "--heads")
    asked = names, *shown, (place[0], place[1]) if place else None, number
    with TemporaryDirectory() as nowhere:  # --json without --out writes no files
        folder = out or (Path(nowhere) if as_json else Path("explained"))
        written = _write(subject, pictures, asked, folder, analysis, split)
    print_broken(pictures.broken)
    if as_json:
        print(json.dumps(written.as_dict()))
    else:
        _tell(written, len(pictures.images), folder)


def _methods(words: str | None) -> list[str]:
    from vitascope.explain.attribution import METHODS

    names = words.split(",") if words is not None else list(METHODS)
    for name in names:
        if name not in METHODS:
            raise UserError(f"The method '{name}' is unknown. {did_you_mean(name, METHODS)}")
    return names


def _write(
    subject: "Subject", pictures: "Pictures", asked: tuple[Any, ...], out: Path, analysis: bool, split: str | None
) -> "Written":
    from vitascope.explain.everything import write_everything
    from vitascope.explain.figures import Asked

    with Console(stderr=True).status(
        f"Explaining {format_count(len(pictures.images), 'image')}. Occlusion takes the longest …"
    ):
        return write_everything(subject, pictures, Asked(*asked), out, analysis=analysis, split=split)


def _tell(written: "Written", images: int, out: Path) -> None:
    from vitascope.explain.attribution import DESCRIPTIONS

    rows = [
        [row.method, f"{row.insertion - row.deletion:+.3f}", f"{row.deletion:.3f}", f"{row.insertion:.3f}"]
        for row in written.evidence
    ]
    title = f"Faithfulness of the methods, best first ({format_count(images, 'image')})"
    columns = ["method", "insertion − deletion", "deletion (lower is better)", "insertion (higher is better)"]
    console().print(table(title, columns, rows, right=set(columns[1:])))
    print(
        "Mean probability of the explained class while patches are removed (deletion) or added (insertion), most\n"
        "important first. Use many images to compare methods."
    )
    for row in written.evidence:
        print(f"  {row.method:<21}{DESCRIPTIONS[row.method]}")
    shown = [str(path) for path in written.files if path.suffix == ".png"]
    print("\n".join(shown[:SHOWN]) + (f"\n… and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""))
    print(f"All figures (PNG and SVG) and numbers (explanations.json): {out}")


def _numbers(words: str | None, option: str) -> list[int] | None:
    if words is None:
        return None
    try:
        return [int(word) for word in words.split(",")]
    except ValueError as error:
        raise UserError(f"{option} {words} must be whole numbers separated by commas.") from error


def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or runs/RECIPE for its newest run.")],
    split: Annotated[
        str | None, typer.Option(help="val (default), train or test. Each use of the test set is logged in the run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file. Default: RUN/report.html.")] = None,
) -> None:
    """Write one HTML page about a run: curves, errors, analysis and interactive attention maps."""
    from vitascope.explain.report import write_report

    with Console(stderr=True).status("Evaluating the run and analysing the model …"):
        written = write_report(run, split, out)
    print(f"Report: {written} ({written.stat().st_size / 2**20:.1f} MiB). Open it in a browser. It works offline.")
