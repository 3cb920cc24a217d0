"""Every look at test images -> two lines in the run: one before it, one with what was seen."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vitascope.errors import UserError
from vitascope.run.directory import Run
from vitascope.run.files import append_line

FILE = "test-openings.jsonl"


@dataclass(frozen=True)
class Opening:
    """The how-manieth look at these test images, in which manner, and what came out (empty: it was broken off)."""

    number: int
    data: str
    views: int
    weights: str
    found: dict[str, Any]


def read_openings(run: Run) -> list[Opening]:
    """In the order they were made."""
    path = run.file(FILE)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    try:
        said = [json.loads(line) for line in lines]
        found = {line["opening"]: line for line in said if "accuracy" in line}
        return [_opening(line, found.get(line["opening"], {}), run) for line in said if "when" in line]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not whole ({type(error).__name__}). Copy it back, or train again.") from error


def note_opening(run: Run, data: str, images: int, views: int, weights: str) -> int:
    """Written before the images are looked at, so that none goes unnoticed; its number among all comes back."""
    number = 1 + max((opening.number for opening in read_openings(run)), default=0)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    line = {"opening": number, "when": when, "data": data, "images": images, "views": views, "weights": weights}
    append_line(run.file(FILE), line)
    return number


def note_result(run: Run, number: int, found: dict[str, Any]) -> None:
    append_line(run.file(FILE), {"opening": number, **found})


def first_result(run: Run, data: str, views: int) -> Opening | None:
    """The first look at this data with the last epoch's weights that came to an end, in this manner."""
    suits = (o for o in read_openings(run) if (o.data, o.views, o.weights) == (data, views, "last") and o.found)
    return next(suits, None)


def _opening(line: dict[str, Any], found: dict[str, Any], run: Run) -> Opening:
    """Runs made before views and data were written looked at their own data once straight."""
    data = line.get("data", run.recipe.data.name)
    return Opening(line["opening"], data, line.get("views", 1), line.get("weights", "last"), found)
