"""`vitascope record` and `results`: record results for publication and update the pages that quote them."""

from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.evaluate import Views
from vitascope.errors import UserError, format_count

Results = Annotated[Path, typer.Option(help="Folder of the records.")]


def record(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs of one recipe, one per seed.")],
    name: Annotated[str, typer.Option(help="Name of the record, saved as NAME.json.")],
    views: Views = 1,
    commit: Annotated[str | None, typer.Option(help="Git commit of the source, if the runs have none.")] = None,
    results: Results = Path("results"),
) -> None:
    """Record finished runs in results/NAME.json: test accuracies, times, machine, versions and commit.

    Each run's first evaluation on the test set counts. A run without one is evaluated now.

    Example: vitascope record runs/digits/* --name digits
    """
    from vitascope.records.reading import accuracy_words
    from vitascope.records.record import check_name, make_record, write_record
    from vitascope.run.directory import open_run

    check_name(name)
    made = make_record([open_run(run) for run in runs], name, views=views, commit=commit)
    path = write_record(made, results)
    print(f"{name}: {accuracy_words(made)} over {format_count(len(made.seeds), 'seed')}, {made.machine_name}: {path}")
    if made.commit is None:
        print("The runs have no Git commit. Add one with --commit.")
    elif made.commit.endswith("+changes"):
        print("The runs were trained with uncommitted changes. To publish this record, commit first, then train again.")


def results(
    files: Annotated[list[Path], typer.Argument(help="Markdown pages (.md) and recipes (.yaml).")],
    results: Results = Path("results"),
    cards: Annotated[Path | None, typer.Option(help="Folder for the model cards, one per record.")] = None,
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
    from vitascope.records.filling import fill, written_cards
    from vitascope.run.files import make_folder, write_whole

    for file in files:
        if not file.is_file():
            raise UserError(f"There is no file {file}.")
    filled = {file: fill(file, results, cards) for file in files}
    wanted = {file: text for file, (text, _) in filled.items()} | (written_cards(results, cards) if cards else {})
    stale = [file for file, text in wanted.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    if check and stale:
        raise UserError(f"Out of date with the records: {', '.join(map(str, stale))}. Run without --check to update.")
    for file in stale:
        make_folder(file.parent)
        write_whole(file, wanted[file])
    marks = sum(count for _, count in filled.values())
    pages, updated = format_count(len(files), "page"), f"{len(stale)} of {format_count(len(wanted), 'file')} updated"
    print(f"{format_count(marks, 'mark')} in {pages}; {updated}.")
