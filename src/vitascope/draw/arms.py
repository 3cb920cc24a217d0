"""Figures of ablations: the effect of each change with its confidence interval, and accuracy over time."""

from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from vitascope.draw.look import caption, label, new_figure, plain, shades
from vitascope.draw.palette import COLOURS

Worth = tuple[str, float, float | None]  # name, difference in points, half-width of the interval


def draw_arms(panels: dict[str, list[Worth]], text: str) -> Figure:
    """One panel per experiment. Grey: no significant difference."""
    most = max(len(found) for found in panels.values())
    figure, axes = new_figure(len(panels), width=6.2 * len(panels), height=1.6 + 0.34 * most)
    for axis, (title, found) in zip(axes, panels.items(), strict=True):
        _show_arms(axis, title, found)
    caption(figure, text)
    return figure


def draw_speed(curves: dict[str, list[tuple[float, float]]], points: dict[str, tuple[float, float]]) -> Figure:
    """Accuracy over seconds: one line per tuning run, one dot per record."""
    figure, [axis] = new_figure(1, width=9.6, height=5.2)
    for colour, (name, line) in zip(shades(len(curves)), curves.items(), strict=True):
        seconds, shares = zip(*line, strict=True)
        axis.plot(seconds, [100 * share for share in shares], color=colour, label=plain(name), linewidth=1.6)
    before, floor = 0.0, 0
    for name, (seconds, share) in sorted(points.items(), key=lambda point: point[1]):
        floor = floor + 1 if seconds < 2 * before else 0  # labels go to the upper left, above the label of a close dot
        axis.plot(seconds, 100 * share, "o", color="#222222", markersize=7)
        axis.annotate(
            plain(f"{name}\n{100 * share:.2f} %, {seconds:.0f} s"),
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
    ends = [100 * share for _, share in [*points.values(), *(line[-1] for line in curves.values())]]
    axis.set_ylim(max(0.0, min(ends) - 10), min(100.0, max(ends) + 3))  # the steep beginnings are cut off
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    label(axis, "Accuracy over training time", "seconds (log scale)", "accuracy in %")
    caption(
        figure,
        "Lines: tuning runs on part of the training images, one seed each; accuracy on held-out images with one view; "
        "training seconds only. Dots: records on all training images, mean over seeds not used for tuning; accuracy on "
        "test images, with two views for some records; seconds including evaluation.",
    )
    return figure


def _show_arms(axis: Axes, title: str, found: list[Worth]) -> None:
    axis.axvline(0, color="#888888", linewidth=1)
    for place, (_, points, half) in enumerate(reversed(found)):
        told = half is not None and abs(points) > half
        colour = "#999999" if not told else COLOURS[2] if points > 0 else COLOURS[1]
        axis.errorbar(points, place, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
    axis.set_yticks(range(len(found)), [name for name, _, _ in reversed(found)])
    axis.set_ylim(-0.6, len(found) - 0.4)
    axis.grid(axis="x", alpha=0.25)
    label(axis, title, "difference in percentage points", "")


def draw_shares(rows: list[dict[str, Any]]) -> Figure:
    """Accuracy over the fraction of the labels, one line per arm: dots are seeds, lines connect their means."""
    figure, [panel] = new_figure(1, width=7.0, height=4.6)
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for colour, arm in zip(shades(len(arms)), arms, strict=True):
        own = [row for row in rows if row["arm"] == arm]
        shares = sorted({row["labels"] for row in own})
        means = [mean(100 * row["accuracy"] for row in own if row["labels"] == share) for share in shares]
        panel.plot([100 * row["labels"] for row in own], [100 * row["accuracy"] for row in own], "o", color=colour)
        panel.plot([100 * share for share in shares], means, color=colour, label=arm)
    panel.set_xscale("log")
    shares = sorted({100 * row["labels"] for row in rows})
    panel.set_xticks(shares, [f"{share:g}" for share in shares])
    panel.minorticks_off()
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)
    label(panel, "Effect of pretraining without labels", "labels in %", "accuracy in %")
    text = "Dots: seeds. Lines: their means. All arms are fine-tuned equally long."
    if any("compute" in arm for arm in arms):
        text += " Exception: “as much compute” has the compute of both stages of the most expensive arm."
    caption(figure, text)
    return figure
