"""Rows -> a table on the terminal, as wide as it needs to be when the output is not a terminal."""

import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Colours and wrapping for a terminal; plain and unwrapped for pipes and files."""
    if sys.stdout.isatty():
        return Console(emoji=False)
    return Console(width=1000, no_color=True, emoji=False)


def table(title: str, columns: list[str], rows: list[list[str]], *, right: Collection[str] = ()) -> Table:
    """A table whose columns named in `right` hold numbers."""
    width = min(len(title), console().width - 4)  # a narrow table must not break its title
    drawn = Table(title=Text(title), title_justify="left", header_style="bold", min_width=width)
    for column in columns:
        number = column in right
        drawn.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))  # as it is: a file called [x] is not markup
    return drawn
