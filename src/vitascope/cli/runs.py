"""`vitascope runs`, `record` and `results`: list, compare, delete and record runs."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.console import abbreviate_count, create_console, create_table, format_duration, format_percent
from vitascope.cli.evaluate import ViewsOption
from vitascope.errors import UserError, format_count

app = typer.Typer(help="List, compare and delete runs.", no_args_is_help=True)
RunsFolder = Annotated[Path, typer.Option(help="Folder of the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@app.command("list")
def list_runs(runs: RunsFolder = Path("runs"), as_json: JsonOption = False) -> None:
    """List all runs with their results, oldest first."""
    from vitascope.run.listing import find_runs, summarize_run

    found = []
    for run in find_runs(runs):
        try:
            found.append(summarize_run(run))
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
            abbreviate_count(item.parameters),
            str(item.epochs) if item.finished else f"{item.epochs_done} of {item.epochs}",
            format_duration(item.seconds) if item.seconds else "–",
            format_percent(item.val_accuracy, 2),
            format_percent(item.test_accuracy, 2),
        ]
        for item in found
    ]
    create_console().print(
        create_table(f"{format_count(len(rows), 'run')} in {runs}", columns, rows, right_aligned=set(columns[2:]))
    )


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders. runs/RECIPE means its newest run.")],
    out: Annotated[Path, typer.Option(help="File for the figure. The extension sets the format.")] = Path(
        "compare.png"
    ),
    as_json: JsonOption = False,
) -> None:
    """Compare runs: settings that differ, results, and learning curves in one figure."""
    from vitascope.draw.style import save_figure
    from vitascope.recipe.writing import format_value
    from vitascope.run.comparison import compare_runs
    from vitascope.run.directory import open_run

    found = compare_runs([open_run(run) for run in runs])
    picture = save_figure(found.draw_curves(), out)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    letters = [f"run {number}" for number in range(1, len(runs) + 1)]
    for letter, item in zip(letters, found.run_summaries, strict=True):
        print(f"{letter}: {item.run}")
    rows = [[key, *map(format_value, values)] for key, values in found.differing_settings.items()]
    numbers = [
        ["validation accuracy", *(format_percent(item.val_accuracy, 2) for item in found.run_summaries)],
        ["test accuracy", *(format_percent(item.test_accuracy, 2) for item in found.run_summaries)],
        ["parameters", *(abbreviate_count(item.parameters) for item in found.run_summaries)],
        ["epochs done", *(str(item.epochs_done) for item in found.run_summaries)],
        ["time", *(format_duration(item.seconds) for item in found.run_summaries)],
    ]
    if rows:
        create_console().print(
            create_table("Settings that differ", ["setting", *letters], rows, right_aligned=set(letters))
        )
    else:
        print("No setting differs.")
    create_console().print(create_table("Results", ["", *letters], numbers, right_aligned=set(letters)))
    print(f"Figure: {picture}")


@app.command()
def delete(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete runs permanently, after confirmation."""
    from vitascope.run.listing import delete_run, find_exact_run

    found = [find_exact_run(run) for run in runs]
    for run in found:
        print(run.path)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"{format_count(len(found), 'run')} would be deleted permanently. Add --yes to confirm.")
        typer.confirm(f"Delete {format_count(len(found), 'run')} permanently?", abort=True)
    for run in found:
        delete_run(run)
    print(f"Deleted {format_count(len(found), 'run')}.")


ResultsFolder = Annotated[Path, typer.Option(help="Folder of the records.")]


def record(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs of one recipe, one per seed.")],
    name: Annotated[str, typer.Option(help="Name of the record, saved as NAME.json.")],
    views: ViewsOption = 1,
    commit: Annotated[str | None, typer.Option(help="Git commit of the source, if the runs have none.")] = None,
    results: ResultsFolder = Path("results"),
) -> None:
    """Record finished runs in results/NAME.json: test accuracies, times, machine, versions and commit.

    Each run's first evaluation on the test set counts. A run without one is evaluated now.

    Example: vitascope record runs/digits/* --name digits
    """
    from vitascope.records.reading import format_accuracy
    from vitascope.records.record import check_record_name, make_record, write_record
    from vitascope.run.directory import open_run

    check_record_name(name)
    made = make_record([open_run(run) for run in runs], name, views=views, commit=commit)
    path = write_record(made, results)
    print(f"{name}: {format_accuracy(made)} over {format_count(len(made.seeds), 'seed')}, {made.machine_name}: {path}")
    if made.commit is None:
        print("The runs have no Git commit. Add one with --commit.")
    elif made.commit.endswith("+changes"):
        print("The runs were trained with uncommitted changes. To publish this record, commit first, then train again.")


def update_results(
    files: Annotated[list[Path], typer.Argument(help="Markdown pages (.md) and recipes (.yaml).")],
    results: ResultsFolder = Path("results"),
    cards: Annotated[Path | None, typer.Option(help="RunsFolder for the model cards, one per record.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing. Fail if a page is out of date.")] = False,
) -> None:
    """Update the numbers in Markdown pages, recipes and model cards from the records.

    In a page, the text between these two marks is replaced. NAME is a record.
    <!-- results: KIND NAME… -->
    <!-- end results -->

    KIND: table, targets, cards, sentence, accuracy, bench, bars, races, growth,
    faithfulness, cost, pretrained, odd-size, small-data, speedrun, tuning,
    together, fewer-tokens, pretraining, features, work.

    In a recipe, the comment that starts with "# Recorded:" is replaced.

    Example: vitascope results README.md docs/*.md
    """
    from vitascope.records.pages import fill_results_marks, format_model_cards
    from vitascope.run.files import make_folder, write_atomically

    for file in files:
        if not file.is_file():
            raise UserError(f"There is no file {file}.")
    filled = {file: fill_results_marks(file, results, cards) for file in files}
    wanted = {file: text for file, (text, _) in filled.items()} | (format_model_cards(results, cards) if cards else {})
    stale = [file for file, text in wanted.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    if check and stale:
        raise UserError(f"Out of date with the records: {', '.join(map(str, stale))}. Run without --check to update.")
    for file in stale:
        make_folder(file.parent)
        write_atomically(file, wanted[file])
    marks = sum(count for _, count in filled.values())
    pages, updated = format_count(len(files), "page"), f"{len(stale)} of {format_count(len(wanted), 'file')} updated"
    print(f"{format_count(marks, 'mark')} in {pages}; {updated}.")
