"""`vitascope evaluate`: measure accuracy, calibration and robustness of a run."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vitascope.cli.console import (
    create_console,
    create_table,
    describe_run_or_model,
    open_model_and_print_notes_to_stderr,
)
from vitascope.number_format import format_percent

if TYPE_CHECKING:
    from vitascope.evaluation.report import Evaluation
    from vitascope.evaluation.robustness import ProgressReporter, RobustnessCurve
    from vitascope.inference.classifier import Classifier

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or runs/RECIPE for its newest run.")]
ModelRef = Annotated[str, typer.Argument(metavar="RUN", help="A run, timm:NAME or a weights file.")]
BestOption = Annotated[
    bool, typer.Option("--best", help="Use the epoch with the highest validation accuracy instead of the last.")
]
ViewsOption = Annotated[
    int,
    typer.Option(
        help="Test-time augmentation. 1: the image. 2: plus its mirror image. "
        "6 or 10: both, each also shifted by one pixel in 2 or 4 directions."
    ),
]
MergeTokensOption = Annotated[int | None, typer.Option(help="Token merging: merge this many tokens in each block.")]
DropTokensOption = Annotated[int | None, typer.Option(help="Token dropping: drop this many tokens in each block.")]
TargetErrorOption = Annotated[
    float, typer.Option(help="Suggest the lowest predict --threshold with at most this error rate.")
]
MAX_TABLE_CLASSES = 30


def evaluate(
    run: ModelRef,
    split: Annotated[str | None, typer.Option(help="test (default), val or train.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Other data with the same classes: name, folder or .npz file.")
    ] = None,
    views: ViewsOption = 1,
    best: BestOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the corruption tests.")] = False,
    merge_tokens: MergeTokensOption = None,
    drop_tokens: DropTokensOption = None,
    target_error: TargetErrorOption = 0.02,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Measure accuracy, per-class scores, calibration and robustness to corruptions. Suggest a threshold for predict.

    Figures and report.json go to RUN/evaluation/SPLIT/. The folder's name contains the options,
    such as val-2-views-best-merge8. With --data, it starts with the data's name and a hash.
    Each use of the test set is logged.

    Example: vitascope evaluate runs/digits --split val
    """
    from vitascope.evaluation.evaluate import evaluate_and_log_test_use
    from vitascope.evaluation.figures import write_evaluation_json_and_figures

    reduction = {"merge_tokens": merge_tokens, "drop_tokens": drop_tokens}
    model = open_model_and_print_notes_to_stderr(run, best=best, device="auto", **reduction)
    check_views_option_matches_training(model, views)
    options = {"split": split, "data": data, "views": views, "robustness": not quick, "target_error": target_error}
    with _show_progress_on_stderr(has_corruption_tests=not quick) as report_progress:
        evaluation = evaluate_and_log_test_use(model, **options, report_progress=report_progress)
    print_unreadable_files(evaluation.eval_data.unreadable_files)
    if as_json:
        print(json.dumps(evaluation.as_dict()))
    else:
        print(describe_run_or_model(model))
        _print_evaluation(evaluation)
    # Last: the numbers are printed even if the folder cannot be written.
    folder = write_evaluation_json_and_figures(evaluation)
    if not as_json:
        print(f"Figures and report.json: {folder}")


