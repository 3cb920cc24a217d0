"""`vitascope evaluate`: how good is a run on images it has not seen, how sure is it, and where does it fail."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vitascope.cli.loading import loaded
from vitascope.cli.numbers import percent
from vitascope.cli.tables import console, table

if TYPE_CHECKING:
    from vitascope.evaluation.report import Evaluation

RunPath = Annotated[Path, typer.Argument(help="A run's directory, or a recipe's: its newest run.")]
Views = Annotated[
    int, typer.Option(help="Average logits over 2 (with mirror image), 6 or 10 views (also shifted by one pixel).")
]
MOST_CLASSES = 30


def evaluate(
    run: RunPath,
    split: Annotated[str | None, typer.Option(help="test (the default), val or train.")] = None,
    data: Annotated[str | None, typer.Option(help="Other data with the same classes: a name, folder or .npz.")] = None,
    views: Views = 1,
    best: Annotated[bool, typer.Option("--best", help="The best epoch on validation images, not the last.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the spoilt images, most of the time.")] = False,
    merge_tokens: Annotated[int | None, typer.Option(help="Join so many like tokens in each block.")] = None,
    drop_tokens: Annotated[int | None, typer.Option(help="Leave out so many tokens in each block.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Accuracy, classes, calibration, worst errors, robustness. Each opening of the test set is written into the run.

    Pictures and report.json go to RUN/evaluation/.
    """
    from vitascope.evaluation.figures import write_report

    model = loaded(run, best=best, device="auto", merge_tokens=merge_tokens, drop_tokens=drop_tokens)
    with Console(stderr=True).status("Looking at the images; on a CPU this may take minutes (--quick: less) …"):
        found = model.evaluate(split, data=data, views=views, robust=not quick)
    print_broken(found.choice.skipped)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        print(f"Run: {found.run.path}")
        print_summary(found)
        _print_tables(found)
    folder = write_report(found)  # last: where it cannot be written, the numbers have been told
    if not as_json:
        print(f"Pictures and report.json: {folder}")


def print_summary(found: "Evaluation") -> None:
    """The numbers in a few lines."""
    split, images, (low, high) = found.choice.split, len(found.choice.images), found.interval
    views = f", {found.views} views each" if found.views > 1 else ""
    what = f"{split} accuracy" if found.choice.own else f"accuracy on {Path(found.choice.data).name} ({split})"
    print(f"{what} {found.accuracy:.2%} on {images:,} images{views} (95 % interval {low:.2%} to {high:.2%})")
    before, after = found.calibration, found.temperature
    top = f"top-5 {found.top5:.2%}, " if len(found.classes) > 5 else ""
    sure = "too sure" if before.gap > 0 else "too unsure"
    print(f"{top}loss {before.loss:.3f}, calibration error {before.ece:.1%} ({sure} by {abs(before.gap):.1%})")
    if after:
        effect = f"{after.value:.2f} makes that loss {after.loss:.3f}, calibration error {after.ece:.1%}"
        print(f"A temperature {effect}; {found.temperature_words}")
    else:
        print(f"No temperature: {found.temperature_words}")
    if found.opening and found.opening > 1:
        print(f"This run has opened these test images {found.opening} times; only the first number is free of choices.")


def print_broken(files: list[str]) -> None:
    for file in files:
        print(f"vitascope: {file} cannot be read as an image and is left out.", file=sys.stderr)


def _print_tables(found: "Evaluation") -> None:
    columns = ["class", "images", "precision", "recall", "95 % interval", "F1", "most often taken for"]
    rows = [
        [
            name,
            f"{row.images:,}",
            percent(row.precision),
            percent(row.recall),
            "–" if row.recall is None else f"{row.recall_interval[0]:.1%} to {row.recall_interval[1]:.1%}",
            percent(row.f1),
            row.taken_for or "–",
        ]
        for name, row in found.per_class.items()
    ]
    title = "Class by class"
    if len(rows) > MOST_CLASSES:
        rows = [row for row in rows if row[1] != "0"]
    if len(rows) > MOST_CLASSES:
        title += f": the {MOST_CLASSES} least recognised (all are in report.json)"
        scores = [row for row in found.per_class.values() if row.images]
        order = sorted(range(len(rows)), key=lambda number: (scores[number].recall is None, scores[number].recall or 0))
        rows = [rows[number] for number in order[:MOST_CLASSES]]
    console().print(table(title, columns, rows, right=set(columns[1:6])))
    if not found.robustness:
        return
    images = next(iter(found.robustness.values())).images
    rows = [
        [
            name,
            *(f"{level:g}: {share:.1%}" for level, share in zip(decline.levels[1:], decline.accuracy[1:], strict=True)),
        ]
        for name, decline in found.robustness.items()
    ]
    clean = next(iter(found.robustness.values())).accuracy[0]
    title = f"As images get worse (level: accuracy; as they are: {clean:.1%}; {images:,} images)"
    console().print(table(title, ["", "mild", "", "", "strong"], rows, right={"mild", "strong"}))
