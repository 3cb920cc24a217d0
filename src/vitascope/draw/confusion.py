"""Draw a confusion matrix in which only the errors are coloured."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.look import caption, label, new_figure, plain, shorten, wrap

NAME_LENGTH = 24
MOST_NUMBERS, MOST_NAMES = 20, 50  # classes up to which cells hold numbers, and axes names

MISTAKES = LinearSegmentedColormap.from_list("errors", ["white", "#fdbb84", "#e34a33", "#7f0000"])  # no error: white


def draw_confusion(counts: NDArray, names: list[str], title: str) -> Figure:
    """Draw true classes as rows and predicted classes as columns; cells are percentages of the row."""
    whole = counts
    counts, names = _occurring(counts, names)
    classes, there = len(names), counts.sum(1) > 0
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    wrong = shares.copy()
    np.fill_diagonal(wrong, np.nan)
    short = [plain(shorten(name, NAME_LENGTH)) for name in names]
    side = float(np.clip(0.55 * classes + 2.4, 4.5, 12))
    figure, (panel,) = new_figure(1, width=side + 1.2, height=side + 0.6)
    top = max(float(np.nanmax(wrong)), 1.0) if classes > 1 else 1.0
    panel.set_facecolor("#e8e8e8")  # the diagonal: correct predictions stay grey
    shown = panel.imshow(wrong, cmap=MISTAKES, vmin=0, vmax=top)
    figure.colorbar(shown, ax=panel, shrink=0.75, label="errors in % of the true class")
    if classes <= MOST_NUMBERS:
        _write_numbers(panel, shares, there, top)
    label(panel, wrap(title, int(7 * side)), "predicted class", "true class")
    if classes <= MOST_NAMES:
        slanted: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        panel.set_xticks(range(classes), short, **(slanted if max(map(len, short)) > 3 else {}))
        panel.set_yticks(range(classes), short)
    text = "Confusion matrix in %: each row sums to 100 %. Grey diagonal: recall. Coloured: errors."
    if not there.all():
        text += " An empty row is a class without images."
    if classes < len(whole):
        text = f"The {classes} most frequent of {len(whole)} classes. " + text
    caption(figure, text)
    return figure


def _write_numbers(panel: Axes, shares: NDArray, there: NDArray, top: float) -> None:
    for row, column in np.ndindex(shares.shape):
        value, right = shares[row, column], row == column
        text = f"{value:.1f}" if there[row] and (right or value >= 0.05) else ""
        colour, weight = "white" if not right and value > 0.6 * top else "black", "bold" if right else None
        panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=8, fontweight=weight)


def _occurring(counts: NDArray, names: list[str]) -> tuple[NDArray, list[str]]:
    """Limit many classes to those with images, then to those predicted most often."""
    there = counts.sum(1) > 0
    if len(names) <= MOST_NAMES or there.sum() > MOST_NAMES:
        return counts, names
    order = np.argsort(-(counts.sum(0) + counts.sum() * there), kind="stable")[:MOST_NAMES]
    kept = np.sort(order[(counts.sum(0)[order] > 0) | there[order]])
    return counts[np.ix_(kept, kept)], [names[number] for number in kept]
