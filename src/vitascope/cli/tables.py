"""Rows -> a table on the terminal, as wide as it needs to be when the output is not a terminal."""

import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Colours and wrapping for a terminal; plain and unwrapped for pipes and files."""
    return Console() if sys.stdout.isatty() else Console(width=160, no_color=True)


def table(title: str, columns: list[str], rows: list[list[str]], *, right: Collection[str] = ()) -> Table:
    """A table whose columns named in `right` hold numbers."""
    width = min(len(title), console().width - 4)  # a narrow table must not break its title
    drawn = Table(title=title, title_justify="left", header_style="bold", min_width=width)
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", no_wrap=column in right)
    for row in rows:
        drawn.add_row(*row)
    return drawn
