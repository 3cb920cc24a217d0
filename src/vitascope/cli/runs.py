"""`vitascope runs`, `record` and `results`: list, compare, delete and record runs."""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitascope.cli.console import abbreviate_count, create_console, create_table, format_duration
from vitascope.cli.evaluate import ViewsOption
from vitascope.errors import UserError, format_count
from vitascope.number_format import format_percent

if TYPE_CHECKING:
    from vitascope.run.listing import RunSummary

MIN_WIDTH_FOR_ALL_COLUMNS = 110  # characters: in narrower terminals, `runs list` shows fewer columns
app = typer.Typer(help="List, compare and delete runs.", no_args_is_help=True)
RunsFolder = Annotated[Path, typer.Option(help="Folder of the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@app.command("list")
def print_runs(runs: RunsFolder = Path("runs"), as_json: JsonOption = False) -> None:
    """List all runs with their results, oldest first."""
    from vitascope.run.listing import find_runs, summarize_run_or_explain

    summaries = [summarize_run_or_explain(run) for run in find_runs(runs)]
    _print_remarks(summaries)
    if as_json:
        print(json.dumps([asdict(summary) for summary in summaries]))
        return
    console = create_console()
    columns = ["run", "data", "tuned", "parameters", "epochs", "time", "validation accuracy", "test accuracy"]
    if not any(summary.tune for summary in summaries):
        columns.remove("tuned")
    if console.width < MIN_WIDTH_FOR_ALL_COLUMNS:
        columns = [column for column in columns if column not in ("parameters", "time")]
    cells = [_format_cells_by_column(summary) for summary in summaries]
    rows = [[cells_of_run[column] for column in columns] for cells_of_run in cells]
    title = f"{format_count(len(rows), 'run')} in {runs}"
    right_aligned = set(columns) - {"run", "data", "tuned"}
    console.print(create_table(title, columns, rows, right_aligned=right_aligned, never_wrapped={"data", "tuned"}))
    if "tuned" in columns:
        print("tuned: the part of the pretrained weights that was trained (train.tune); –: trained from scratch.")
    if any("(probe)" in text for row in rows for text in row):
        print("(probe): trained without labels, so a linear probe measures the accuracy.")


def _format_cells_by_column(summary: "RunSummary") -> dict[str, str]:
    """Return column -> text for one run."""
    if summary.remark:
        unknown = dict.fromkeys(("parameters", "epochs", "time", "validation accuracy", "test accuracy"), "–")
        return {"run": summary.run, "data": "cannot be read", **unknown}
    return {
        "run": summary.run,
        "data": summary.data,
        "tuned": _format_tuned_part(summary),
        "parameters": abbreviate_count(summary.parameters),
        "epochs": str(summary.epochs) if summary.finished else f"{summary.epochs_done} of {summary.epochs}",
        "time": format_duration(summary.seconds) if summary.seconds else "–",
        "validation accuracy": _format_accuracy_marking_probe(summary.val_accuracy, summary),
        "test accuracy": _format_accuracy_marking_probe(summary.test_accuracy, summary),
    }


def _format_tuned_part(summary: "RunSummary") -> str:
    """Return which part of pretrained weights was trained: full, freeze=4, head or lora; – without such weights."""
    if summary.tune is None:
        return "–"
    return f"freeze={summary.freeze}" if summary.tune == "full" and summary.freeze else summary.tune


def _format_accuracy_marking_probe(accuracy: float | None, summary: "RunSummary") -> str:
    """Return the accuracy in percent; "(probe)" marks that of a linear probe."""
    is_probe = summary.uses_linear_probe and accuracy is not None
    return format_percent(accuracy, 2) + (" (probe)" if is_probe else "")


def _print_remarks(summaries: "list[RunSummary]") -> None:
    for summary in summaries:
        if summary.remark:
            print(f"vitascope: {summary.run} cannot be read: {summary.remark}", file=sys.stderr)


@app.command("compare")
def compare_runs_and_save_figure(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Two or more run folders. runs/RECIPE means its newest run.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File for the figure. The extension sets the format. Default: compare.png, compare-2.png, …"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: settings that differ, results, and learning curves in one figure."""
    from vitascope.draw.style import choose_unused_path, save_figure
    from vitascope.run.directory import open_run_or_newest
    from vitascope.run.listing import compare_runs, format_setting_for_reading

    comparison = compare_runs([open_run_or_newest(run) for run in runs])
    _print_remarks(comparison.unreadable_runs)
    figure_path = save_figure(comparison.draw_curves(), out or choose_unused_path(Path("compare.png")))
    if as_json:
        print(json.dumps(comparison.as_dict()))
        return
    labels = [f"run {index}" for index in range(1, len(comparison.runs) + 1)]
    for label, summary in zip(labels, comparison.run_summaries, strict=True):
        print(f"{label}: {summary.run}")
    setting_rows = [
        [key, *(format_setting_for_reading(key, value) for value in values)]
        for key, values in comparison.differing_settings.items()
    ]
    cells = [_format_cells_by_column(summary) for summary in comparison.run_summaries]
    result_names = ["validation accuracy", "test accuracy", "parameters", "epochs", "time"]
    result_rows = [[name, *(cells_of_run[name] for cells_of_run in cells)] for name in result_names]
    if not setting_rows:
        print("No setting differs.")
    for title, name, rows in (("Settings that differ", "setting", setting_rows), ("Results", "result", result_rows)):
        if rows:
            table = create_table(title, [name, *labels], rows, right_aligned=set(labels), never_wrapped={name})
            create_console().print(table)
    print(f"Figure: {figure_path}")


@app.command("delete")
def delete_runs_after_confirmation(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Delete although a process of another host holds the lock. It must have ended."),
    ] = False,
) -> None:
    """Delete runs permanently, after confirmation. Runs that a process uses are refused."""
    from vitascope.run.listing import delete_run, open_run_for_deletion
    from vitascope.run.lock import lock_run

    runs_to_delete = [open_run_for_deletion(run) for run in runs]
    count = format_count(len(runs_to_delete), "run")
    with ExitStack() as locks:
        for run in {run.path.resolve(): run for run in runs_to_delete}.values():
            locks.enter_context(lock_run(run, force=force))
        for run in runs_to_delete:
            print(run.path)
        if not yes:
            if not sys.stdin.isatty():
                raise UserError(f"{count} would be deleted permanently. Add --yes to confirm.")
            typer.confirm(f"Delete {count} permanently?", abort=True)
        for run in runs_to_delete:
            delete_run(run)
    print(f"Deleted {count}.")


ResultsFolder = Annotated[Path, typer.Option(help="Folder of the records.")]


def evaluate_and_record_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Finished runs of one recipe, one per seed.")],
    name: Annotated[str, typer.Option(help="Name of the record, saved as NAME.json.")],
    views: ViewsOption = 1,
    commit: Annotated[str | None, typer.Option(help="Git commit of the source, if the runs have none.")] = None,
    results: ResultsFolder = Path("results"),
) -> None:
    """Record finished runs in results/NAME.json: test accuracies, times, machine, versions and commit.

    Of each run, the first test evaluation with the last epoch's weights and the given --views is recorded.
    A run without one is evaluated now.

    Example: vitascope record runs/digits/* --name digits
    """
    from vitascope.inference.scoring import check_views_match_training
    from vitascope.records.record import (
        check_record_name,
        evaluate_and_make_record,
        format_mean_test_accuracy,
        write_record_per_machine,
    )
    from vitascope.run.directory import open_run_or_newest

    check_record_name(name)
    opened_runs = [open_run_or_newest(run) for run in runs]
    check_views_match_training(opened_runs[0].recipe, views, "--views {}")
    new_record = evaluate_and_make_record(opened_runs, name, views=views, commit=commit)
    path = write_record_per_machine(new_record, results)
    seeds = ", ".join(map(str, new_record.seeds))
    probe = "linear-probe " if new_record.settings["train.objective"] != "classify" else ""
    accuracy = f"{probe}test accuracy {format_mean_test_accuracy(new_record)}"
    print(
        f"{name}: {accuracy} ({'seed' if len(new_record.seeds) == 1 else 'seeds'} {seeds}), {new_record.machine_name}"
    )
    print(f"Record: {path}")
    if new_record.commit is None:
        print("The runs have no Git commit. Add one with --commit.")
    elif new_record.commit.endswith("+changes"):
        print("The runs were trained with uncommitted changes. To publish this record, commit first, then train again.")


def update_pages_and_recipes_from_records(
    files: Annotated[list[Path], typer.Argument(metavar="PAGE…", help="Markdown pages (.md) and recipes (.yaml).")],
    results: ResultsFolder = Path("results"),
    cards: Annotated[Path | None, typer.Option(help="Folder for the model cards, one per record.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing. Fail if a page is out of date.")] = False,
) -> None:
    """Update the numbers in Markdown pages, recipes and model cards from the records.

    In a page, the text between these two marks is replaced. NAME is a record.
    <!-- results: KIND NAME… -->
    <!-- end results -->

    KIND for training records:
    table: accuracy, times and machine.
    sentence: the same in words.
    accuracy: only the accuracy. work: training FLOPs. cards: links to model cards.
    targets: whether a target was reached. NAME is RECORD:PERCENT:SECONDS:SEEDS.

    KIND for benchmarks, for this project's own pages: bench, bars, races, growth,
    faithfulness, cost, pretrained, photos, faults, odd-size, small-data, speedrun, tuning,
    together, fewer-tokens, pretraining, features.

    In a recipe, the comment that starts with "# Recorded:" is replaced.

    Example: vitascope results README.md docs/*.md
    """
    from vitascope.records.pages import format_model_cards_of_all_records, read_page_and_fill_results_marks
    from vitascope.run.files import make_folder, write_atomically

    _check_files_exist(files)
    pages = {file: read_page_and_fill_results_marks(file, results, cards) for file in files}
    new_texts = {file: page.text for file, page in pages.items()}
    new_texts |= format_model_cards_of_all_records(results, cards) if cards else {}
    stale = [file for file, text in new_texts.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    if check and stale:
        raise UserError(f"Out of date with the records: {', '.join(map(str, stale))}. Run without --check to update.")
    for file in stale:
        make_folder(file.parent)
        write_atomically(file, new_texts[file])
    marks = format_count(sum(page.num_marks for page in pages.values()), "mark")
    _print_update_counts(marks, len(files), len(stale), len(new_texts))


def _print_update_counts(marks: str, num_pages: int, num_updated: int, num_files: int) -> None:
    """Print for example "5 marks in 1 page: up to date."; model cards count as files, not as pages."""
    num_cards = num_files - num_pages
    cards = f", {format_count(num_cards, 'model card')}" if num_cards else ""
    updated = f"{num_updated} of {format_count(num_files, 'file')} updated" if num_updated else "up to date"
    print(f"{marks} in {format_count(num_pages, 'page')}{cards}: {updated}.")


def _check_files_exist(files: list[Path]) -> None:
    for file in files:
        if not file.is_file():
            raise UserError(f"There is no file {file}.")
