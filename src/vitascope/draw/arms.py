"""What changes were worth -> a dot and its interval for each, left or right of nothing."""

from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from vitascope.draw.look import caption, label, new_figure, plain, shades
from vitascope.draw.palette import COLOURS

Worth = tuple[str, float, float | None]  # name, points, half of the interval


def draw_arms(panels: dict[str, list[Worth]], text: str) -> Figure:
    """A panel for each setting they were tried in. Grey: cannot be told from noise."""
    most = max(len(found) for found in panels.values())
    figure, axes = new_figure(len(panels), width=6.2 * len(panels), height=1.6 + 0.34 * most)
    for axis, (title, found) in zip(axes, panels.items(), strict=True):
        _show_arms(axis, title, found)
    caption(figure, text)
    return figure


def draw_speed(curves: dict[str, list[tuple[float, float]]], points: dict[str, tuple[float, float]]) -> Figure:
    """Accuracy over seconds: a line for each way, a dot where a record ended."""
    figure, [axis] = new_figure(1, width=9.6, height=5.2)
    for colour, (name, line) in zip(shades(len(curves)), curves.items(), strict=True):
        seconds, shares = zip(*line, strict=True)
        axis.plot(seconds, [100 * share for share in shares], color=colour, label=plain(name), linewidth=1.6)
    before, floor = 0.0, 0
    for name, (seconds, share) in sorted(points.items(), key=lambda point: point[1]):
        floor = floor + 1 if seconds < 2 * before else 0  # words go up to the left, above those of a dot nearby
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
    axis.set_ylim(max(0.0, min(ends) - 10), min(100.0, max(ends) + 3))  # beginnings are steep; all ends are seen
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    label(axis, "The way there", "seconds (log scale)", "accuracy in %")
    caption(
        figure,
        "Lines: tuning runs on a part of the training images, one seed each, one view of held-back images; seconds of "
        "training alone. Dots: records on all training images, mean over seeds that were never tuned on, test images; "
        "the whole clock. Dots have more images to learn from than lines and, where a record has two, more views.",
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
    label(axis, title, "points", "")


def draw_shares(rows: list[dict[str, Any]]) -> Figure:
    """Accuracy over the share of the labels, a line for each arm: dots are seeds, lines go through their means."""
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
    label(panel, "What learning without labels is worth", "labels in %", "accuracy in %")
    longer = " (as much compute: as both stages of the dearest start)" if any("compute" in arm for arm in arms) else ""
    caption(figure, f"Dots are seeds, lines their means; every start is fine-tuned equally long{longer}.")
    return figure
