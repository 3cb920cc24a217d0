"""Draw a reliability diagram and a histogram of the confidence."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from vitascope.draw.look import caption, label, new_figure
from vitascope.draw.palette import COLOURS

Bins = Sequence[tuple[float, float, int, float, float]]  # low, high, images, mean confidence, accuracy: full ones only


def draw_reliability(before: Bins, after: Bins | None, names: tuple[str, str], text: str) -> Figure:
    """Draw accuracy against confidence; `after` holds the bins with a fitted temperature."""
    figure, (main, counts) = new_figure(2, width=10.0, height=4.8)
    main.plot([0, 100], [0, 100], color="#888888", linestyle="--", linewidth=1, label="perfect calibration")
    for bins, name, colour, marker in ((before, names[0], COLOURS[0], "o"), (after, names[1], COLOURS[1], "s")):
        if bins:
            sure, right = [100 * row[3] for row in bins], [100 * row[4] for row in bins]
            main.vlines(sure, sure, right, color=colour, alpha=0.35, linewidth=4)
            main.plot(sure, right, color=colour, marker=marker, markersize=5, label=name)
            counts.stairs(*_steps(bins), color=colour, label=name, linewidth=1.6, baseline=0.5)
    main.set_xlim(0, 101)
    main.set_ylim(0, 101)
    main.set_aspect("equal")
    main.grid(alpha=0.25)
    main.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=9)  # below: data can be anywhere inside
    label(main, "reliability diagram", "confidence in % (mean of the bin)", "accuracy in %")
    counts.set_yscale("log")
    counts.set_xlim(0, 101)
    counts.grid(alpha=0.25)
    label(counts, "histogram of the confidence", "confidence in %", "number of images")
    caption(figure, text)
    return figure


def _steps(bins: Bins) -> tuple[list[float], list[float]]:
    """Return counts and edges of all bins, empty ones included."""
    width = bins[0][1] - bins[0][0]
    total = round(1 / width)
    values = [0.0] * total
    for low, _, images, _, _ in bins:
        values[round(low / width)] = images
    return values, [100 * number / total for number in range(total + 1)]
