"""Draw deletion and insertion curves, one line per method, with the area under each curve."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.look import caption, label, new_figure
from vitascope.draw.palette import COLOURS

LINES = (*COLOURS, "#000000")


def draw_evidence(deletion: dict[str, NDArray], insertion: dict[str, NDArray], order: list[str], text: str) -> Figure:
    """Draw the mean probability after each step. `order` fixes the colours; the random order is grey."""
    figure, panels = new_figure(2, width=11.0, height=4.6)
    titles = ("deletion (a lower curve is better)", "insertion (a higher curve is better)")
    highest = 1.05 * max(float(curve.max()) for curve in (*deletion.values(), *insertion.values()))
    for panel, curves, title, way in zip(panels, (deletion, insertion), titles, ("made grey", "restored"), strict=True):
        for name, curve in sorted(curves.items(), key=lambda item: _area(item[1]), reverse=curves is insertion):
            colour = LINES[order.index(name) % len(LINES)] if name in order else "#999999"
            style = "-" if name in order else ":"
            steps = np.linspace(0, 100, len(curve))
            panel.plot(steps, curve, color=colour, linestyle=style, label=f"{name}  {_area(curve):.3f}")
        panel.set_ylim(0, highest)
        panel.legend(fontsize=8, title="method, area under the curve", title_fontsize=8)
        label(panel, title, f"patches {way}, in %", "probability of the explained class")
    caption(figure, text)
    return figure


def _area(curve: NDArray) -> float:
    return float((curve.sum() - (curve[0] + curve[-1]) / 2) / (len(curve) - 1))
