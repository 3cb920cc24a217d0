"""Fill the numbers between results marks from the records in a folder.

In Markdown a mark is `<!-- results: KIND NAME… -->` … `<!-- end results -->`, within a line or across lines. In a
recipe it is the comment `# Recorded: …`, filled from the record with the recipe's name.
"""

import os
import re
import textwrap
from pathlib import Path

from vitascope.errors import UserError, did_you_mean, format_count
from vitascope.records.card import card
from vitascope.records.reading import find_records
from vitascope.records.record import read_record
from vitascope.records.tables import KINDS, sentence

MARK = re.compile(r"(<!-- results: (?P<words>[^>]*?) -->)(?P<old>.*?)(<!-- end results -->)", re.DOTALL)
START = re.compile(r"<!--\s*results\b")
EXAMPLE = "<!-- results: KIND NAME… --> and then <!-- end results -->."
COMMENT = re.compile(r"^# Recorded:.*\n(?:#   .*\n)*", re.MULTILINE)


def fill(path: Path, results: Path, cards: Path | None = None) -> tuple[str, int]:
    """Return the file's text with every mark filled, and the number of marks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        return COMMENT.subn(lambda _: _comment(path.stem, results), text)
    filled, marks = MARK.subn(
        lambda found: _between(found, path, results, cards or results.parent / "docs/cards"), text
    )
    if odd := len(START.findall(text)) - marks:
        raise UserError(f"{path} has {format_count(odd, 'results mark')} that cannot be read. Write {EXAMPLE}")
    return filled, marks


def written_cards(results: Path, folder: Path) -> dict[Path, str]:
    """The text of a model card for every record."""
    return {
        folder / f"{path.stem}.md": card(read_record(path), path.name)
        for paths in find_records(results).values()
        for path in paths
    }


def _between(found: re.Match[str], path: Path, results: Path, cards: Path) -> str:
    kind, *names = found["words"].split() or [""]
    if kind not in KINDS:
        raise UserError(f"{path}: there is no kind of results '{kind}'. {did_you_mean(kind, KINDS)}")
    made = KINDS[kind](results, names)
    for word, place in (("{results}", results), ("{cards}", cards)):
        made = made.replace(word, os.path.relpath(place.resolve(), path.resolve().parent).replace(os.sep, "/"))
    made = f"\n{made}\n" if "\n" in made or "\n" in found["old"] else made
    return f"{found[1]}{made}{found[4]}"


def _comment(name: str, results: Path) -> str:
    known = find_records(results)
    told = sentence(results, [name]) if name in known else "not yet"
    lines = textwrap.wrap(f"Recorded: {told}.", 114, subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)
