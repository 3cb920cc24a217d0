"""Draw the figures of an evaluation: confusion matrix, reliability diagram, robustness curves, worst errors."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitascope.draw.evaluation import (
    CorruptionCurve,
    CoveragePoint,
    ReliabilityBin,
    draw_confusion_matrix,
    draw_corruption_curves,
    draw_coverage_curve,
    draw_reliability_diagram,
)
from vitascope.draw.html import Part, Picture, Table
from vitascope.draw.images import draw_image_tiles
from vitascope.draw.style import save_figure, shorten_name
from vitascope.errors import format_count
from vitascope.evaluation.calibration import NUM_BINS, CalibrationBin
from vitascope.evaluation.embedding import Neighbours
from vitascope.evaluation.report import Evaluation, spell_out_split_name
from vitascope.evaluation.robustness import RobustnessCurve
from vitascope.inference.scoring import Interval
from vitascope.number_format import format_number, format_percent
from vitascope.run.directory import ExternalWeightsRun
from vitascope.run.files import make_folder, read_json_object_or_empty, write_json

MAX_NAME_LENGTH = 20
MIN_IMAGES_FOR_TWO_DECIMALS = 1000
SAME = " (same image)"  # mark of a neighbour with the query's pixels


def write_evaluation_json_and_figures(evaluation: Evaluation) -> Path:
    """Write report.json and the figures to `RUN/evaluation/SPLIT/`; other data or options are added to the name."""
    folder = evaluation.run.get_path("evaluation") / _make_folder_name(evaluation)
    make_folder(folder)
    evaluation = (
        evaluation
        if evaluation.robustness
        else _reuse_robustness_of_earlier_report_if_same(evaluation, folder / "report.json")
    )
    for old_figure in folder.glob("*.png"):
        old_figure.unlink()
    write_json(folder / "report.json", evaluation.as_dict())
    for name, figure in draw_evaluation_figures(evaluation).items():
        save_figure(figure, folder / f"{name}.png")
    return folder


def _make_folder_name(evaluation: Evaluation) -> str:
    """Return SPLIT, preceded by other data and followed by the options, such as val-2-views-best-merge8."""
    eval_data = evaluation.eval_data
    parts = [eval_data.split]
    if not eval_data.is_run_data:  # two folders may have one name
        path_hash = hashlib.blake2b(eval_data.data_name.encode(), digest_size=3).hexdigest()
        parts = ["_".join(Path(eval_data.data_name).name.split()), path_hash, *parts]
    parts += [f"{evaluation.views}-views"] if evaluation.views > 1 else []
    epoch, *reductions = evaluation.weights_label.split(", ")
    parts += [epoch] if epoch != "last" else []
    parts += [reduction.replace("_tokens=", "") for reduction in reductions]
    return "-".join(parts)


def _reuse_robustness_of_earlier_report_if_same(evaluation: Evaluation, report_path: Path) -> Evaluation:
    """Add the robustness of an earlier report if it is about the same predictions for the same images."""
    earlier, current = read_json_object_or_empty(report_path), evaluation.as_dict()
    is_same = all(
        earlier.get(name) == current[name] for name in ("data", "split", "images", "views", "weights", "confusion")
    )
    if not is_same or not math.isclose(earlier["loss"], evaluation.loss, rel_tol=1e-4):
        return evaluation
    curves = {
        name: RobustnessCurve(**row | {"intervals": [Interval(*pair) for pair in row["intervals"]]})
        for name, row in earlier["robustness"].items()
    }
    return replace(evaluation, robustness=curves)


def draw_evaluation_figures(evaluation: Evaluation) -> dict[str, Figure]:
    num_images = len(evaluation.eval_data.samples)
    num_decimals = 2 if num_images >= MIN_IMAGES_FOR_TWO_DECIMALS else 1
    figures = {
        "confusion": draw_confusion_matrix(
            evaluation.confusion_matrix.numpy(),
            evaluation.classes,
            f"{_format_evaluation_title(evaluation)}: {evaluation.accuracy_name} "
            f"{format_percent(evaluation.accuracy, num_decimals)}, {num_images:,} images",
        ),
        "reliability": _draw_reliability_diagram(evaluation),
        "coverage": _draw_coverage_curve(evaluation),
    }
    if evaluation.robustness:
        figures["robustness"] = _draw_robustness_curves(evaluation)
    return figures | ({"errors": _draw_worst_errors(evaluation)} if evaluation.worst_errors else {})


def make_evaluation_document_parts(evaluation: Evaluation, *, include_worst_errors: bool = True) -> list[Part]:
    """Return the tables and figures of an evaluation, for a notebook or a report."""
    low, high = evaluation.accuracy_interval
    num_images, split = len(evaluation.eval_data.samples), spell_out_split_name(evaluation.eval_data.split)
    rows = [
        [
            evaluation.accuracy_name,
            f"{format_percent(evaluation.accuracy, 2)} "
            f"(95 % confidence interval {format_percent(low, 2)} to {format_percent(high, 2)})",
        ],
        *([["top-5 accuracy", format_percent(evaluation.top5, 2)]] if len(evaluation.classes) > 5 else []),
        ["expected calibration error", format_percent(evaluation.calibration.ece, 2)],
        ["images", f"{num_images:,} {split} images, {format_count(evaluation.views, 'view')}"],
    ]
    classes = [
        [
            name,
            f"{row.images:,}",
            *("–" if score is None else format_percent(score) for score in (row.precision, row.recall)),
        ]
        for name, row in evaluation.per_class.items()
    ]
    return [
        Table([_format_evaluation_title(evaluation), ""], rows),
        Table(["class", "images", "precision", "recall"], classes),
        *(
            Picture.from_figure(name, figure)
            for name, figure in draw_evaluation_figures(evaluation).items()
            if include_worst_errors or name != "errors"
        ),
    ]


def draw_query_and_neighbours(neighbours: Neighbours) -> Figure:
    images = [
        _convert_image_for_drawing(neighbours.query_image),
        *(_convert_image_for_drawing(image) for image in neighbours.nearest_samples.images),
    ]
    best, prediction = neighbours.prediction, ""
    if best is not None:
        prediction = f"\npredicted: {_shorten_name(best.label)} ({format_percent(best.probability, 0)})"
    captions = [f"query{prediction}"]
    captions += [
        f"{_shorten_name(name)}{SAME * is_same}\nsimilarity {format_number(value, 'z.3f')}"
        for name, value, is_same in zip(neighbours.labels, neighbours.similarities, neighbours.identical, strict=True)
    ]
    text = (
        f"The query image (framed) and the most similar of {neighbours.searched_description}, "
        "each with its class or folder. "
        "Cosine similarity of the pooled features (1: same direction). Compare values only within one model."
    )
    return draw_image_tiles(images, captions, text, framed_index=0)


def _draw_reliability_diagram(evaluation: Evaluation) -> Figure:
    calibration, scaling = evaluation.calibration, evaluation.temperature
    description = calibration.description
    text = f"{_format_evaluation_title(evaluation)}. {description[0].upper()}{description[1:]}. "
    text += f"{NUM_BINS} bins; empty bins are not drawn. "
    scaled_bins, legend_names = None, ("model", "")
    if scaling:
        scaled_bins, legend_names = (
            _convert_nonempty_bins_for_drawing(scaling.bins),
            ("without temperature scaling", "after temperature scaling"),
        )
        intro = f"After temperature scaling (logits / {scaling.value:.2f}, {evaluation.temperature_note})"
        text += f"{intro} the error is {format_percent(scaling.ece)}. "
        text += f"{evaluation.temperature_warning} " if evaluation.temperature_warning else ""
    text += "Above the dashed line the model is under-confident, below it over-confident. "
    text += "Bars: gap to perfect calibration."
    return draw_reliability_diagram(
        _convert_nonempty_bins_for_drawing(calibration.bins), scaled_bins, legend_names, text
    )


def _convert_nonempty_bins_for_drawing(bins: list[CalibrationBin]) -> list[ReliabilityBin]:
    return [
        ReliabilityBin(bin_.low, bin_.high, bin_.images, bin_.confidence, bin_.accuracy)
        for bin_ in bins
        if bin_.confidence is not None and bin_.accuracy is not None
    ]


def _draw_coverage_curve(evaluation: Evaluation) -> Figure:
    coverage = evaluation.coverage
    points = [
        CoveragePoint(row.threshold, row.coverage, row.accuracy, row.interval)
        for row in coverage.rows
        if row.accuracy is not None
    ]
    text = f"{_format_evaluation_title(evaluation)}. An image is answered if the probability of its predicted class is "
    text += "at least the threshold (number at the point). Shaded: 95 % confidence interval of the accuracy. "
    if coverage.temperature != 1:
        text += f"Logits are divided by {coverage.temperature:.2f}, as in predict. "
    chosen = coverage.suggestion.row
    return draw_coverage_curve(
        points, [row.threshold for row in coverage.table_rows], chosen.threshold if chosen else None, text
    )


def _draw_robustness_curves(evaluation: Evaluation) -> Figure:
    curves = {
        name: CorruptionCurve(curve.unit, curve.levels, curve.accuracy, curve.intervals)
        for name, curve in evaluation.robustness.items()
    }
    images = next(iter(evaluation.robustness.values())).images
    text = f"{_format_evaluation_title(evaluation)}: accuracy on {images:,} corrupted images, by corruption and level. "
    text += "Shaded: 95 % confidence interval. Dotted: random guessing."
    return draw_corruption_curves(curves, 1 / len(evaluation.classes), text)


def _draw_worst_errors(evaluation: Evaluation) -> Figure:
    images = [
        _convert_image_for_drawing(evaluation.eval_data.samples.images[error.index])
        for error in evaluation.worst_errors
    ]
    captions = [
        f"true: {_shorten_name(error.label)} ({_format_probability(error.probability_of_label)})\n"
        f"predicted: {_shorten_name(error.said)} ({_format_probability(error.probability)})"
        + (f"\n{_shorten_name(Path(error.file).name)}" if error.file else "")
        for error in evaluation.worst_errors
    ]
    order = ", ordered by the probability of the true class" if len(captions) > 1 else ""
    text = (
        f"{_format_evaluation_title(evaluation)}: {describe_number_of_shown_errors(evaluation, len(captions))}{order}. "
    )
    text += "The model's probabilities are in parentheses. "
    text += describe_possible_mislabelling(len(captions))
    return draw_image_tiles(images, captions, text)


def _format_probability(probability: float) -> str:
    """Return a percentage in one piece, which is 0 or 100 only if the probability is."""
    text = format_percent(probability)
    if 0 < probability < 0.0005:
        text = "< 0.1 %"
    elif 0.9995 <= probability < 1:
        text = "> 99.9 %"
    return text.replace(" ", "\u00a0")


def describe_number_of_shown_errors(evaluation: Evaluation, num_shown: int) -> str:
    """Return 'all 5 errors', or 'the worst 12 of 50 errors' if only some are shown."""
    count = len(evaluation.eval_data.samples) - evaluation.num_correct
    if num_shown < count:
        return f"the worst {num_shown} of {count:,} errors"
    return f"all {count} errors" if count > 1 else "the only error"


def describe_possible_mislabelling(num_shown: int) -> str:
    subject = "The image" if num_shown == 1 else "Some of these images"
    return f"{subject} may be mislabelled in the data set."


def _format_evaluation_title(evaluation: Evaluation) -> str:
    views = f", {evaluation.views} views" if evaluation.views > 1 else ""
    recipe, data = evaluation.run.recipe.name, Path(evaluation.eval_data.data_name).name
    kind = "model" if isinstance(evaluation.run, ExternalWeightsRun) else "run"
    subject = f"{kind} {recipe}" if recipe == data else f"{kind} {recipe}, data {data}"
    epoch = ", best epoch" if evaluation.weights_label.startswith("best") else ""
    reduction = f", {evaluation.reduction}" if evaluation.reduction else ""
    return f"{subject}, {spell_out_split_name(evaluation.eval_data.split)} images{views}{epoch}{reduction}"


def _convert_image_for_drawing(image: Tensor) -> NDArray:
    """Return rows × columns × channels between 0 and 1, as `draw` expects."""
    return image.permute(1, 2, 0).numpy() / 255


def _shorten_name(name: str) -> str:
    return shorten_name(name, MAX_NAME_LENGTH)
