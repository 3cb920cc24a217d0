"""Print tables: wrapped in a terminal, with full width in pipes and files."""

import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Return a console: coloured and wrapped in a terminal, plain and unwrapped otherwise."""
    if sys.stdout.isatty():
        return Console(emoji=False)
    return Console(width=1000, no_color=True, emoji=False)


def table(title: str, columns: list[str], rows: list[list[str]], *, right: Collection[str] = ()) -> Table:
    """Build a table. The columns in `right` are right-aligned."""
    width = min(len(title), console().width - 4)  # at least as wide as the title
    drawn = Table(title=Text(title), title_justify="left", header_style="bold", min_width=width)
    for column in columns:
        number = column in right
        drawn.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))  # Text: a file called [x] is not markup
    return drawn
