"""`vitascope sheet`: everything a sheet of coursework asks for, run and answered."""

from pathlib import Path
from typing import Annotated

import typer


def sheet(
    letter: Annotated[str, typer.Argument(metavar="A|B|C|D|E", help="Which sheet.")],
    quick: Annotated[bool, typer.Option("--quick", help="A shortened version, for a CPU, in minutes.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Runs of everything; else 5, with --quick 2.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    out: Annotated[Path, typer.Option(help="Where reports and runs go.")] = Path("sheets"),
    together: Annotated[int | None, typer.Option(help="Runs that learn together; else as many as fit.")] = None,
    weights: Annotated[str | None, typer.Option(help="Sheet D: pretrained weights; else timm's DeiT-tiny.")] = None,
    commit: Annotated[str | None, typer.Option(help="For the record, where there is no git.", hidden=True)] = None,
) -> None:
    """Run a sheet: its experiments, its figures beside ours, and every question answered from the numbers.

    Stopped or killed, the same command goes on; finished runs are never repeated.

    Example: vitascope sheet A --quick
    """
    from vitascope.cli.tables import console
    from vitascope.sheets.all import run_sheet

    try:
        page = run_sheet(
            letter,
            out,
            seeds=seeds,
            quick=quick,
            device=device,
            together=together,
            weights=weights,
            commit=commit,
            console=console(),
        )
    except KeyboardInterrupt:
        print("Stopped. The same command goes on.")
        raise typer.Exit(130) from None
    print(f"Report: {page.with_suffix('.md')}, {page}")
