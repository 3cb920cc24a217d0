"""Figures of studies: curves with bands, accuracy by setting, a heat map, accuracy against cost."""

from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from vitascope.draw import COLOURS, SEQUENTIAL
from vitascope.draw.curves import METRIC_UNITS, label_and_style_epoch_panel
from vitascope.draw.images import draw_heatmap
from vitascope.draw.style import (
    Colour,
    add_caption,
    choose_colours,
    create_figure,
    escape_mathtext,
    set_labels,
    shorten_name,
)

MAX_LEGEND_NAMES = 16  # in a legend
MAX_TICK_LENGTH = 6  # characters of a tick label
MIN_EPOCHS_FOR_ZOOM = 6  # epochs: from this length on, the second half has its own panel
LABEL_OVERLAP_DISTANCE = (0.12, 0.04)  # fractions of a panel: labels of closer points would overlap
SeedCurves = dict[str, list[list[float]]]  # train_loss, val_accuracy, … -> one list of epochs per seed


def draw_seed_curve_bands(
    curves_by_combination: dict[str, SeedCurves], caption_text: str, metric_units: dict[str, str] = METRIC_UNITS
) -> Figure:
    """Draw loss and accuracy over epochs, one colour per combination: validation solid, training dashed.

    Bands range from the lowest to the highest seed. The second half has its own panel, without the training images."""
    longest = max(
        (len(line) for curves in curves_by_combination.values() for lines in curves.values() for line in lines),
        default=0,
    )
    panel_contents = [("loss", 1), ("accuracy", 1)] + (  # metric, first epoch
        [("accuracy", 1 + longest // 2)] if longest >= MIN_EPOCHS_FOR_ZOOM else []
    )
    figure, panels = create_figure(len(panel_contents), width=3.7 * len(panel_contents) + 2.6, height=4.6)
    colours = choose_colours(len(curves_by_combination))
    for panel, (metric, first) in zip(panels, panel_contents, strict=True):
        scale = 100 if metric == "accuracy" else 1
        for colour, curves in zip(colours, curves_by_combination.values(), strict=True):
            for split, style, line_width in (("train", "--", 0.9), ("val", "-", 1.8)):
                lines = curves.get(f"{split}_{metric}") if split == "val" or first == 1 else None
                if lines:
                    values = scale * _stack_curves_cut_to_shortest(lines)
                    _draw_mean_and_seed_range(panel, values, colour, style, line_width, first, shaded=split == "val")
        label_and_style_epoch_panel(panel, metric)
        panel.set_ylabel(metric_units[metric])
        if first > 1:
            panel.set_ylabel("validation " + metric_units[metric])  # no curve of the training images
            panel.set_title(f"{metric}, second half, enlarged", fontsize=11, fontweight="bold")
    names = [
        Line2D([], [], color=colour, label=escape_mathtext(shorten_name(name, 40)))
        for colour, name in zip(colours, curves_by_combination, strict=True)
    ]
    names += [Line2D([], [], color="#555555", linewidth=1.8, label="validation images")]
    names += [Line2D([], [], color="#555555", linestyle="--", linewidth=0.9, label="training images")]
    figure.legend(handles=names, loc="outside right upper", fontsize=8)  # inside a panel it would cover the last epochs
    add_caption(figure, caption_text)
    return figure


def draw_accuracy_by_setting(
    accuracies_by_setting: dict[str, dict[str, list[float]]],
    caption_text: str,
    axis_scales: dict[str, str] | None = None,
    score_name: str = "accuracy",
) -> Figure:
    """Draw one panel per setting, with the accuracies (fractions) of all runs by value. Dots: runs. Bars: means.

    Settings in `axis_scales` ("log" or "linear") have a numeric axis and no bars."""
    figure, axes = create_figure(
        len(accuracies_by_setting), width=max(5.0, 4.2 * len(accuracies_by_setting)), height=4.2
    )
    for axis, (setting, values) in zip(axes, accuracies_by_setting.items(), strict=True):
        if scale := (axis_scales or {}).get(setting):
            points = [(float(value), 100 * accuracy) for value, accuracies in values.items() for accuracy in accuracies]
            axis.plot(*zip(*points, strict=True), "o", color=COLOURS[0], alpha=0.6)
            axis.set_xscale(scale)
        else:
            _draw_accuracy_by_value(axis, values)
        axis.grid(axis="y", alpha=0.25)
        set_labels(axis, setting, setting, f"{score_name} in %")
    add_caption(figure, caption_text)
    return figure


def _draw_accuracy_by_value(panel: Axes, accuracies_by_value: dict[str, list[float]]) -> None:
    for x, accuracies in enumerate(accuracies_by_value.values()):
        offsets = np.linspace(-0.08, 0.08, len(accuracies)) if len(accuracies) > 1 else np.zeros(1)
        panel.plot(x + offsets, [100 * accuracy for accuracy in accuracies], "o", color=COLOURS[0], alpha=0.5)
        panel.plot([x - 0.25, x + 0.25], [100 * mean(accuracies)] * 2, color=COLOURS[1], linewidth=2.5)
    panel.set_xticks(range(len(accuracies_by_value)), [_format_tick_label(value) for value in accuracies_by_value])


def draw_accuracy_heatmap(
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    accuracies: Sequence[Sequence[float]] | NDArray,
    axis_labels: tuple[str, str],
    caption_text: str,
    score_name: str = "accuracy",
) -> Figure:
    """Draw the accuracies (fractions, row × column) as a heat map in percent. `axis_labels`: of rows, of columns."""
    figure, [panel] = create_figure(1, width=2.4 + 0.9 * len(column_labels), height=1.9 + 0.7 * len(row_labels))
    draw_heatmap(
        figure,
        panel,
        100 * np.asarray(accuracies, dtype=float),
        title=f"{score_name} in %",
        x_label=axis_labels[1],
        y_label=axis_labels[0],
        colormap=SEQUENTIAL,
        value_format=".1f",
    )
    panel.set_xticks(range(len(column_labels)), column_labels)
    panel.set_yticks(range(len(row_labels)), row_labels)
    add_caption(figure, caption_text)
    return figure


class ParetoPoint(NamedTuple):
    cost: float
    accuracy: float  # fraction
    ci_half_width: float | None  # of the accuracy; None: no error bar
    name: str
    is_on_front: bool


def draw_pareto_fronts(
    points_by_cost: dict[str, list[ParetoPoint]], caption_text: str, score_name: str = "accuracy"
) -> Figure:
    """Draw accuracy against each cost. All costs have the same points, in the same order; letters name them."""
    figure, axes = create_figure(len(points_by_cost), width=4.6 * len(points_by_cost), height=4.6)
    for axis, (cost_name, points) in zip(axes, points_by_cost.items(), strict=True):
        _draw_pareto_panel(axis, cost_name, points, f"{score_name} in %")
    names = {number: point.name for number, point in enumerate(next(iter(points_by_cost.values())), 1)}
    if len(names) > MAX_LEGEND_NAMES:
        on_front = {n for points in points_by_cost.values() for n, point in enumerate(points, 1) if point.is_on_front}
        names = {number: names[number] for number in sorted(on_front)[:MAX_LEGEND_NAMES]}
    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            label=escape_mathtext(f"{_convert_one_based_number_to_letters(number)}: {shorten_name(name, 44)}"),
        )
        for number, name in names.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, handlelength=0, title="combinations")
    add_caption(figure, caption_text)
    return figure


