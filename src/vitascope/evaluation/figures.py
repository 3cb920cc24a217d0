"""Draw the figures of an evaluation: confusion matrix, reliability diagram, robustness curves, worst errors."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from vitascope.draw.evaluation import draw_confusion_matrix, draw_corruption_curves, draw_reliability_diagram
from vitascope.draw.html import encode_figure_as_html, make_html_table
from vitascope.draw.images import draw_image_tiles
from vitascope.draw.style import save_figure, shorten_name
from vitascope.errors import format_count
from vitascope.evaluation.calibration import CalibrationBin
from vitascope.evaluation.embedding import Neighbours
from vitascope.evaluation.report import Evaluation, format_split_name
from vitascope.evaluation.robustness import RobustnessCurve
from vitascope.run.files import make_folder, read_json, write_json

MAX_NAME_LENGTH = 20
SAME = " (same image)"  # mark of a neighbour with the query's pixels


def write_evaluation_report(evaluation: Evaluation) -> Path:
    """Write report.json and the figures to `RUN/evaluation/SPLIT/`; other data, views or weights get other folders."""
    choice = evaluation.eval_data
    parts = [choice.split]
    if not choice.is_run_data:  # two folders may have one name
        parts = [
            Path(choice.data_name).name,
            hashlib.blake2b(choice.data_name.encode(), digest_size=3).hexdigest(),
            *parts,
        ]
    parts += [f"{evaluation.views}-views"] if evaluation.views > 1 else []
    parts += [evaluation.weights_label] if evaluation.weights_label != "last" else []
    folder = evaluation.run.get_path("evaluation") / "-".join(parts)
    make_folder(folder)
    evaluation = evaluation if evaluation.robustness else _add_earlier_robustness(evaluation, folder / "report.json")
    for old in folder.glob("*.png"):
        old.unlink()
    write_json(folder / "report.json", evaluation.as_dict())
    for name, figure in draw_evaluation_figures(evaluation).items():
        save_figure(figure, folder / f"{name}.png")
    return folder


def _add_earlier_robustness(found: Evaluation, report: Path) -> Evaluation:
    """Add the robustness of an earlier report if it is about the same predictions for the same images."""
    earlier, told = read_json(report), found.as_dict()
    same = all(earlier.get(name) == told[name] for name in ("data", "split", "images", "views", "weights", "confusion"))
    if not same or not math.isclose(earlier["loss"], found.loss, rel_tol=1e-4):
        return found
    declines = {
        name: RobustnessCurve(**row | {"intervals": [(low, high) for low, high in row["intervals"]]})
        for name, row in earlier["robustness"].items()
    }
    return replace(found, robustness=declines)


def draw_evaluation_figures(evaluation: Evaluation) -> dict[str, Figure]:
    pictures = {
        "confusion": draw_confusion_matrix(
            evaluation.confusion_matrix.numpy(),
            evaluation.classes,
            f"{_format_evaluation_title(evaluation)}: accuracy {evaluation.accuracy:.2%}, {len(evaluation.eval_data.samples):,} images",
        ),
        "reliability": _draw_reliability_diagram(evaluation),
    }
    if evaluation.robustness:
        pictures["robustness"] = _draw_robustness_curves(evaluation)
    return pictures | ({"errors": _draw_worst_errors(evaluation)} if evaluation.worst_errors else {})


def format_evaluation_html(evaluation: Evaluation, *, errors: bool = True) -> str:
    """Return tables and figures; `errors=False` leaves out the worst errors."""
    low, high = evaluation.accuracy_interval
    views = format_count(evaluation.views, "view")
    rows = [
        ["accuracy", f"{evaluation.accuracy:.2%} (95 % confidence interval {low:.2%} to {high:.2%})"],
        ["top-5 accuracy", f"{evaluation.top5:.2%}"],
        ["expected calibration error", f"{evaluation.calibration.ece:.2%}"],
        [
            "images",
            f"{len(evaluation.eval_data.samples):,} {format_split_name(evaluation.eval_data.split)} images, {views}",
        ],
    ]
    classes = [
        [name, f"{row.images:,}", *("–" if share is None else f"{share:.1%}" for share in (row.precision, row.recall))]
        for name, row in evaluation.per_class.items()
    ]
    tables = make_html_table([_format_evaluation_title(evaluation), ""], rows) + make_html_table(
        ["class", "images", "precision", "recall"], classes
    )
    shown = {name: figure for name, figure in draw_evaluation_figures(evaluation).items() if errors or name != "errors"}
    return tables + "".join(encode_figure_as_html(figure) for figure in shown.values())


def draw_neighbours(neighbours: Neighbours) -> Figure:
    images = [
        _convert_image_for_drawing(neighbours.query_image),
        *(_convert_image_for_drawing(image) for image in neighbours.nearest_samples.images),
    ]
    said = (
        ""
        if neighbours.prediction is None
        else f"\npredicted: {_shorten_name(neighbours.prediction.label)} ({neighbours.prediction.probability:.0%})"
    )
    words = [f"query{said}"]
    words += [
        f"{_shorten_name(name)}{SAME * same}\nsimilarity {value:.3f}"
        for name, value, same in zip(neighbours.labels, neighbours.similarities, neighbours.identical, strict=True)
    ]
    text = (
        f"The query image (framed) and the most similar of {neighbours.searched_description}, each with its class or folder. "
        "Similarity is the cosine between pooled features: 1 is most similar, 0 is unrelated."
    )
    return draw_image_tiles(images, words, text, framed_index=0)


def _draw_reliability_diagram(evaluation: Evaluation) -> Figure:
    before, warmth = evaluation.calibration, evaluation.temperature
    text = (
        f"{_format_evaluation_title(evaluation)}. Expected calibration error {before.ece:.1%} (15 bins). The model is "
    )
    text += f"{'over' if before.gap > 0 else 'under'}-confident by {100 * abs(before.gap):.1f} percentage points. "
    after, names = None, ("model", "")
    if warmth:
        after, names = _drop_empty_bins(warmth.bins), ("without temperature scaling", "after temperature scaling")
        scaling = f"After temperature scaling (logits / {warmth.value:.2f}, {evaluation.temperature_note})"
        text += f"{scaling} the error is {warmth.ece:.1%}. "
    text += "Above the dashed line the model is under-confident, below it over-confident. "
    text += "Bars: gap to perfect calibration."
    return draw_reliability_diagram(_drop_empty_bins(before.bins), after, names, text)


def _drop_empty_bins(bins: list[CalibrationBin]) -> list[tuple[float, float, int, float, float]]:
    return [
        (part.low, part.high, part.images, part.confidence, part.accuracy)
        for part in bins
        if part.confidence is not None and part.accuracy is not None
    ]


def _draw_robustness_curves(evaluation: Evaluation) -> Figure:
    curves = {
        name: (decline.unit, decline.levels, decline.accuracy, decline.intervals)
        for name, decline in evaluation.robustness.items()
    }
    images = next(iter(evaluation.robustness.values())).images
    text = f"{_format_evaluation_title(evaluation)}: accuracy on {images:,} corrupted images, by corruption and level. "
    text += "Shaded: 95 % confidence interval. Dotted: random guessing."
    return draw_corruption_curves(curves, 1 / len(evaluation.classes), text)


def _draw_worst_errors(evaluation: Evaluation) -> Figure:
    images = [
        _convert_image_for_drawing(evaluation.eval_data.samples.images[mistake.index])
        for mistake in evaluation.worst_errors
    ]
    words = [
        f"true: {_shorten_name(item.label)} ({item.probability_of_label:.1%})\n"
        f"predicted: {_shorten_name(item.said)} ({item.probability:.0%})"
        + (f"\n{_shorten_name(Path(item.file).name)}" if item.file else "")
        for item in evaluation.worst_errors
    ]
    order = ", ordered by the probability of the true class" if len(words) > 1 else ""
    text = f"{_format_evaluation_title(evaluation)}: {count_errors(evaluation, len(words))}{order}. The model's probabilities are in parentheses. "
    text += "Some of these images may be mislabelled in the data set."
    return draw_image_tiles(images, words, text)


def count_errors(found: Evaluation, shown: int) -> str:
    """Return 'all 5 errors', or 'the worst 12 of 50 errors' if only some are shown."""
    count = len(found.eval_data.samples) - found.num_correct
    if shown < count:
        return f"the worst {shown} of {count:,} errors"
    return f"all {count} errors" if count > 1 else "the only error"


def _format_evaluation_title(evaluation: Evaluation) -> str:
    views = f", {evaluation.views} views" if evaluation.views > 1 else ""
    recipe, data = evaluation.run.recipe.name, Path(evaluation.eval_data.data_name).name
    of = recipe if recipe == data else f"{recipe} on {data}"
    epoch = ", best epoch" if evaluation.weights_label.startswith("best") else ""
    reduction = f", {evaluation.reduction}" if evaluation.reduction else ""
    return f"{of}, {format_split_name(evaluation.eval_data.split)} images{views}{epoch}{reduction}"


def _convert_image_for_drawing(image: Tensor) -> NDArray:
    """Return rows × columns × channels between 0 and 1, as `draw` expects."""
    return image.permute(1, 2, 0).numpy() / 255


def _shorten_name(name: str) -> str:
    return shorten_name(name, MAX_NAME_LENGTH)
