"""Register all commands."""

from typing import Annotated

import typer

import vitascope
from vitascope.cli import (
    adapt,
    anatomy,
    check,
    data,
    evaluate,
    explain,
    export,
    predict,
    runs,
    study,
    train,
)
from vitascope.cli.usage_errors import set_usage_line_of_all_commands

app = typer.Typer(
    help="Build, train, evaluate and explain vision transformers on small image data sets.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("anatomy")(anatomy.show_anatomy)
app.command("train")(train.train)
app.command("adapt")(adapt.adapt)
app.command("resume")(train.resume)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("embed")(predict.embed)
app.command("similar")(predict.find_and_draw_similar_images)
app.command("explain")(explain.explain)
app.command("probe")(predict.probe)
app.command("report")(explain.write_html_report)
app.command("record")(runs.evaluate_and_record_runs)
app.command("results")(runs.update_pages_and_recipes_from_records)
app.command("study")(study.study)
app.command("sheet")(study.run_coursework_sheet)
app.command("lr-find")(train.suggest_learning_rate)
app.command("check")(check.check)
app.command("demo")(train.run_demo)
app.command("doctor")(train.print_machine_info_and_check_packages)
app.add_typer(runs.app, name="runs")
app.add_typer(data.app, name="data")
app.add_typer(anatomy.draw, name="draw")
app.add_typer(export.app, name="export")
app.add_typer(check.exercises, name="exercise")

set_usage_line_of_all_commands(app)


def _print_version_and_exit_if_requested(requested: bool) -> bool:
    if requested:
        print(f"vitascope {vitascope.__version__}")
        raise typer.Exit
    return requested


@app.callback()
def declare_global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", callback=_print_version_and_exit_if_requested, is_eager=True
        ),
    ] = False,
) -> None:
    """Build, train, evaluate and explain vision transformers on small image data sets."""
