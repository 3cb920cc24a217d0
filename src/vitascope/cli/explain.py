"""`vitascope explain`: what does a model look at in an image, and can that be believed."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vitascope.cli.evaluate import print_broken
from vitascope.cli.loading import print_notes
from vitascope.cli.tables import console, table
from vitascope.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from vitascope.evaluation.reading import Pictures
    from vitascope.explain.figures import Written
    from vitascope.explain.subject import Subject

SHOWN = 30  # files named one by one


def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, timm:NAME, or a weights file.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Image files, or folders of them.")],
    out: Annotated[Path | None, typer.Option(help="The folder for pictures and numbers; else explained/.")] = None,
    methods: Annotated[str | None, typer.Option(help="Some of them, with commas between; else all.")] = None,
    blocks: Annotated[str | None, typer.Option(help="Blocks to draw, counted from 1, such as 1,4,8; else all.")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads to draw, counted from 1; else all.")] = None,
    query: Annotated[
        str | None, typer.Option(help="ROW,COLUMN of the patch that looks, from 0; else what the classifier reads.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The class to explain, by name or number; else the answer.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best epoch on validation images, not the last.")] = False,
    probes: Annotated[bool, typer.Option(help="Also what the model is like inside, over many images.")] = True,
    split: Annotated[
        str | None, typer.Option(help="The run's images that the probes are about: val (the default), train or test.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON: every number behind the pictures.")] = False,
) -> None:
    """Attention of every block and head, seven explanations and the evidence for each, as pictures and numbers."""
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
    with TemporaryDirectory() as nowhere:  # --json alone leaves nothing behind
        folder = out or (Path(nowhere) if as_json else Path("explained"))
        written = _write(subject, pictures, asked, folder, probes, split)
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
    subject: "Subject", pictures: "Pictures", asked: tuple[Any, ...], out: Path, probes: bool, split: str | None
) -> "Written":
    from vitascope.explain.everything import write_everything
    from vitascope.explain.figures import Asked

    with Console(stderr=True).status(
        f"Looking inside {len(pictures.images)} image(s); hiding every patch takes the longest …"
    ):
        return write_everything(subject, pictures, Asked(*asked), out, probes=probes, split=split)


def _tell(written: "Written", images: int, out: Path) -> None:
    rows = [
        [row.method, f"{row.insertion - row.deletion:+.3f}", f"{row.deletion:.3f}", f"{row.insertion:.3f}"]
        for row in written.evidence
    ]
    title = f"Can it be believed? {images} image(s), most faithful first"
    columns = ["method", "insertion − deletion", "deletion (lower is better)", "insertion (higher)"]
    console().print(table(title, columns, rows, right=set(columns[1:])))
    shown = [str(path) for path in written.files if path.suffix == ".png"]
    print("\n".join(shown[:SHOWN]) + (f"\n… and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""))
    print(f"All of it, as SVG too, and the numbers (explanations.json): {out}")


def _numbers(words: str | None, option: str) -> list[int] | None:
    if words is None:
        return None
    try:
        return [int(word) for word in words.split(",")]
    except ValueError as error:
        raise UserError(f"{option} {words} must be whole numbers with commas between.") from error


def report(
    run: Annotated[Path, typer.Argument(help="A run's directory, or a recipe's: its newest run.")],
    split: Annotated[
        str | None, typer.Option(help="val (the default), train, or test, which is noted in the run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where it goes; else RUN/report.html.")] = None,
) -> None:
    """One self-contained page about a run: curves, errors with their attention, probes, and attention to explore."""
    from vitascope.explain.report import write_report

    with Console(stderr=True).status("Looking at the run's images and inside the model …"):
        written = write_report(run, split, out)
    print(f"Report: {written} ({written.stat().st_size / 2**20:.1f} MiB; open it in a browser, it needs no network)")
