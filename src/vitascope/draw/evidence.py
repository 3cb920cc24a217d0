"""Deletion and insertion curves -> two panels, a line for each method, its area beside its name."""

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitascope.draw.look import COLOURS, caption, label, new_figure

STYLES = ("-", "--")


def draw_evidence(deletion: dict[str, NDArray], insertion: dict[str, NDArray], text: str) -> Figure:
    """Per method the mean probability after each step; chance is drawn in grey."""
    figure, panels = new_figure(2, width=11.0, height=4.6)
    titles = ("deletion: lower is better", "insertion: higher is better")
    methods = [name for name in deletion if name != "random"]
    looks = dict(zip(methods, _looks(), strict=False)) | {"random": ("#999999", ":")}
    for panel, curves, title, way in zip(panels, (deletion, insertion), titles, ("made grey", "restored"), strict=True):
        for name, curve in sorted(curves.items(), key=lambda item: _area(item[1]), reverse=curves is insertion):
            colour, style = looks[name]
            steps = np.linspace(0, 100, len(curve))
            panel.plot(steps, curve, color=colour, linestyle=style, label=f"{name}  {_area(curve):.3f}")
        panel.set_ylim(0, 1)
        panel.legend(fontsize=8, title="method, area", title_fontsize=8)
        label(panel, title, f"patches {way}, in %", "probability of the answer")
    caption(figure, text)
    return figure


def _looks() -> Iterator[tuple[str, str]]:
    """A colour and a stroke for each method, the same in both panels."""
    return ((colour, style) for style in STYLES for colour in COLOURS)


def _area(curve: NDArray) -> float:
    return float((curve.sum() - (curve[0] + curve[-1]) / 2) / (len(curve) - 1))
