"""Draw the curves of several runs in two panels, one colour per run."""

from itertools import cycle

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitascope.draw.curves import Points, draw_line, over_epochs
from vitascope.draw.look import caption, new_figure, plain
from vitascope.draw.palette import COLOURS


def draw_overlay(runs: dict[str, dict[str, dict[str, Points]]], text: str) -> Figure:
    """Draw `runs[name][loss or accuracy][train or validation]`: validation solid, training thin and dashed."""
    figure, panels = new_figure(2, width=11.0, height=4.8)
    for panel, kind in zip(panels, ("loss", "accuracy"), strict=True):
        for colour, curves in zip(cycle(COLOURS), runs.values(), strict=False):
            for split, style, thick in (("train", "--", 0.9), ("validation", "-", 1.8)):
                draw_line(panel, kind, curves[kind][split], color=colour, linestyle=style, linewidth=thick)
        over_epochs(panel, kind)
    lines = [
        Line2D([], [], color=colour, label=plain(name)) for colour, name in zip(cycle(COLOURS), runs, strict=False)
    ]
    lines += [Line2D([], [], color="#555555", linestyle="--", linewidth=0.9, label="training (dashed)")]
    panels[1].legend(handles=lines, loc="lower right", fontsize=8)
    caption(figure, text)
    return figure
