"""Figures of an evaluation: confusion matrix, reliability diagram, accuracy against corruption level."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw import COLOURS
from vitascope.draw.style import add_caption, create_figure, escape_mathtext, set_labels, shorten_name, wrap_text

MAX_NAME_LENGTH = 24
MAX_CLASSES_WITH_NUMBERS, MAX_CLASSES_WITH_NAMES = 20, 50  # classes up to which cells hold numbers, and axes names

MIN_CELL_PERCENTAGE = 0.05  # smaller ones would be written as 0.0

ERROR_COLOURMAP = LinearSegmentedColormap.from_list(
    "errors", ["white", "#fdbb84", "#e34a33", "#7f0000"]
)  # no error: white


def draw_confusion_matrix(counts: NDArray, class_names: list[str], title: str) -> Figure:
    """Draw true classes as rows and predicted classes as columns; cells are percentages of the row."""
    num_all_classes = len(counts)
    counts, class_names = _drop_absent_classes_if_too_many(counts, class_names)
    classes, has_images = len(class_names), counts.sum(1) > 0
    percentages = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    errors = percentages.copy()
    np.fill_diagonal(errors, np.nan)
    labels = [escape_mathtext(shorten_name(name, MAX_NAME_LENGTH)) for name in class_names]
    side = float(np.clip(0.55 * classes + 2.4, 4.5, 12))
    figure, (panel,) = create_figure(1, width=side + 1.2, height=side + 0.6)
    top = max(float(np.nanmax(errors)), 1.0) if classes > 1 else 1.0
    panel.set_facecolor("#e8e8e8")  # the diagonal: correct predictions stay grey
    heat_map = panel.imshow(errors, cmap=ERROR_COLOURMAP, vmin=0, vmax=top)
    figure.colorbar(heat_map, ax=panel, shrink=0.75, label="errors in % of the true class")
    if classes <= MAX_CLASSES_WITH_NUMBERS:
        _draw_cell_percentages(panel, percentages, has_images, top)
    set_labels(panel, wrap_text(title, int(7 * side)), "predicted class", "true class")
    if classes <= MAX_CLASSES_WITH_NAMES:
        slanted: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        panel.set_xticks(range(classes), labels, **(slanted if max(map(len, labels)) > 3 else {}))
        panel.set_yticks(range(classes), labels)
    text = "Confusion matrix in %: each row sums to 100 %. Grey diagonal: recall. Coloured: errors."
    if classes <= MAX_CLASSES_WITH_NUMBERS:
        has_tiny_cells = bool(((percentages > 0) & (percentages < MIN_CELL_PERCENTAGE)).any())
        text += f" White: {f'less than {MIN_CELL_PERCENTAGE} %' if has_tiny_cells else '0'}."
    if not has_images.all():
        text += " An empty row is a class without images."
    if classes < num_all_classes:
        text = f"The {classes} most frequent of {num_all_classes} classes. " + text
    add_caption(figure, text)
    return figure


def _draw_cell_percentages(
    panel: Axes, percentages: NDArray, row_has_images: NDArray, max_error_percentage: float
) -> None:
    for row, column in np.ndindex(percentages.shape):
        value, is_correct = percentages[row, column], row == column
        text = f"{value:.1f}" if row_has_images[row] and (is_correct or value >= MIN_CELL_PERCENTAGE) else ""
        colour = "white" if not is_correct and value > 0.6 * max_error_percentage else "black"
        weight = "bold" if is_correct else None
        panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=8, fontweight=weight)


class LimitedClasses(NamedTuple):
    counts: NDArray  # true class × predicted class
    class_names: list[str]


def _drop_absent_classes_if_too_many(counts: NDArray, class_names: list[str]) -> LimitedClasses:
    """Limit many classes to those with images, then to those predicted most often."""
    has_images = counts.sum(1) > 0
    if len(class_names) <= MAX_CLASSES_WITH_NAMES or has_images.sum() > MAX_CLASSES_WITH_NAMES:
        return LimitedClasses(counts, class_names)
    order = np.argsort(-(counts.sum(0) + counts.sum() * has_images), kind="stable")[:MAX_CLASSES_WITH_NAMES]
    selected = np.sort(order[(counts.sum(0)[order] > 0) | has_images[order]])
    return LimitedClasses(counts[np.ix_(selected, selected)], [class_names[index] for index in selected])


class ReliabilityBin(NamedTuple):
    """A bin with at least one image."""

    low: float
    high: float
    images: int
    confidence: float  # mean
    accuracy: float


CalibrationBins = Sequence[ReliabilityBin]


def draw_reliability_diagram(
    uncalibrated_bins: CalibrationBins,
    temperature_scaled_bins: CalibrationBins | None,
    legend_names: tuple[str, str],
    caption_text: str,
) -> Figure:
    """Draw accuracy against confidence; `legend_names`: without and with temperature scaling."""
    figure, (main, counts) = create_figure(2, width=10.0, height=4.8)
    main.plot([0, 100], [0, 100], color="#888888", linestyle="--", linewidth=1, label="perfect calibration")
    for bins, name, colour, marker in (
        (uncalibrated_bins, legend_names[0], COLOURS[0], "o"),
        (temperature_scaled_bins, legend_names[1], COLOURS[1], "s"),
    ):
        if bins:
            confidences, accuracies = [100 * row.confidence for row in bins], [100 * row.accuracy for row in bins]
            main.vlines(confidences, confidences, accuracies, color=colour, alpha=0.35, linewidth=4)
            main.plot(confidences, accuracies, color=colour, marker=marker, markersize=5, label=name)
            counts.stairs(*_compute_histogram_steps(bins), color=colour, label=name, linewidth=1.6, baseline=0.5)
    main.set_xlim(0, 101)
    main.set_ylim(0, 101)
    main.set_aspect("equal")
    main.grid(alpha=0.25)
    main.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=9)  # below: data can be anywhere inside
    set_labels(main, "reliability diagram", "confidence in % (mean of the bin)", "accuracy in %")
    counts.set_yscale("log")
    counts.set_xlim(0, 101)
    counts.grid(alpha=0.25)
    set_labels(counts, "histogram of the confidence", "confidence in %", "number of images")
    add_caption(figure, caption_text)
    return figure


class HistogramSteps(NamedTuple):
    counts: list[float]
    edges: list[float]  # in percent


def _compute_histogram_steps(bins: CalibrationBins) -> HistogramSteps:
    """Return the histogram of all bins, empty ones included."""
    width = bins[0].high - bins[0].low
    num_bins = round(1 / width)
    counts = [0.0] * num_bins
    for reliability_bin in bins:
        counts[round(reliability_bin.low / width)] = reliability_bin.images
    return HistogramSteps(counts, [100 * index / num_bins for index in range(num_bins + 1)])


class CorruptionCurve(NamedTuple):
    unit: str
    levels: list[float]
    accuracy: list[float]
    intervals: Sequence[tuple[float, float]]


def draw_corruption_curves(curves: dict[str, CorruptionCurve], chance_accuracy: float, caption_text: str) -> Figure:
    """Draw the curves; accuracies are fractions, `chance_accuracy` is that of random guessing."""
    figure, panels = create_figure(len(curves), width=3.1 * len(curves), height=3.6)
    for panel, colour, (name, (unit, levels, accuracy, spans)) in zip(panels, COLOURS, curves.items(), strict=False):
        low, high = zip(*spans, strict=True)
        panel.fill_between(
            levels, [100 * v for v in low], [100 * v for v in high], color=colour, alpha=0.2, linewidth=0
        )
        panel.plot(levels, [100 * v for v in accuracy], color=colour, marker="o", markersize=4)
        panel.axhline(100 * chance_accuracy, color="#888888", linestyle=":", linewidth=1)
        panel.set_ylim(0, 101)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.25)
        set_labels(panel, name, unit, "accuracy in %" if panel is panels[0] else "")
    add_caption(figure, caption_text)
    return figure


class CoveragePoint(NamedTuple):
    """The answered images at one threshold, of which there is at least one."""

    threshold: float
    coverage: float  # fraction of all images
    accuracy: float
    interval: tuple[float, float]


CHARACTER_WIDTH, CHARACTER_HEIGHT = 0.014, 0.05  # of a threshold's number, as fractions of the axes


def draw_coverage_curve(
    points: Sequence[CoveragePoint],
    marked_thresholds: Sequence[float],
    suggested_threshold: float | None,
    caption_text: str,
) -> Figure:
    """Draw accuracy against coverage; the marked thresholds are written above their points, where there is room."""
    figure, (panel,) = create_figure(1, width=6.4, height=4.6)
    coverage, accuracy = ([100 * point[field] for point in points] for field in (1, 2))
    low, high = ([100 * point.interval[end] for point in points] for end in (0, 1))
    panel.fill_between(coverage, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    panel.plot(coverage, accuracy, color=COLOURS[0])
    panel.margins(x=0.06, y=0.12)
    marked = [point for point in points if point.threshold in marked_thresholds]
    for point in marked:
        panel.plot(100 * point.coverage, 100 * point.accuracy, "o", color=COLOURS[0], markersize=5)
        if point.threshold == suggested_threshold:
            label, position = f"suggested threshold {point.threshold:g}", (100 * point.coverage, 100 * point.accuracy)
            panel.plot(*position, "o", color=COLOURS[1], markersize=9, label=label)
            panel.legend(loc="lower left", fontsize=9)
    _write_thresholds_without_overlap(panel, marked)
    panel.grid(alpha=0.25)
    set_labels(panel, "accuracy of the answered images", "answered images in %", "accuracy of the answered in %")
    add_caption(figure, caption_text)
    return figure


class PlacedLabel(NamedTuple):
    """A written text: the middle of its lower edge, as fractions of the axes, and its length."""

    x: float
    y: float
    num_characters: int

    def overlaps(self, other: "PlacedLabel") -> bool:
        width = CHARACTER_WIDTH * (self.num_characters + other.num_characters) / 2
        return abs(self.x - other.x) < width and abs(self.y - other.y) < CHARACTER_HEIGHT


def _write_thresholds_without_overlap(panel: Axes, points: Sequence[CoveragePoint]) -> None:
    """Write the thresholds above their points, the highest first. Thresholds at one point are written as a range."""
    (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    thresholds_by_position: dict[tuple[float, float], list[float]] = {}
    for point in points:
        thresholds_by_position.setdefault((100 * point.coverage, 100 * point.accuracy), []).append(point.threshold)
    written: list[PlacedLabel] = []
    for (x, y), thresholds in reversed(thresholds_by_position.items()):
        low, high = min(thresholds), max(thresholds)
        text = f"{low:g}" if low == high else f"{low:g}–{high:g}"
        label = PlacedLabel((x - left) / (right - left), (y - bottom) / (top - bottom), len(text))
        if not any(label.overlaps(other) for other in written):
            panel.annotate(text, (x, y), (0, 7), textcoords="offset points", fontsize=8, ha="center")
            written.append(label)
