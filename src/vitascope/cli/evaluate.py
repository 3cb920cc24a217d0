"""`vitascope evaluate`: measure accuracy, calibration and robustness of a run."""

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
    from vitascope.evaluation.robustness import Decline

RunPath = Annotated[Path, typer.Argument(help="A run folder, or runs/RECIPE for its newest run.")]
Best = Annotated[bool, typer.Option("--best", help="Use the best epoch on validation images instead of the last.")]
Views = Annotated[
    int,
    typer.Option(
        help="Test-time augmentation. 1: the image. 2: plus its mirror image. "
        "6 or 10: both, each also shifted by one pixel in 2 or 4 directions."
    ),
]
MOST_CLASSES = 30


def evaluate(
    run: RunPath,
    split: Annotated[str | None, typer.Option(help="test (default), val or train.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Other data with the same classes: name, folder or .npz file.")
    ] = None,
    views: Views = 1,
    best: Best = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the corruption tests.")] = False,
    merge_tokens: Annotated[
        int | None, typer.Option(help="Token merging: merge this many tokens in each block.")
    ] = None,
    drop_tokens: Annotated[
        int | None, typer.Option(help="Token dropping: drop this many tokens in each block.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Measure accuracy, per-class scores, calibration and robustness to corruptions.

    Figures and report.json go to RUN/evaluation/SPLIT/. Each use of the test set is logged in the run.

    Example: vitascope evaluate runs/digits --split val
    """
    from vitascope.evaluation.figures import write_report

    model = loaded(run, best=best, device="auto", merge_tokens=merge_tokens, drop_tokens=drop_tokens)
    with Console(stderr=True).status("Evaluating. On a CPU this can take minutes; --quick is faster …"):
        found = model.evaluate(split, data=data, views=views, robust=not quick)
    print_broken(found.choice.skipped)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        print(f"Run: {found.run.path}")
        print_summary(found)
        _print_tables(found)
    folder = write_report(found)  # last: the numbers are printed even if the folder cannot be written
    if not as_json:
        print(f"Figures and report.json: {folder}")


def print_summary(found: "Evaluation") -> None:
    """Print accuracy, calibration and temperature scaling."""
    from vitascope.evaluation.report import split_name

    split, images, (low, high) = split_name(found.choice.split), len(found.choice.images), found.interval
    views = f", {found.views} views each" if found.views > 1 else ""
    reduction = f" ({found.reduction})" if found.reduction else ""
    what = f"{split} accuracy" if found.choice.own else f"accuracy on {Path(found.choice.data).name} ({split})"
    print(
        f"{what} {found.accuracy:.2%}{reduction} on {images:,} images{views} "
        f"(95 % confidence interval {low:.2%} to {high:.2%})"
    )
    before, after = found.calibration, found.temperature
    top = f"top-5 {found.top5:.2%}, " if len(found.classes) > 5 else ""
    direction = "over-confident" if before.gap > 0 else "under-confident"
    gap = f"{direction} by {100 * abs(before.gap):.1f} percentage points"
    print(f"{top}loss {before.loss:.3f}, calibration error {before.ece:.1%} ({gap})")
    if after:
        effect = f"loss {after.loss:.3f}, calibration error {after.ece:.1%}"
        print(f"After temperature scaling (logits / {after.value:.2f}, {found.temperature_words}): {effect}")
    else:
        print(found.temperature_words)
    if found.opening and found.opening > 1:
        print(f"Evaluation {found.opening} of this run on these test images. Only the first is free of selection bias.")


def print_broken(files: list[str]) -> None:
    for file in files:
        print(f"vitascope: {file} cannot be read as an image and is skipped.", file=sys.stderr)


def _print_tables(found: "Evaluation") -> None:
    columns = ["class", "images", "precision", "recall", "95 % CI of recall", "F1", "most often confused with"]
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
    title = "Per-class results"
    if len(rows) > MOST_CLASSES:
        rows = [row for row in rows if row[1] != "0"]
    if len(rows) > MOST_CLASSES:
        title += f": the {MOST_CLASSES} classes with the lowest recall (all classes: report.json)"
        scores = [row for row in found.per_class.values() if row.images]
        order = sorted(range(len(rows)), key=lambda number: (scores[number].recall is None, scores[number].recall or 0))
        rows = [rows[number] for number in order[:MOST_CLASSES]]
    console().print(table(title, columns, rows, right=set(columns[1:6])))
    if found.robustness:
        _print_robustness(found.robustness)


def _print_robustness(robustness: "dict[str, Decline]") -> None:
    from vitascope.evaluation.corruption import CORRUPTIONS

    first = next(iter(robustness.values()))
    rows = [
        [
            f"{name} ({CORRUPTIONS[name].short_unit})",
            *(f"{level:g}: {share:.1%}" for level, share in zip(decline.levels[1:], decline.accuracy[1:], strict=True)),
        ]
        for name, decline in robustness.items()
    ]
    title = f"Accuracy on {first.images:,} corrupted images (strength: accuracy). Uncorrupted: {first.accuracy[0]:.1%}"
    levels = [f"level {number}" for number in range(1, len(first.levels))]
    console().print(table(title, ["corruption", *levels], rows, right=levels))
