"""`vitascope record` and `results`: numbers that may be published, and the pages that tell them."""

from pathlib import Path
from typing import Annotated

import typer

from vitascope.cli.evaluate import Views
from vitascope.errors import UserError

Results = Annotated[Path, typer.Option(help="Where records are kept.")]


def record(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs of one recipe, one per seed.")],
    name: Annotated[str, typer.Option(help="The record's name: NAME.json.")],
    views: Views = 1,
    commit: Annotated[str | None, typer.Option(help="The source's commit, where the runs know no git.")] = None,
    results: Results = Path("results"),
) -> None:
    """Write results/NAME.json: every seed's test accuracy and time, machine, versions, commit, command.

    The first opening of the test set counts; a run that was never scored is scored now.
    """
    from vitascope.records.reading import accuracy_words
    from vitascope.records.record import check_name, make_record, write_record
    from vitascope.run.directory import open_run

    check_name(name)
    made = make_record([open_run(run) for run in runs], name, views=views, commit=commit)
    path = write_record(made, results)
    print(f"{name}: {accuracy_words(made)} over {len(made.seeds)} seed(s), {made.machine_name}: {path}")
    if made.commit is None:
        print("The runs know no commit; name it with --commit if there is one.")
    elif made.commit.endswith("+changes"):
        print("The runs were made from files that differ from their commit: commit first, then train, to publish this.")


def results(
    files: Annotated[list[Path], typer.Argument(help="Markdown pages with marks, and recipes.")],
    results: Results = Path("results"),
    cards: Annotated[Path | None, typer.Option(help="Where a model card for each record goes.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail where a page differs.")] = False,
) -> None:
    """Make every number between the marks of these pages anew from the records, and the model cards."""
    from vitascope.records.filling import fill, written_cards
    from vitascope.run.files import make_folder, write_whole

    for file in files:
        if not file.is_file():
            raise UserError(f"There is no file {file}.")
    filled = {file: fill(file, results, cards) for file in files}
    wanted = {file: text for file, (text, _) in filled.items()} | (written_cards(results, cards) if cards else {})
    stale = [file for file, text in wanted.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    if check and stale:
        raise UserError(
            f"{', '.join(map(str, stale))} differ(s) from the records. Leave --check out to make them anew."
        )
    for file in stale:
        make_folder(file.parent)
        write_whole(file, wanted[file])
    marks = sum(count for _, count in filled.values())
    print(f"{marks} mark(s) in {len(files)} page(s); {len(stale)} of {len(wanted)} file(s) made anew.")
