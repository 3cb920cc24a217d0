"""Draw accuracy against corruption level, one panel per corruption."""

from matplotlib.figure import Figure

from vitascope.draw.look import caption, label, new_figure
from vitascope.draw.palette import COLOURS

Curve = tuple[str, list[float], list[float], list[tuple[float, float]]]  # unit, levels, accuracy, intervals


def draw_decline(curves: dict[str, Curve], chance: float, text: str) -> Figure:
    """Draw the curves; accuracies are fractions, `chance` is the accuracy of random guessing."""
    figure, panels = new_figure(len(curves), width=3.1 * len(curves), height=3.6)
    for panel, colour, (name, (unit, levels, accuracy, spans)) in zip(panels, COLOURS, curves.items(), strict=False):
        low, high = zip(*spans, strict=True)
        panel.fill_between(
            levels, [100 * v for v in low], [100 * v for v in high], color=colour, alpha=0.2, linewidth=0
        )
        panel.plot(levels, [100 * v for v in accuracy], color=colour, marker="o", markersize=4)
        panel.axhline(100 * chance, color="#888888", linestyle=":", linewidth=1)
        panel.set_ylim(0, 101)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.25)
        label(panel, name, unit, "accuracy in %" if panel is panels[0] else "")
    caption(figure, text)
    return figure
