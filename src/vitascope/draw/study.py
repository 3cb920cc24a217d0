"""Figures of studies and ablations: curves with bands, accuracy by setting, a heat map, accuracy against cost."""

from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator

from vitascope.draw.curves import METRIC_UNITS, format_epoch_panel
from vitascope.draw.images import draw_heatmap
from vitascope.draw.palette import COLOURS, SEQUENTIAL
from vitascope.draw.style import add_caption, choose_colours, create_figure, escape_mathtext, set_labels, shorten_name

MAX_LEGEND_NAMES = 16  # in a legend
MAX_TICK_LENGTH = 6  # characters of a tick label
MIN_EPOCHS_FOR_ZOOM = 6  # epochs: from this length on, the second half has its own panel
LABEL_OVERLAP_DISTANCE = (0.12, 0.04)  # fractions of a panel: labels of closer points would overlap
SeedCurves = dict[str, list[list[float]]]  # train_loss, val_accuracy, … -> one list of epochs per seed


def draw_curve_bands(
    curves_by_combination: dict[str, SeedCurves], caption_text: str, metric_units: dict[str, str] = METRIC_UNITS
) -> Figure:
    """Loss and accuracy over epochs: one colour per cell, validation solid, training dashed, bands from the lowest to
    the highest seed. The second half has a panel of its own, without the training images."""
    longest = max(
        (len(line) for curves in curves_by_combination.values() for lines in curves.values() for line in lines),
        default=0,
    )
    shown = [("loss", 1), ("accuracy", 1)] + (
        [("accuracy", 1 + longest // 2)] if longest >= MIN_EPOCHS_FOR_ZOOM else []
    )
    figure, panels = create_figure(len(shown), width=3.7 * len(shown) + 2.6, height=4.6)
    colours = choose_colours(len(curves_by_combination))
    for panel, (kind, first) in zip(panels, shown, strict=True):
        scale = 100 if kind == "accuracy" else 1
        for colour, curves in zip(colours, curves_by_combination.values(), strict=True):
            for split, style, wide in (("train", "--", 0.9), ("val", "-", 1.8)):
                lines = curves.get(f"{split}_{kind}") if split == "val" or first == 1 else None
                if lines:
                    _draw_band(
                        panel, scale * _truncate_to_shortest(lines), colour, style, wide, first, shaded=split == "val"
                    )
        format_epoch_panel(panel, kind)
        panel.set_ylabel(metric_units[kind])
        if first > 1:
            panel.set_title("second half, enlarged", fontsize=11, fontweight="bold")
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
) -> Figure:
    """`panels[setting][value]`: accuracies of all runs with that value. Dots are runs, bars are means. Settings with a
    scale ("log" or "linear") have a numeric axis and no bars."""
    figure, axes = create_figure(
        len(accuracies_by_setting), width=max(5.0, 4.2 * len(accuracies_by_setting)), height=4.2
    )
    for axis, (setting, values) in zip(axes, accuracies_by_setting.items(), strict=True):
        if scale := (axis_scales or {}).get(setting):
            points = [(float(value), 100 * share) for value, found in values.items() for share in found]
            axis.plot(*zip(*points, strict=True), "o", color=COLOURS[0], alpha=0.6)
            axis.set_xscale(scale)
        else:
            _draw_accuracy_by_value(axis, values)
        axis.grid(axis="y", alpha=0.25)
        set_labels(axis, setting, setting, "accuracy in %")
    add_caption(figure, caption_text)
    return figure


def _draw_accuracy_by_value(panel: Axes, accuracies_by_value: dict[str, list[float]]) -> None:
    for place, found in enumerate(accuracies_by_value.values()):
        spread = np.linspace(-0.08, 0.08, len(found)) if len(found) > 1 else [0.0]
        panel.plot(place + np.asarray(spread), [100 * share for share in found], "o", color=COLOURS[0], alpha=0.5)
        panel.plot([place - 0.25, place + 0.25], [100 * mean(found)] * 2, color=COLOURS[1], linewidth=2.5)
    panel.set_xticks(range(len(accuracies_by_value)), [_format_tick_label(value) for value in accuracies_by_value])


def draw_accuracy_heatmap(
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    accuracies: Any,
    axis_labels: tuple[str, str],
    caption_text: str,
) -> Figure:
    """A heat map over two settings, in percent."""
    figure, [panel] = create_figure(1, width=2.4 + 0.9 * len(column_labels), height=1.9 + 0.7 * len(row_labels))
    draw_heatmap(
        figure,
        panel,
        100 * np.asarray(accuracies, dtype=float),
        title="accuracy in %",
        x_label=axis_labels[1],
        y_label=axis_labels[0],
        colormap=SEQUENTIAL,
        value_format="{:.1f}",
    )
    panel.set_xticks(range(len(column_labels)), column_labels)
    panel.set_yticks(range(len(row_labels)), row_labels)
    add_caption(figure, caption_text)
    return figure


def draw_pareto_fronts(
    points_by_cost: dict[str, list[tuple[float, float, float | None, str, bool]]], caption_text: str
) -> Figure:
    """`panels[cost]`: cost, accuracy, half-width of its interval, name, whether it is on the Pareto front. Points have
    letters, which the legend explains."""
    figure, axes = create_figure(len(points_by_cost), width=4.6 * len(points_by_cost), height=4.6)
    for axis, (cost, points) in zip(axes, points_by_cost.items(), strict=True):
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
        named = [number for number, point in enumerate(points, 1) if point[4] or len(points) <= MAX_LEGEND_NAMES]
        _label_points(axis, {number: (points[number - 1][0], 100 * points[number - 1][1]) for number in named})
        axis.grid(alpha=0.25)
        set_labels(axis, f"accuracy against {cost}", cost, "accuracy in %")
    best = {number for points in points_by_cost.values() for number, point in enumerate(points, 1) if point[4]}
    names = [(number, point[3]) for number, point in enumerate(next(iter(points_by_cost.values())), 1)]
    shown = names if len(names) <= MAX_LEGEND_NAMES else [pair for pair in names if pair[0] in best][:MAX_LEGEND_NAMES]
    told = [
        Line2D([], [], linestyle="", label=escape_mathtext(f"{_letter(number)}: {shorten_name(name, 44)}"))
        for number, name in shown
    ]
    figure.legend(handles=told, loc="outside right upper", fontsize=8, handlelength=0, title="combinations")
    add_caption(figure, caption_text)
    return figure


def _label_points(axis: Axes, points: dict[int, tuple[float, float]]) -> None:
    """Label the points with letters; points that are close together share one label."""
    groups: list[tuple[tuple[float, float], list[int]]] = []
    for number, point in points.items():
        x, y = axis.transAxes.inverted().transform(axis.transData.transform(point))
        near = [
            group
            for (left, low), group in groups
            if abs(x - left) < LABEL_OVERLAP_DISTANCE[0] and abs(y - low) < LABEL_OVERLAP_DISTANCE[1]
        ]
        near[0].append(number) if near else groups.append(((x, y), [number]))
    for _, group in groups:
        axis.annotate(_letters(group), points[group[0]], (5, 4), textcoords="offset points", fontsize=9)


def _letters(group: list[int]) -> str:
    return ", ".join(map(_letter, group[:3])) + (f", … ({len(group)} points)" if len(group) > 3 else "")


def _letter(number: int) -> str:
    """Letter of a point: A for 1, Z for 26, AA for 27."""
    before, place = divmod(number - 1, 26)
    return (_letter(before) if before else "") + chr(ord("A") + place)


def _format_tick_label(value: str) -> str:
    """Long numbers with three digits, other long values shortened."""
    try:
        return f"{float(value):.3g}" if len(value) > MAX_TICK_LENGTH else value
    except ValueError:
        return shorten_name(value, 14)


def _truncate_to_shortest(curves: list[list[float]]) -> Any:
    """seed × epoch, cut to the shortest curve."""
    shortest = min(map(len, curves))
    return np.array([line[:shortest] for line in curves])


def _draw_band(
    panel: Any, curves: Any, colour: Any, line_style: str, line_width: float, first_epoch: int, *, shaded: bool
) -> None:
    curves = curves[:, first_epoch - 1 :]
    epochs = np.arange(first_epoch, first_epoch + curves.shape[1])
    marker = "o" if len(epochs) == 1 else None
    panel.plot(epochs, curves.mean(0), color=colour, linestyle=line_style, linewidth=line_width, marker=marker)
    if shaded and len(curves) > 1:
        panel.fill_between(epochs, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)


SettingEffect = tuple[str, float, float | None]  # name, difference in points, half-width of the interval


def draw_setting_effects(effects_by_panel: dict[str, list[SettingEffect]], caption_text: str) -> Figure:
    """One panel per experiment. Grey: no significant difference."""
    most = max(len(found) for found in effects_by_panel.values())
    figure, axes = create_figure(len(effects_by_panel), width=6.2 * len(effects_by_panel), height=1.6 + 0.34 * most)
    for axis, (title, found) in zip(axes, effects_by_panel.items(), strict=True):
        _draw_effects_panel(axis, title, found)
    add_caption(figure, caption_text)
    return figure


def draw_accuracy_over_time(
    tuning_curves: dict[str, list[tuple[float, float]]], record_points: dict[str, tuple[float, float]]
) -> Figure:
    """Accuracy over seconds: one line per tuning run, one dot per record."""
    figure, [axis] = create_figure(1, width=9.6, height=5.2)
    for colour, (name, line) in zip(choose_colours(len(tuning_curves)), tuning_curves.items(), strict=True):
        seconds, shares = zip(*line, strict=True)
        axis.plot(seconds, [100 * share for share in shares], color=colour, label=escape_mathtext(name), linewidth=1.6)
    before, floor = 0.0, 0
    for name, (seconds, share) in sorted(record_points.items(), key=lambda point: point[1]):
        floor = floor + 1 if seconds < 2 * before else 0  # labels go to the upper left, above the label of a close dot
        axis.plot(seconds, 100 * share, "o", color="#222222", markersize=7)
        axis.annotate(
            escape_mathtext(f"{name}\n{100 * share:.2f} %, {seconds:.0f} s"),
            (seconds, 100 * share),
            xytext=(-8, 5 + 28 * floor),
            textcoords="offset points",
            ha="right",
            va="bottom",
            arrowprops={"arrowstyle": "-", "color": "#888888", "relpos": (1, 0)} if floor else None,
            fontsize=9,
            fontweight="bold",
        )
        before = seconds
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:g}")
    ends = [100 * share for _, share in [*record_points.values(), *(line[-1] for line in tuning_curves.values())]]
    axis.set_ylim(max(0.0, min(ends) - 10), min(100.0, max(ends) + 3))  # the steep beginnings are cut off
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    set_labels(axis, "Accuracy over training time", "seconds (log scale)", "accuracy in %")
    add_caption(
        figure,
        "Lines: tuning runs on part of the training images, one seed each; accuracy on held-out images with one view; "
        "training seconds only. Dots: records on all training images, mean over seeds not used for tuning; accuracy on "
        "test images, with two views for some records; seconds including evaluation.",
    )
    return figure


