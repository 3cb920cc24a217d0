"""Figures of benchmark records: effects of settings, accuracy over time, accuracy by fraction of labels."""

from statistics import mean
from typing import NamedTuple, TypedDict

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from vitascope.draw import COLOURS
from vitascope.draw.style import add_caption, choose_colours, create_figure, escape_mathtext, set_labels


class SettingEffect(NamedTuple):
    name: str
    difference_points: float  # percentage points of accuracy
    ci_half_width: float | None


class TimePoint(NamedTuple):
    seconds: float
    accuracy: float  # fraction


class RecordPoint(NamedTuple):
    seconds: float
    accuracy: float  # fraction
    num_views: int  # at test time


class LabelFractionRow(TypedDict):
    """Stored keys of a record's row: arm, fraction of the labels, accuracy as a fraction."""

    arm: str
    labels: float
    accuracy: float


def draw_setting_effects(effects_by_panel: dict[str, list[SettingEffect]], caption_text: str) -> Figure:
    """Draw one panel per experiment. Grey: no significant difference."""
    max_effects = max(len(effects) for effects in effects_by_panel.values())
    figure, axes = create_figure(
        len(effects_by_panel), width=6.2 * len(effects_by_panel), height=1.6 + 0.34 * max_effects
    )
    for panel, (title, effects) in zip(axes, effects_by_panel.items(), strict=True):
        _draw_effects_panel(panel, title, effects)
    add_caption(figure, caption_text)
    return figure


def draw_accuracy_over_time(tuning_curves: dict[str, list[TimePoint]], record_points: dict[str, RecordPoint]) -> Figure:
    """Draw accuracy over seconds: one line per tuning run, one dot per record."""
    figure, [axis] = create_figure(1, width=9.6, height=5.2)
    for colour, (name, line) in zip(choose_colours(len(tuning_curves)), tuning_curves.items(), strict=True):
        seconds, accuracies = zip(*line, strict=True)
        percentages = [100 * accuracy for accuracy in accuracies]
        axis.plot(seconds, percentages, color=colour, label=escape_mathtext(name), linewidth=1.6)
    _draw_record_points(axis, record_points)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:g}")
    final_accuracies = [
        100 * point[1] for point in [*record_points.values(), *(line[-1] for line in tuning_curves.values())]
    ]
    # The steep beginnings are cut off.
    axis.set_ylim(max(0.0, min(final_accuracies) - 10), min(100.0, max(final_accuracies) + 3))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    set_labels(axis, "Accuracy over training time", "seconds (log scale)", "accuracy in %")
    add_caption(
        figure,
        "Lines: tuning runs on part of the training images, one seed each; accuracy on held-out images with one view; "
        "training seconds only. Dots: records on all training images, mean over seeds not used for tuning; accuracy on "
        "test images, with the stated number of views; seconds including evaluation.",
    )
    return figure


def _draw_record_points(axis: Axes, record_points: dict[str, RecordPoint]) -> None:
    """Draw one dot per record. Labels are at the upper left, above the label of a close dot."""
    previous_seconds, level = 0.0, 0
    for name, (seconds, accuracy, num_views) in sorted(record_points.items(), key=lambda item: item[1]):
        level = level + 1 if seconds < 2 * previous_seconds else 0
        axis.plot(seconds, 100 * accuracy, "o", color="#222222", markersize=7)
        axis.annotate(
            escape_mathtext(
                f"{name}, {num_views} view{'s' * (num_views > 1)}\n{100 * accuracy:.2f} %, {seconds:.1f} s"
            ),
            (seconds, 100 * accuracy),
            xytext=(-8, 5 + 28 * level),
            textcoords="offset points",
            ha="right",
            va="bottom",
            arrowprops={"arrowstyle": "-", "color": "#888888", "relpos": (1, 0)} if level else None,
            fontsize=9,
            fontweight="bold",
        )
        previous_seconds = seconds


def _draw_effects_panel(panel: Axes, title: str, effects: list[SettingEffect]) -> None:
    panel.axvline(0, color="#888888", linewidth=1)
    for y, (_, points, half_width) in enumerate(reversed(effects)):
        is_significant = half_width is not None and abs(points) > half_width
        colour = "#999999" if not is_significant else COLOURS[2] if points > 0 else COLOURS[1]
        panel.errorbar(points, y, xerr=half_width, fmt="o", color=colour, capsize=3, markersize=5)
    panel.set_yticks(range(len(effects)), [name for name, _, _ in reversed(effects)])
    panel.set_ylim(-0.6, len(effects) - 0.4)
    panel.grid(axis="x", alpha=0.25)
    set_labels(panel, title, "difference in percentage points", "")


def draw_accuracy_by_label_fraction(record_rows: list[LabelFractionRow]) -> Figure:
    """Draw accuracy over the fraction of the labels, one line per arm: dots are seeds, lines connect their means."""
    figure, [panel] = create_figure(1, width=7.0, height=4.6)
    arms = list(dict.fromkeys(row["arm"] for row in record_rows))
    for colour, arm in zip(choose_colours(len(arms)), arms, strict=True):
        rows = [row for row in record_rows if row["arm"] == arm]
        fractions = sorted({row["labels"] for row in rows})
        means = [mean(100 * row["accuracy"] for row in rows if row["labels"] == fraction) for fraction in fractions]
        panel.plot([100 * row["labels"] for row in rows], [100 * row["accuracy"] for row in rows], "o", color=colour)
        panel.plot([100 * fraction for fraction in fractions], means, color=colour, label=arm)
    panel.set_xscale("log")
    percentages = sorted({100 * row["labels"] for row in record_rows})
    panel.set_xticks(percentages, [f"{percentage:g}" for percentage in percentages])
    panel.minorticks_off()
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)
    set_labels(panel, "Effect of pretraining without labels", "labels in %", "accuracy in %")
    text = "Dots: seeds. Lines: their means. All starts are fine-tuned for the same number of steps."
    if any("compute" in arm for arm in arms):
        text += " “As much compute”: trained for as many FLOPs as both stages of DINO."
    add_caption(figure, text)
    return figure
