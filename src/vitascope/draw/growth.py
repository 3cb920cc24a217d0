"""Draw log-log panels side by side, in which a power law is a straight line."""

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from vitascope.draw.look import caption, label, new_figure, shades

FEW = 1000  # below three decades, the axis has ticks at 1, 2 and 5
Curves = dict[str, list[tuple[float, float]]]


def draw_growth(panels: dict[str, Curves], *, x: str, title: str, caption_text: str) -> Figure:
    """One panel per measured quantity, one line per implementation."""
    figure, axes = new_figure(len(panels), width=9.5, height=4.6)
    for panel, (y, curves) in zip(axes, panels.items(), strict=True):
        for colour, (name, points) in zip(shades(len(curves)), curves.items(), strict=True):
            panel.loglog(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=name)
        counts = [count for count, _ in next(iter(curves.values()))]
        panel.set_xticks(counts, [f"{count:g}" for count in counts])
        panel.minorticks_off()
        sizes = [size for curve in curves.values() for _, size in curve]
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(sizes) < FEW * min(sizes) else (1,)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
        label(panel, f"{title}: {y.split(' in ')[0]}", x, y)
    caption(figure, caption_text)
    return figure