def _draw_effects_panel(panel: Axes, title: str, effects: list[SettingEffect]) -> None:
    panel.axvline(0, color="#888888", linewidth=1)
    for place, (_, points, half) in enumerate(reversed(effects)):
        told = half is not None and abs(points) > half
        colour = "#999999" if not told else COLOURS[2] if points > 0 else COLOURS[1]
        panel.errorbar(points, place, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
    panel.set_yticks(range(len(effects)), [name for name, _, _ in reversed(effects)])
    panel.set_ylim(-0.6, len(effects) - 0.4)
    panel.grid(axis="x", alpha=0.25)
    set_labels(panel, title, "difference in percentage points", "")


def draw_accuracy_by_label_fraction(record_rows: list[dict[str, Any]]) -> Figure:
    """Accuracy over the fraction of the labels, one line per arm: dots are seeds, lines connect their means."""
    figure, [panel] = create_figure(1, width=7.0, height=4.6)
    arms = list(dict.fromkeys(row["arm"] for row in record_rows))
    for colour, arm in zip(choose_colours(len(arms)), arms, strict=True):
        own = [row for row in record_rows if row["arm"] == arm]
        shares = sorted({row["labels"] for row in own})
        means = [mean(100 * row["accuracy"] for row in own if row["labels"] == share) for share in shares]
        panel.plot([100 * row["labels"] for row in own], [100 * row["accuracy"] for row in own], "o", color=colour)
        panel.plot([100 * share for share in shares], means, color=colour, label=arm)
    panel.set_xscale("log")
    shares = sorted({100 * row["labels"] for row in record_rows})
    panel.set_xticks(shares, [f"{share:g}" for share in shares])
    panel.minorticks_off()
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)
    set_labels(panel, "Effect of pretraining without labels", "labels in %", "accuracy in %")
    text = "Dots: seeds. Lines: their means. All arms are fine-tuned equally long."
    if any("compute" in arm for arm in arms):
        text += " Exception: “as much compute” has the compute of both stages of the most expensive arm."
    add_caption(figure, text)
    return figure
