"""`vitascope evaluate`: measure accuracy, calibration and robustness of a run."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vitascope.cli.console import create_console, create_table, format_percent, load_model

if TYPE_CHECKING:
    from vitascope.evaluation.report import Evaluation
    from vitascope.evaluation.robustness import RobustnessCurve

RunPath = Annotated[Path, typer.Argument(help="A run folder, or runs/RECIPE for its newest run.")]
BestOption = Annotated[
    bool, typer.Option("--best", help="Use the best epoch on validation images instead of the last.")
]
ViewsOption = Annotated[
    int,
    typer.Option(
        help="Test-time augmentation. 1: the image. 2: plus its mirror image. "
        "6 or 10: both, each also shifted by one pixel in 2 or 4 directions."
    ),
]
MAX_TABLE_CLASSES = 30


def evaluate(
    run: RunPath,
    split: Annotated[str | None, typer.Option(help="test (default), val or train.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Other data with the same classes: name, folder or .npz file.")
    ] = None,
    views: ViewsOption = 1,
    best: BestOption = False,
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
    from vitascope.evaluation.figures import write_evaluation_report

    model = load_model(run, best=best, device="auto", merge_tokens=merge_tokens, drop_tokens=drop_tokens)
    with Console(stderr=True).status("Evaluating. On a CPU this can take minutes; --quick is faster …"):
        found = model.evaluate(split, data=data, views=views, robust=not quick)
    print_unreadable_files(found.eval_data.unreadable_files)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        print(f"Run: {found.run.path}")
        print_evaluation_summary(found)
        _print_class_and_corruption_tables(found)
    folder = write_evaluation_report(found)  # last: the numbers are printed even if the folder cannot be written
    if not as_json:
        print(f"Figures and report.json: {folder}")


def print_evaluation_summary(evaluation: "Evaluation") -> None:
    """Print accuracy, calibration and temperature scaling."""
    from vitascope.evaluation.report import format_split_name

    split, images, (low, high) = (
        format_split_name(evaluation.eval_data.split),
        len(evaluation.eval_data.samples),
        evaluation.accuracy_interval,
    )
    views = f", {evaluation.views} views each" if evaluation.views > 1 else ""
    reduction = f" ({evaluation.reduction})" if evaluation.reduction else ""
    what = (
        f"{split} accuracy"
        if evaluation.eval_data.is_run_data
        else f"accuracy on {Path(evaluation.eval_data.data_name).name} ({split})"
    )
    print(
        f"{what} {evaluation.accuracy:.2%}{reduction} on {images:,} images{views} "
        f"(95 % confidence interval {low:.2%} to {high:.2%})"
    )
    before, after = evaluation.calibration, evaluation.temperature
    top = f"top-5 {evaluation.top5:.2%}, " if len(evaluation.classes) > 5 else ""
    direction = "over-confident" if before.gap > 0 else "under-confident"
    gap = f"{direction} by {100 * abs(before.gap):.1f} percentage points"
    print(f"{top}loss {before.loss:.3f}, calibration error {before.ece:.1%} ({gap})")
    if after:
        effect = f"loss {after.loss:.3f}, calibration error {after.ece:.1%}"
        print(f"After temperature scaling (logits / {after.value:.2f}, {evaluation.temperature_note}): {effect}")
    else:
        print(evaluation.temperature_note)
    if evaluation.test_use_count and evaluation.test_use_count > 1:
        print(
            f"Evaluation {evaluation.test_use_count} of this run on these test images. Only the first is free of selection bias."
        )


def print_unreadable_files(file_names: list[str]) -> None:
    for file in file_names:
        print(f"vitascope: {file} cannot be read as an image and is skipped.", file=sys.stderr)


def _print_class_and_corruption_tables(evaluation: "Evaluation") -> None:
    columns = ["class", "images", "precision", "recall", "95 % CI of recall", "F1", "most often confused with"]
    rows = [
        [
            name,
            f"{row.images:,}",
            format_percent(row.precision),
            format_percent(row.recall),
            "–" if row.recall is None else f"{row.recall_interval[0]:.1%} to {row.recall_interval[1]:.1%}",
            format_percent(row.f1),
            row.taken_for or "–",
        ]
        for name, row in evaluation.per_class.items()
    ]
    title = "Per-class results"
    if len(rows) > MAX_TABLE_CLASSES:
        rows = [row for row in rows if row[1] != "0"]
    if len(rows) > MAX_TABLE_CLASSES:
        title += f": the {MAX_TABLE_CLASSES} classes with the lowest recall (all classes: report.json)"
        scores = [row for row in evaluation.per_class.values() if row.images]
        order = sorted(range(len(rows)), key=lambda number: (scores[number].recall is None, scores[number].recall or 0))
        rows = [rows[number] for number in order[:MAX_TABLE_CLASSES]]
    create_console().print(create_table(title, columns, rows, right_aligned=set(columns[1:6])))
    if evaluation.robustness:
        _print_robustness(evaluation.robustness)


def _print_robustness(robustness: "dict[str, RobustnessCurve]") -> None:
    from vitascope.evaluation.robustness import CORRUPTIONS

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
    create_console().print(create_table(title, ["corruption", *levels], rows, right_aligned=levels))
