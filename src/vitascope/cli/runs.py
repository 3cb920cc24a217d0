"""`vitascope runs list | compare | delete`: list, compare and delete runs."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.numbers import count, duration, percent
from vitascope.cli.tables import console, table
from vitascope.errors import UserError, format_count

app = typer.Typer(help="List, compare and delete runs.", no_args_is_help=True)
Folder = Annotated[Path, typer.Option(help="Folder of the runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@app.command("list")
def list_(runs: Folder = Path("runs"), as_json: Json = False) -> None:
    """List all runs with their results, oldest first."""
    from vitascope.records.catalogue import entry, find_runs

    found = []
    for run in find_runs(runs):
        try:
            found.append(entry(run))
        except UserError as error:
            print(f"vitascope: {error}", file=sys.stderr)  # one broken run must not hide the others
    if as_json:
        print(json.dumps([asdict(item) for item in found]))
        return
    columns = ["run", "data", "parameters", "epochs", "time", "validation accuracy", "test accuracy"]
    rows = [
        [
            item.run,
            item.data,
            count(item.parameters),
            str(item.epochs) if item.finished else f"{item.epochs_done} of {item.epochs}",
            duration(item.seconds) if item.seconds else "–",
            percent(item.val_accuracy, 2),
            percent(item.test_accuracy, 2),
        ]
        for item in found
    ]
    console().print(table(f"{format_count(len(rows), 'run')} in {runs}", columns, rows, right=set(columns[2:])))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders. runs/RECIPE means its newest run.")],
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "compare.png"
    ),
    as_json: Json = False,
) -> None:
    """Compare runs: settings that differ, results, and learning curves in one figure."""
    from vitascope.draw.look import save
    from vitascope.recipe.writing import word
    from vitascope.records.comparison import compare
    from vitascope.run.directory import open_run

    found = compare([open_run(run) for run in runs])
    picture = save(found.draw(), out)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    letters = [f"run {number}" for number in range(1, len(runs) + 1)]
    for letter, item in zip(letters, found.entries, strict=True):
        print(f"{letter}: {item.run}")
    rows = [[key, *map(word, values)] for key, values in found.settings.items()]
    numbers = [
        ["validation accuracy", *(percent(item.val_accuracy, 2) for item in found.entries)],
        ["test accuracy", *(percent(item.test_accuracy, 2) for item in found.entries)],
        ["parameters", *(count(item.parameters) for item in found.entries)],
        ["epochs done", *(str(item.epochs_done) for item in found.entries)],
        ["time", *(duration(item.seconds) for item in found.entries)],
    ]
    if rows:
        console().print(table("Settings that differ", ["setting", *letters], rows, right=set(letters)))
    else:
        print("No setting differs.")
    console().print(table("Results", ["", *letters], numbers, right=set(letters)))
    print(f"Figure: {picture}")


@app.command()
def delete(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete runs permanently, after confirmation."""
    from vitascope.records.catalogue import delete_run, exact_run

    found = [exact_run(run) for run in runs]
    for run in found:
        print(run.path)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"{format_count(len(found), 'run')} would be deleted permanently. Add --yes to confirm.")
        typer.confirm(f"Delete {format_count(len(found), 'run')} permanently?", abort=True)
    for run in found:
        delete_run(run)
    print(f"Deleted {format_count(len(found), 'run')}.")
