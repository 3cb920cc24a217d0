"""Loss and accuracy over epochs -> two panels, training and validation in each."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitascope.draw.look import COLOURS, caption, label, new_figure

Points = list[tuple[float, float]]
UNITS = {"loss": "cross-entropy", "accuracy": "accuracy in %"}


def draw_curves(curves: dict[str, dict[str, Points]], title: str) -> Figure:
    """`curves[loss or accuracy][train or validation]` are (epoch, value); accuracies are fractions."""
    figure, panels = new_figure(2, width=10.0, height=4.4)
    for panel, (kind, lines) in zip(panels, curves.items(), strict=True):
        for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
            marker = "o" if len(points) <= 20 else None
            draw_line(panel, kind, points, color=colour, label=name, marker=marker, markersize=4)
        if any(lines.values()):
            panel.legend(frameon=False)
        over_epochs(panel, kind)
    caption(
        figure,
        f"{title}. Training is measured on varied (augmented, mixed, smoothed) images while weights still change, so "
        "its loss may lie above validation's and its accuracy below.",
    )
    return figure


def draw_line(panel: Axes, kind: str, points: Points, **style: Any) -> None:
    """Accuracies, which are fractions, in percent."""
    if points:
        epochs, values = zip(*points, strict=True)
        panel.plot(epochs, [value * (100 if kind == "accuracy" else 1) for value in values], **style)


def over_epochs(panel: Axes, kind: str) -> None:
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.25)
    label(panel, kind, "epoch", UNITS[kind])