def _draw_pareto_panel(panel: Axes, cost_name: str, points: list[ParetoPoint], y_label: str) -> None:
    for point in points:
        colour = COLOURS[1] if point.is_on_front else "#999999"
        error = 100 * point.ci_half_width if point.ci_half_width else None
        style = {"fmt": "o", "color": colour, "capsize": 2, "markersize": 5, "elinewidth": 1}
        panel.errorbar(point.cost, 100 * point.accuracy, yerr=error, **style)
    front = sorted((point.cost, 100 * point.accuracy) for point in points if point.is_on_front)
    panel.plot(*zip(*front, strict=True), color=COLOURS[1], linewidth=1)
    _set_cost_axis_scale_and_ticks(panel, [point.cost for point in points])
    panel.set_ylim(max(panel.get_ylim()[0], -1.0), min(panel.get_ylim()[1], 101.0))
    labelled = {n: p for n, p in enumerate(points, 1) if p.is_on_front or len(points) <= MAX_LEGEND_NAMES}
    _label_points_with_letters(
        panel, {number: (point.cost, 100 * point.accuracy) for number, point in labelled.items()}
    )
    panel.grid(alpha=0.25)
    set_labels(panel, f"accuracy against {cost_name}", cost_name, y_label)


def _set_cost_axis_scale_and_ticks(panel: Axes, costs: list[float]) -> None:
    """Use a log scale if the costs differ by more than a factor of 4; few ticks, so that labels do not overlap."""
    ratio = max(costs) / min(costs) if min(costs) > 0 else 1.0
    if ratio > 4:
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 30 else (1,)))
        panel.xaxis.set_minor_formatter(NullFormatter())
    else:
        panel.xaxis.set_major_locator(MaxNLocator(4))
    panel.xaxis.set_major_formatter(EngFormatter(sep="") if max(costs) >= 1000 else "{x:g}")


