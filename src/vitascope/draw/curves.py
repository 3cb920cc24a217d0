"""Draw training and validation loss and accuracy over epochs."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitascope.draw.look import caption, label, new_figure
from vitascope.draw.palette import COLOURS

Points = list[tuple[float, float]]
UNITS = {"loss": "cross-entropy", "accuracy": "accuracy in %", "teacher": "nats"}
TITLES = {"teacher": "teacher distribution"}
WITH_LABELS = (
    "Training values are averaged over the epoch and include augmentation (also mixup and CutMix) and label smoothing. "
    "Training loss can therefore be higher than validation loss, and training accuracy lower."
)
WITHOUT_LABELS = (
    "Trained without labels. Validation accuracy is measured with a linear probe and with k-nearest neighbours. "
)


def draw_curves(curves: dict[str, dict[str, Points]], title: str) -> Figure:
    """Draw `curves[loss or accuracy][train or validation]`, lists of (epoch, value); accuracies are fractions."""
    without_labels = "k-nearest neighbours" in curves["accuracy"]
    figure, panels = new_figure(len(curves), width=5.0 * len(curves), height=4.4)
    for panel, (kind, lines) in zip(panels, curves.items(), strict=True):
        for colour, (name, points) in zip(COLOURS, ((n, p) for n, p in lines.items() if p), strict=False):
            name = "linear probe" if without_labels and name == "validation" else name
            marker = "o" if len(points) <= 20 else None
            draw_line(panel, kind, points, color=colour, label=name, marker=marker, markersize=4)
        if any(lines.values()):
            panel.legend(frameon=False)
        over_epochs(panel, kind)
    if without_labels:
        panels[0].set_ylabel("loss")
    caption(figure, f"{title}. {WITHOUT_LABELS if without_labels else WITH_LABELS}")
    return figure


def draw_line(panel: Axes, kind: str, points: Points, **style: Any) -> None:
    """Draw one line; accuracies are fractions and shown in percent."""
    if points:
        epochs, values = zip(*points, strict=True)
        panel.plot(epochs, [value * (100 if kind == "accuracy" else 1) for value in values], **style)


def over_epochs(panel: Axes, kind: str) -> None:
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.25)
    label(panel, TITLES.get(kind, kind), "epoch", UNITS[kind])
