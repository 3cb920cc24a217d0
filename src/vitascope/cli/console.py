"""Print tables, format numbers with units, and load a model for a command."""

import sys
from collections.abc import Collection, Iterable
from os import PathLike
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitascope.errors import UserError

if TYPE_CHECKING:
    from vitascope.inference.classifier import Classifier

ExitCode = int


def create_console() -> Console:
    """Return a console: coloured and wrapped in a terminal, plain and unwrapped otherwise."""
    if sys.stdout.isatty():
        return Console(emoji=False)
    return Console(width=1000, no_color=True, emoji=False)


NARROW_WIDTH = 120  # characters: in narrower terminals, the headers of numbers are wrapped
MIN_COLUMN_WIDTH = 12  # characters that a column keeps, if it has them


def create_table(
    title: str,
    columns: list[str],
    rows: list[list[str]],
    *,
    right_aligned: Collection[str] = (),
    never_wrapped: Collection[str] | None = None,
) -> Table:
    """Build a table. Columns in `never_wrapped` (default: the right-aligned ones) keep their full width; in a narrow
    terminal the others are wrapped."""
    console_width = create_console().width
    never_wrapped = right_aligned if never_wrapped is None else never_wrapped
    min_table_width = min(len(title), console_width - 4)  # at least as wide as the title
    table = Table(title=Text(title), title_justify="left", header_style="bold", min_width=min_table_width)
    for index, column in enumerate(columns):
        is_right, is_whole = column in right_aligned, column in never_wrapped
        cell_width = max((len(row[index]) for row in rows), default=0)
        header_width = max(map(len, column.split()), default=0)
        wrap_header = is_right and not is_whole and console_width < NARROW_WIDTH
        table.add_column(
            column,
            justify="right" if is_right else "left",
            no_wrap=is_whole,
            overflow="fold",
            min_width=None if is_whole else max(header_width, min(cell_width, MIN_COLUMN_WIDTH)),
            max_width=max(header_width, cell_width) if wrap_header else None,
        )
    for row in rows:
        table.add_row(*map(Text, row))  # Text: a file called [x] is not markup
    return table


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


def _format_with_unit(value: float, unit_step: int, units: list[str]) -> str:
    index = 0
    while abs(value) >= unit_step and index < len(units) - 1:
        value, index = value / unit_step, index + 1
    return f"{value:.0f}{units[index]}" if index == 0 else f"{value:.2f}{units[index]}"


def open_model_and_print_notes_to_stderr(model_ref: str | PathLike[str], **open_model_options: Any) -> "Classifier":
    """Open a model and print its notes to stderr."""
    from vitascope.inference.open_model import open_model

    model = open_model(model_ref, **open_model_options)
    print_notes_to_stderr(model.notes)
    return model


def describe_run_or_model(model: "Classifier") -> str:
    """Return the first line of a command's output: the run, or the model and the folder of its results."""
    if model.is_run:
        return f"Run: {model.run.path}"
    return f"Model: {model.name} (results in {model.run.path})"


def print_notes_to_stderr(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)


def reject_settings_without_effect(overrides: Iterable[str], used_prefixes: tuple[str, ...], error_ending: str) -> None:
    """Raise a UserError for a setting whose name has none of the prefixes; `error_ending` ends the sentence."""
    for override in overrides:
        name = override.partition("=")[0]
        if not name.startswith(used_prefixes):
            raise UserError(f"{name} has no effect {error_ending}.")
