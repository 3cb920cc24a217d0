"""Line figures: training curves, the curves of several runs, log-log panels."""

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from vitascope.draw import COLOURS, CROSS_ENTROPY, CurvePanel
from vitascope.draw.style import (
    add_caption,
    choose_colours,
    create_figure,
    escape_mathtext,
    set_integer_ticks,
    set_labels,
)

CurvePoints = list[tuple[float, float]]  # epoch, value
LearningCurves = dict[str, dict[str, CurvePoints]]  # metric -> split -> points
METRIC_UNITS = {"loss": CROSS_ENTROPY, "accuracy": "accuracy in %"}
SUPERVISED_CAPTION = "Training values are averaged over the epoch; validation values are measured at its end."
SELF_SUPERVISED_CAPTION = (
    "Trained without labels. Validation accuracy is measured with a linear probe and with k-nearest neighbours. "
)


def draw_learning_curves(
    curves: LearningCurves,
    title: str,
    loss_name: str = CROSS_ENTROPY,
    further_panels: Mapping[str, CurvePanel] | None = None,
) -> Figure:
    """Draw one panel per metric and one line per split; accuracies are fractions.

    `further_panels`: titles, units and captions of the other metrics."""
    further_panels = {name: panel for name, panel in (further_panels or {}).items() if name in curves}
    without_labels = "k-nearest neighbours" in curves["accuracy"]
    figure, panels = create_figure(len(curves), width=5.0 * len(curves), height=4.4)
    for panel, (metric, lines) in zip(panels, curves.items(), strict=True):
        for colour, (name, points) in zip(COLOURS, ((n, p) for n, p in lines.items() if p), strict=False):
            name = "linear probe" if without_labels and name == "validation" else name
            marker = "o" if len(points) <= 20 else None
            draw_metric_line(panel, metric, points, color=colour, label=name, marker=marker, markersize=4)
        if any(lines.values()):
            panel.legend(frameon=False)
        label_and_style_epoch_panel(panel, metric, further_panels.get(metric))
    if without_labels:
        panels[0].set_ylabel(f"training loss:\n{loss_name}")
    text = SELF_SUPERVISED_CAPTION if without_labels else SUPERVISED_CAPTION
    title = f"{title}. " if title else ""
    add_caption(figure, "".join([title, text, *(panel.caption for panel in further_panels.values())]))
    return figure


def draw_metric_line(panel: Axes, metric: str, points: CurvePoints, **line_style: Any) -> None:
    """Draw one line; accuracies are fractions and shown in percent."""
    if points:
        epochs, values = zip(*points, strict=True)
        panel.plot(epochs, [value * (100 if metric == "accuracy" else 1) for value in values], **line_style)


def label_and_style_epoch_panel(panel: Axes, metric: str, labels: CurvePanel | None = None) -> None:
    set_integer_ticks(panel.xaxis)
    panel.grid(alpha=0.25)
    title, unit = (labels.title, labels.unit) if labels else (metric, METRIC_UNITS[metric])
    set_labels(panel, title, "epoch", unit)


def draw_run_comparison(
    curves_by_run: dict[str, LearningCurves], caption_text: str, loss_names: Iterable[str] = (CROSS_ENTROPY,)
) -> Figure:
    """Draw loss and accuracy, one colour per run: validation solid, training thin and dashed."""
    figure, panels = create_figure(2, width=11.0, height=4.8)
    for panel, metric in zip(panels, ("loss", "accuracy"), strict=True):
        for colour, curves in zip(cycle(COLOURS), curves_by_run.values(), strict=False):
            for split, style, line_width in (("train", "--", 0.9), ("validation", "-", 1.8)):
                points = curves[metric][split]
                marker = "o" if len(points) == 1 else None  # a line needs two points
                draw_metric_line(
                    panel,
                    metric,
                    points,
                    color=colour,
                    linestyle=style,
                    linewidth=line_width,
                    marker=marker,
                    markersize=4,
                )
        label_and_style_epoch_panel(panel, metric)
    panels[0].set_ylabel("\nor ".join(dict.fromkeys(loss_names)))
    lines = [
        Line2D([], [], color=colour, label=escape_mathtext(name))
        for colour, name in zip(cycle(COLOURS), curves_by_run, strict=False)
    ]
    lines += [Line2D([], [], color="#555555", linestyle="--", linewidth=0.9, label="training (dashed)")]
    panels[1].legend(handles=lines, loc="lower right", fontsize=8)
    add_caption(figure, caption_text)
    return figure


THREE_DECADES = 1000  # below three decades, the axis has ticks at 1, 2 and 5
CurvesByName = dict[str, list[tuple[float, float]]]  # points x, y by line name


def draw_log_log_curves(
    curves_by_quantity: dict[str, CurvesByName], *, x_label: str, title: str, caption_text: str
) -> Figure:
    """Draw one panel per measured quantity, one line per implementation."""
    figure, axes = create_figure(len(curves_by_quantity), width=9.5, height=4.6)
    for panel, (quantity, curves) in zip(axes, curves_by_quantity.items(), strict=True):
        for colour, (name, points) in zip(choose_colours(len(curves)), curves.items(), strict=True):
            panel.loglog(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=name)
        x_values = [x for x, _ in next(iter(curves.values()))]
        panel.set_xticks(x_values, [f"{x:g}" for x in x_values])
        panel.minorticks_off()
        y_values = [y for curve in curves.values() for _, y in curve]
        is_wide = max(y_values) >= THREE_DECADES * min(y_values)
        panel.yaxis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
        set_labels(panel, f"{title}: {quantity.split(' in ')[0]}", x_label, quantity)
    add_caption(figure, caption_text)
    return figure
