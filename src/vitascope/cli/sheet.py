"""`vitascope sheet`: run the experiments of a coursework sheet and answer its questions."""

from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.study import BatchRuns

QUICK = "Run a shortened version for a CPU. On two cores, A takes about 1 minute, D 10 minutes or more."


def sheet(
    letter: Annotated[str, typer.Argument(metavar="A|B|C|D|E", help="Letter of the sheet.")],
    quick: Annotated[bool, typer.Option("--quick", help=QUICK)] = False,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: 5, or 2 with --quick.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for reports and runs.")] = Path("sheets"),
    together: BatchRuns = None,
    weights: Annotated[str | None, typer.Option(help="Sheet D: pretrained weights. Default: timm's DeiT-tiny.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="Git commit for the record, if there is no Git.", hidden=True)
    ] = None,
) -> None:
    """Run a coursework sheet: train its experiments, draw its figures and answer its questions.

    A: a minimal ViT on MNIST, and its attention map.
    B: shapes through attention; training for 10, 30 and 50 epochs (CIFAR-10).
    C: heads and a causal mask; training with and without shift (CIFAR-10).
    D: three studies, cost of attention, pretrained weights, little data (MNIST).
    E: layers compared with PyTorch; 25, 50 and 70 % accuracy (CIFAR-10).

    To continue after an interruption, run the same command again. Finished runs are not repeated.

    Example: vitascope sheet A --quick
    """
    from vitascope.cli.tables import console
    from vitascope.sheets.all import run_sheet

    options = {"seeds": seeds, "quick": quick, "device": device, "together": together, "weights": weights}
    try:
        page = run_sheet(letter, out, **options, commit=commit, console=console())
    except KeyboardInterrupt:
        print("Stopped. To continue, run the same command again.")
        raise typer.Exit(130) from None
    print(f"Report: {page.with_suffix('.md')}, {page}")
