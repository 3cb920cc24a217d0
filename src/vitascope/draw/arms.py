"""What changes were worth -> a dot and its interval for each, left or right of nothing."""

from matplotlib.figure import Figure

from vitascope.draw.look import COLOURS, caption, label, new_figure

Worth = tuple[str, float, float | None]  # name, points, half of the interval


def draw_arms(panels: dict[str, list[Worth]], text: str) -> Figure:
    """A panel for each setting they were tried in. Grey: cannot be told from noise."""
    most = max(len(found) for found in panels.values())
    figure, axes = new_figure(len(panels), width=6.2 * len(panels), height=1.6 + 0.34 * most)
    for axis, (title, found) in zip(axes, panels.items(), strict=True):
        axis.axvline(0, color="#888888", linewidth=1)
        for place, (_, points, half) in enumerate(reversed(found)):
            told = half is not None and abs(points) > half
            colour = "#999999" if not told else COLOURS[2] if points > 0 else COLOURS[1]
            axis.errorbar(points, place, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
        axis.set_yticks(range(len(found)), [name for name, _, _ in reversed(found)])
        axis.set_ylim(-0.6, len(found) - 0.4)
        axis.grid(axis="x", alpha=0.25)
        label(axis, title, "points against the plain model", "")
    caption(figure, text)
    return figure
