"""Register all commands."""

from typing import Annotated

import typer

import vitascope
from vitascope.cli import (
    adapt,
    anatomy,
    check,
    data,
    demo,
    doctor,
    draw,
    evaluate,
    explain,
    export,
    predict,
    probe,
    record,
    runs,
    sheet,
    study,
    train,
)

app = typer.Typer(
    help="Build, train, evaluate and explain vision transformers on small image data sets.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("anatomy")(anatomy.anatomy)
app.command("train")(train.train)
app.command("adapt")(adapt.adapt)
app.command("resume")(train.resume)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("embed")(predict.embed)
app.command("similar")(predict.similar)
app.command("explain")(explain.explain)
app.command("probe")(probe.probe)
app.command("report")(explain.report)
app.command("record")(record.record)
app.command("results")(record.results)
app.command("study")(study.study)
app.command("sheet")(sheet.sheet)
app.command("lr-find")(train.lr_find)
app.command("check")(check.check)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(runs.app, name="runs")
app.add_typer(data.app, name="data")
app.add_typer(draw.app, name="draw")
app.add_typer(export.app, name="export")
app.add_typer(check.exercises, name="exercise")


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"vitascope {vitascope.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Build, train, evaluate and explain vision transformers on small image data sets."""
