"""Print tables, format numbers with units, and load a model for a command."""

import sys
from collections.abc import Collection, Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from vitascope.evaluation.trained import TrainedTransformer


def create_console() -> Console:
    """Return a console: coloured and wrapped in a terminal, plain and unwrapped otherwise."""
    if sys.stdout.isatty():
        return Console(emoji=False)
    return Console(width=1000, no_color=True, emoji=False)


def create_table(
    title: str, columns: list[str], rows: list[list[str]], *, right_aligned: Collection[str] = ()
) -> Table:
    """Build a table. The columns in `right` are right-aligned."""
    width = min(len(title), create_console().width - 4)  # at least as wide as the title
    drawn = Table(title=Text(title), title_justify="left", header_style="bold", min_width=width)
    for column in columns:
        number = column in right_aligned
        drawn.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))  # Text: a file called [x] is not markup
    return drawn


def abbreviate_count(value: float) -> str:
    """Format with decimal units, for parameters and FLOPs."""
    return _format_with_unit(value, 1000, ["", " k", " M", " G", " T", " P"])


def format_bytes(num_bytes: float) -> str:
    """Format with binary units, for memory."""
    return _format_with_unit(num_bytes, 1024, [" B", " KiB", " MiB", " GiB", " TiB"])


def format_duration(seconds: float) -> str:
    """Format a time, from microseconds to minutes."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (120, 1, "s")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 60:.3g} min"


def format_percent(fraction: float | None, num_decimals: int = 1) -> str:
    """Format a fraction as a percentage; None becomes a dash."""
    return "–" if fraction is None else f"{fraction:.{num_decimals}%}"


def _format_with_unit(value: float, unit_step: int, units: list[str]) -> str:
    index = 0
    while abs(value) >= unit_step and index < len(units) - 1:
        value, index = value / unit_step, index + 1
    return f"{value:.0f}{units[index]}" if index == 0 else f"{value:.2f}{units[index]}"


def load_model(model_ref: str | PathLike[str], **load_options: Any) -> "TrainedTransformer":
    """Load a model with `vitascope.load` and print its notes."""
    from vitascope.evaluation.trained import load

    model = load(model_ref, **load_options)
    print_notes(model.notes)
    return model


def print_notes(notes: Iterable[str]) -> None:
    for line in notes:
        print(f"vitascope: {line}", file=sys.stderr)