def _label_points_with_letters(axis: Axes, points_by_number: dict[int, tuple[float, float]]) -> None:
    """Label the points (x, y) with letters; points that are close together share one label."""
    groups: list[tuple[tuple[float, float], list[int]]] = []
    for number, point in points_by_number.items():
        x, y = axis.transAxes.inverted().transform(axis.transData.transform(point))
        near = [
            group
            for (left, low), group in groups
            if abs(x - left) < LABEL_OVERLAP_DISTANCE[0] and abs(y - low) < LABEL_OVERLAP_DISTANCE[1]
        ]
        near[0].append(number) if near else groups.append(((x, y), [number]))
    for _, group in groups:
        axis.annotate(
            _format_point_letters(group), points_by_number[group[0]], (5, 4), textcoords="offset points", fontsize=9
        )


def _format_point_letters(point_numbers: list[int]) -> str:
    letters = ", ".join(map(_convert_one_based_number_to_letters, point_numbers[:3]))
    return letters + (f", … ({len(point_numbers)} points)" if len(point_numbers) > 3 else "")


def _convert_one_based_number_to_letters(one_based_number: int) -> str:
    """Return the label of a point: A for 1, Z for 26, AA for 27."""
    prefix_number, index = divmod(one_based_number - 1, 26)
    return (_convert_one_based_number_to_letters(prefix_number) if prefix_number else "") + chr(ord("A") + index)


def _format_tick_label(value: str) -> str:
    """Format long numbers with three digits, and shorten other long values."""
    try:
        return f"{float(value):.3g}" if len(value) > MAX_TICK_LENGTH else value
    except ValueError:
        return shorten_name(value, 14)


def _stack_curves_cut_to_shortest(curves: list[list[float]]) -> NDArray:
    """Return the curves as seed × epoch, cut to the shortest."""
    shortest = min(map(len, curves))
    return np.array([line[:shortest] for line in curves])


def _draw_mean_and_seed_range(
    panel: Axes, curves: NDArray, colour: Colour, line_style: str, line_width: float, first_epoch: int, *, shaded: bool
) -> None:
    curves = curves[:, first_epoch - 1 :]
    epochs = np.arange(first_epoch, first_epoch + curves.shape[1])
    marker = "o" if len(epochs) == 1 else None
    panel.plot(epochs, curves.mean(0), color=colour, linestyle=line_style, linewidth=line_width, marker=marker)
    if shaded and len(curves) > 1:
        panel.fill_between(epochs, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