@contextmanager
def _show_progress_on_stderr(*, has_corruption_tests: bool) -> "Iterator[ProgressReporter]":
    """Show a spinner while the images are evaluated, then a bar for the corruption tests."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn())
    hint = "; --quick skips the corruption tests" if has_corruption_tests else ""
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Evaluating. On a CPU this can take minutes{hint} …", total=None)

        def report_progress(description: str, fraction: float) -> None:
            bar.update(task, description=f"Corruption tests (--quick skips them): {description}", total=1.0)
            bar.update(task, completed=fraction)

        yield report_progress


def _print_evaluation(evaluation: "Evaluation") -> None:
    from vitascope.cli.coverage import print_coverage_table_and_threshold

    if evaluation.eval_data.label_note:
        print(evaluation.eval_data.label_note)
    print_evaluation_summary(evaluation)
    _print_class_and_corruption_tables(evaluation)
    print_coverage_table_and_threshold(evaluation)


def check_views_option_matches_training(model: "Classifier", views: int) -> None:
    """Reject --views that the run was not trained with, before the images are read."""
    from vitascope.inference.scoring import check_views_match_training

    if views != 1:
        check_views_match_training(model.run.recipe, views, "--views {}")


def print_evaluation_summary(evaluation: "Evaluation") -> None:
    """Print accuracy, calibration and temperature scaling."""
    from vitascope.evaluation.report import spell_out_split_name

    data, (low, high) = evaluation.eval_data, evaluation.accuracy_interval
    split, num_images = spell_out_split_name(data.split), len(data.samples)
    views = f", {evaluation.views} views each" if evaluation.views > 1 else ""
    kind = "linear-probe " if evaluation.is_linear_probe else ""
    epoch = " (best epoch)" if evaluation.weights_label.startswith("best") else ""
    reduction = f" ({evaluation.reduction})" if evaluation.reduction else ""
    name = f"{split} accuracy" if data.is_run_data else f"accuracy on {Path(data.data_name).name} ({split})"
    print(
        f"{kind}{name} {format_percent(evaluation.accuracy, 2)}{epoch}{reduction} on {num_images:,} images{views} "
        f"(95 % confidence interval {format_percent(low, 2)} to {format_percent(high, 2)})"
    )
    if note := _describe_accuracy_during_training_if_different(evaluation):
        print(note)
    before, after = evaluation.calibration, evaluation.temperature
    top = f"top-5 {format_percent(evaluation.top5, 2)}, " if len(evaluation.classes) > 5 else ""
    print(f"{top}loss {before.loss:z.3f}, {before.description}")
    if after:
        effect = f"loss {after.loss:z.3f}, expected calibration error {format_percent(after.ece)}"
        print(f"After temperature scaling (logits / {after.value:.2f}, {evaluation.temperature_note}): {effect}")
        if evaluation.temperature_warning:
            print(evaluation.temperature_warning)
    else:
        print(f"{evaluation.temperature_note}{_describe_use_of_unreported_temperature(evaluation)}")
    if evaluation.test_use_count and evaluation.test_use_count > 1:
        print(
            f"Evaluation {evaluation.test_use_count} of this run on these test images. If you change settings after "
            "seeing a test result, later test results are too optimistic."
            + (
                " vitascope record uses the first one with the last epoch's weights and the same --views."
                if data.is_run_data
                else ""
            )
        )


def _describe_use_of_unreported_temperature(evaluation: "Evaluation") -> str:
    """Say where a temperature is applied that the metrics do not use; empty if there is none."""
    temperature = evaluation.run_temperature
    if temperature is None or temperature.value == 1:
        return ""
    return f" The table of thresholds below and predict use temperature {temperature.value:.2f}."


def _describe_accuracy_during_training_if_different(evaluation: "Evaluation") -> str | None:
    """Name the validation accuracy during training if it was computed in another precision and differs."""
    run, data = evaluation.run, evaluation.eval_data
    is_same_measurement = (
        evaluation.weights_label == "last" and evaluation.views == 1 and not evaluation.is_linear_probe
    )
    if not (is_same_measurement and data.is_run_data and data.split == "val") or evaluation.reduction:
        return None
    precision, rows = run.training_precision, run.metrics
    if precision in (None, "float32") or not rows or "val_accuracy" not in rows[-1]:
        return None
    accuracy = format_percent(rows[-1]["val_accuracy"], 2)
    if accuracy == format_percent(evaluation.accuracy, 2):
        return None
    return f"Computed in float32; during training, in {precision}, it was {accuracy}."


def print_unreadable_files(file_names: list[str]) -> None:
    for file in file_names:
        print(f"Note: {file} cannot be read as an image and is skipped.", file=sys.stderr)


def _print_class_and_corruption_tables(evaluation: "Evaluation") -> None:
    from vitascope.evaluation.report import list_most_frequent_wrong_predictions

    all_wrong_predictions = list_most_frequent_wrong_predictions(evaluation.confusion_matrix, evaluation.classes)
    columns = [
        "class",
        "images",
        "precision",
        "recall",
        "95 % CI of recall",
        "F1",
        "most frequent wrong predictions (images)",
    ]
    rows = [
        [
            name,
            f"{row.images:,}",
            format_percent(row.precision),
            format_percent(row.recall),
            "–"
            if row.recall is None
            else f"{format_percent(row.recall_interval[0])} to {format_percent(row.recall_interval[1])}",
            format_percent(row.f1),
            wrong_predictions,
        ]
        for (name, row), wrong_predictions in zip(evaluation.per_class.items(), all_wrong_predictions, strict=True)
    ]
    title = "Per-class results"
    if len(rows) > MAX_TABLE_CLASSES:
        rows = [row for row in rows if row[1] != "0"]
    if len(rows) > MAX_TABLE_CLASSES:
        title += f": the {MAX_TABLE_CLASSES} classes with the lowest recall (all classes: report.json)"
        scores = [row for row in evaluation.per_class.values() if row.images]
        order = sorted(range(len(rows)), key=lambda row: (scores[row].recall is None, scores[row].recall or 0))
        rows = [rows[row] for row in order[:MAX_TABLE_CLASSES]]
    create_console().print(create_table(title, columns, rows, right_aligned=set(columns[1:6])))
    if evaluation.robustness:
        _print_robustness_table(evaluation.robustness)


def _print_robustness_table(robustness: "dict[str, RobustnessCurve]") -> None:
    from vitascope.evaluation.robustness import CORRUPTIONS

    first = next(iter(robustness.values()))
    rows = [
        [
            f"{name} ({CORRUPTIONS[name].short_unit})",
            *(
                f"{level:g}: {format_percent(value)}"
                for level, value in zip(curve.levels[1:], curve.accuracy[1:], strict=True)
            ),
        ]
        for name, curve in robustness.items()
    ]
    title = f"Accuracy on {first.images:,} corrupted images. Each cell: strength: accuracy. "
    title += f"Uncorrupted: {format_percent(first.accuracy[0])}"
    levels = [f"level {level}" for level in range(1, len(first.levels))]
    create_console().print(create_table(title, ["corruption", *levels], rows, right_aligned=levels))
