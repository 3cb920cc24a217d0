"""Figures of a study: curves with bands, accuracy by setting, a heat map, accuracy against cost."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from vitascope.draw.curves import UNITS, over_epochs
from vitascope.draw.heatmap import heatmap
from vitascope.draw.look import caption, label, new_figure, plain, shades, shorten
from vitascope.draw.palette import COLOURS, SEQUENTIAL

MOST_NAMES = 16  # in a legend
LONG = 6  # characters of a tick label
LONG_RUN = 6  # epochs: from this length on, the second half has its own panel
NEAR = (0.12, 0.04)  # fractions of a panel: labels of closer points would overlap
Curves = dict[str, list[list[float]]]  # train_loss, val_accuracy, … -> one list of epochs per seed


def draw_bands(cells: dict[str, Curves], text: str, units: dict[str, str] = UNITS) -> Figure:
    """Loss and accuracy over epochs: one colour per cell, validation solid, training dashed, bands from the lowest to
    the highest seed. The second half has a panel of its own, without the training images."""
    longest = max((len(line) for curves in cells.values() for lines in curves.values() for line in lines), default=0)
    shown = [("loss", 1), ("accuracy", 1)] + ([("accuracy", 1 + longest // 2)] if longest >= LONG_RUN else [])
    figure, panels = new_figure(len(shown), width=3.7 * len(shown) + 2.6, height=4.6)
    colours = shades(len(cells))
    for panel, (kind, first) in zip(panels, shown, strict=True):
        scale = 100 if kind == "accuracy" else 1
        for colour, curves in zip(colours, cells.values(), strict=True):
            for split, style, wide in (("train", "--", 0.9), ("val", "-", 1.8)):
                lines = curves.get(f"{split}_{kind}") if split == "val" or first == 1 else None
                if lines:
                    _band(panel, scale * _even(lines), colour, style, wide, first, shaded=split == "val")
        over_epochs(panel, kind)
        panel.set_ylabel(units[kind])
        if first > 1:
            panel.set_title("second half, enlarged", fontsize=11, fontweight="bold")
    names = [
        Line2D([], [], color=colour, label=plain(shorten(name, 40)))
        for colour, name in zip(colours, cells, strict=True)
    ]
    names += [Line2D([], [], color="#555555", linewidth=1.8, label="validation images")]
    names += [Line2D([], [], color="#555555", linestyle="--", linewidth=0.9, label="training images")]
    figure.legend(handles=names, loc="outside right upper", fontsize=8)  # inside a panel it would cover the last epochs
    caption(figure, text)
    return figure


def draw_effects(panels: dict[str, dict[str, list[float]]], text: str, scales: dict[str, str] | None = None) -> Figure:
    """`panels[setting][value]`: accuracies of all runs with that value. Dots are runs, bars are means. Settings with a
    scale ("log" or "linear") have a numeric axis and no bars."""
    figure, axes = new_figure(len(panels), width=max(5.0, 4.2 * len(panels)), height=4.2)
    for axis, (setting, values) in zip(axes, panels.items(), strict=True):
        if scale := (scales or {}).get(setting):
            points = [(float(value), 100 * share) for value, found in values.items() for share in found]
            axis.plot(*zip(*points, strict=True), "o", color=COLOURS[0], alpha=0.6)
            axis.set_xscale(scale)
        else:
            _show_values(axis, values)
        axis.grid(axis="y", alpha=0.25)
        label(axis, setting, setting, "accuracy in %")
    caption(figure, text)
    return figure


def _show_values(axis: Axes, values: dict[str, list[float]]) -> None:
    for place, found in enumerate(values.values()):
        spread = np.linspace(-0.08, 0.08, len(found)) if len(found) > 1 else [0.0]
        axis.plot(place + np.asarray(spread), [100 * share for share in found], "o", color=COLOURS[0], alpha=0.5)
        axis.plot([place - 0.25, place + 0.25], [100 * mean(found)] * 2, color=COLOURS[1], linewidth=2.5)
    axis.set_xticks(range(len(values)), [_spelt(value) for value in values])


def draw_grid(rows: Sequence[str], columns: Sequence[str], values: Any, axes: tuple[str, str], text: str) -> Figure:
    """A heat map over two settings, in percent."""
    figure, [panel] = new_figure(1, width=2.4 + 0.9 * len(columns), height=1.9 + 0.7 * len(rows))
    heatmap(
        figure,
        panel,
        100 * np.asarray(values, dtype=float),
        title="accuracy in %",
        x=axes[1],
        y=axes[0],
        colours=SEQUENTIAL,
        numbers="{:.1f}",
    )
    panel.set_xticks(range(len(columns)), columns)
    panel.set_yticks(range(len(rows)), rows)
    caption(figure, text)
    return figure


def draw_pareto(panels: dict[str, list[tuple[float, float, float | None, str, bool]]], text: str) -> Figure:
    """`panels[cost]`: cost, accuracy, half-width of its interval, name, whether it is on the Pareto front. Points have
    letters, which the legend explains."""
    figure, axes = new_figure(len(panels), width=4.6 * len(panels), height=4.6)
    for axis, (cost, points) in zip(axes, panels.items(), strict=True):
        for place, accuracy, half, _, ahead in points:
            colour = COLOURS[1] if ahead else "#999999"
            error = 100 * half if half else None
            axis.errorbar(
                place, 100 * accuracy, yerr=error, fmt="o", color=colour, capsize=2, markersize=5, elinewidth=1
            )
        front = sorted((point[0], 100 * point[1]) for point in points if point[4])
        axis.plot(*zip(*front, strict=True), color=COLOURS[1], linewidth=1)
        costs = [point[0] for point in points]
        if min(costs) > 0 and max(costs) > 4 * min(costs):
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_formatter(EngFormatter(sep="") if max(costs) >= 1000 else "{x:g}")
        axis.set_ylim(max(axis.get_ylim()[0], -1.0), min(axis.get_ylim()[1], 101.0))
        named = [number for number, point in enumerate(points, 1) if point[4] or len(points) <= MOST_NAMES]
        _label_points(axis, {number: (points[number - 1][0], 100 * points[number - 1][1]) for number in named})
        axis.grid(alpha=0.25)
        label(axis, f"accuracy against {cost}", cost, "accuracy in %")
    best = {number for points in panels.values() for number, point in enumerate(points, 1) if point[4]}
    names = [(number, point[3]) for number, point in enumerate(next(iter(panels.values())), 1)]
    shown = names if len(names) <= MOST_NAMES else [pair for pair in names if pair[0] in best][:MOST_NAMES]
    told = [
        Line2D([], [], linestyle="", label=plain(f"{_letter(number)}: {shorten(name, 44)}")) for number, name in shown
    ]
    figure.legend(handles=told, loc="outside right upper", fontsize=8, handlelength=0, title="combinations")
    caption(figure, text)
    return figure


def _label_points(axis: Axes, points: dict[int, tuple[float, float]]) -> None:
    """Label the points with letters; points that are close together share one label."""
    groups: list[tuple[tuple[float, float], list[int]]] = []
    for number, point in points.items():
        x, y = axis.transAxes.inverted().transform(axis.transData.transform(point))
        near = [group for (left, low), group in groups if abs(x - left) < NEAR[0] and abs(y - low) < NEAR[1]]
        near[0].append(number) if near else groups.append(((x, y), [number]))
    for _, group in groups:
        axis.annotate(_letters(group), points[group[0]], (5, 4), textcoords="offset points", fontsize=9)


def _letters(group: list[int]) -> str:
    return ", ".join(map(_letter, group[:3])) + (f", … ({len(group)} points)" if len(group) > 3 else "")


def _letter(number: int) -> str:
    """Letter of a point: A for 1, Z for 26, AA for 27."""
    before, place = divmod(number - 1, 26)
    return (_letter(before) if before else "") + chr(ord("A") + place)


def _spelt(value: str) -> str:
    """Long numbers with three digits, other long values shortened."""
    try:
        return f"{float(value):.3g}" if len(value) > LONG else value
    except ValueError:
        return shorten(value, 14)


def _even(lines: list[list[float]]) -> Any:
    """seed × epoch, cut to the shortest curve."""
    shortest = min(map(len, lines))
    return np.array([line[:shortest] for line in lines])


def _band(panel: Any, values: Any, colour: Any, style: str, wide: float, first: int, *, shaded: bool) -> None:
    values = values[:, first - 1 :]
    epochs = np.arange(first, first + values.shape[1])
    marker = "o" if len(epochs) == 1 else None
    panel.plot(epochs, values.mean(0), color=colour, linestyle=style, linewidth=wide, marker=marker)
    if shaded and len(values) > 1:
        panel.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
