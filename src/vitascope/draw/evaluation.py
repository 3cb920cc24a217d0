"""Figures of an evaluation: confusion matrix, reliability diagram, accuracy against corruption level."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.palette import COLOURS
from vitascope.draw.style import add_caption, create_figure, escape_mathtext, set_labels, shorten_name, wrap_text

MAX_NAME_LENGTH = 24
MAX_CLASSES_WITH_NUMBERS, MAX_CLASSES_WITH_NAMES = 20, 50  # classes up to which cells hold numbers, and axes names

ERROR_COLOURMAP = LinearSegmentedColormap.from_list(
    "errors", ["white", "#fdbb84", "#e34a33", "#7f0000"]
)  # no error: white


def draw_confusion_matrix(counts: NDArray, class_names: list[str], title: str) -> Figure:
    """Draw true classes as rows and predicted classes as columns; cells are percentages of the row."""
    whole = counts
    counts, class_names = _limit_classes(counts, class_names)
    classes, there = len(class_names), counts.sum(1) > 0
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    wrong = shares.copy()
    np.fill_diagonal(wrong, np.nan)
    short = [escape_mathtext(shorten_name(name, MAX_NAME_LENGTH)) for name in class_names]
    side = float(np.clip(0.55 * classes + 2.4, 4.5, 12))
    figure, (panel,) = create_figure(1, width=side + 1.2, height=side + 0.6)
    top = max(float(np.nanmax(wrong)), 1.0) if classes > 1 else 1.0
    panel.set_facecolor("#e8e8e8")  # the diagonal: correct predictions stay grey
    shown = panel.imshow(wrong, cmap=ERROR_COLOURMAP, vmin=0, vmax=top)
    figure.colorbar(shown, ax=panel, shrink=0.75, label="errors in % of the true class")
    if classes <= MAX_CLASSES_WITH_NUMBERS:
        _write_cell_percentages(panel, shares, there, top)
    set_labels(panel, wrap_text(title, int(7 * side)), "predicted class", "true class")
    if classes <= MAX_CLASSES_WITH_NAMES:
        slanted: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        panel.set_xticks(range(classes), short, **(slanted if max(map(len, short)) > 3 else {}))
        panel.set_yticks(range(classes), short)
    text = "Confusion matrix in %: each row sums to 100 %. Grey diagonal: recall. Coloured: errors."
    if not there.all():
        text += " An empty row is a class without images."
    if classes < len(whole):
        text = f"The {classes} most frequent of {len(whole)} classes. " + text
    add_caption(figure, text)
    return figure


def _write_cell_percentages(
    panel: Axes, percentages: NDArray, row_has_images: NDArray, max_error_percentage: float
) -> None:
    for row, column in np.ndindex(percentages.shape):
        value, right = percentages[row, column], row == column
        text = f"{value:.1f}" if row_has_images[row] and (right or value >= 0.05) else ""
        colour, weight = (
            "white" if not right and value > 0.6 * max_error_percentage else "black",
            "bold" if right else None,
        )
        panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=8, fontweight=weight)


def _limit_classes(counts: NDArray, class_names: list[str]) -> tuple[NDArray, list[str]]:
    """Limit many classes to those with images, then to those predicted most often."""
    there = counts.sum(1) > 0
    if len(class_names) <= MAX_CLASSES_WITH_NAMES or there.sum() > MAX_CLASSES_WITH_NAMES:
        return counts, class_names
    order = np.argsort(-(counts.sum(0) + counts.sum() * there), kind="stable")[:MAX_CLASSES_WITH_NAMES]
    kept = np.sort(order[(counts.sum(0)[order] > 0) | there[order]])
    return counts[np.ix_(kept, kept)], [class_names[number] for number in kept]


CalibrationBins = Sequence[
    tuple[float, float, int, float, float]
]  # low, high, images, mean confidence, accuracy: full ones only


def draw_reliability_diagram(
    uncalibrated_bins: CalibrationBins,
    temperature_scaled_bins: CalibrationBins | None,
    legend_names: tuple[str, str],
    caption_text: str,
) -> Figure:
    """Draw accuracy against confidence; `after` holds the bins with a fitted temperature."""
    figure, (main, counts) = create_figure(2, width=10.0, height=4.8)
    main.plot([0, 100], [0, 100], color="#888888", linestyle="--", linewidth=1, label="perfect calibration")
    for bins, name, colour, marker in (
        (uncalibrated_bins, legend_names[0], COLOURS[0], "o"),
        (temperature_scaled_bins, legend_names[1], COLOURS[1], "s"),
    ):
        if bins:
            sure, right = [100 * row[3] for row in bins], [100 * row[4] for row in bins]
            main.vlines(sure, sure, right, color=colour, alpha=0.35, linewidth=4)
            main.plot(sure, right, color=colour, marker=marker, markersize=5, label=name)
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


def _compute_histogram_steps(bins: CalibrationBins) -> tuple[list[float], list[float]]:
    """Return counts and edges of all bins, empty ones included."""
    width = bins[0][1] - bins[0][0]
    total = round(1 / width)
    values = [0.0] * total
    for low, _, images, _, _ in bins:
        values[round(low / width)] = images
    return values, [100 * number / total for number in range(total + 1)]


CorruptionCurve = tuple[str, list[float], list[float], list[tuple[float, float]]]  # unit, levels, accuracy, intervals


def draw_corruption_curves(curves: dict[str, CorruptionCurve], chance_accuracy: float, caption_text: str) -> Figure:
    """Draw the curves; accuracies are fractions, `chance` is the accuracy of random guessing."""
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
