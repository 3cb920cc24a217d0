"""Every look at test images -> two lines in the run: one before it, one with what was seen."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vitascope.run.directory import Run
from vitascope.run.files import append_line, make_folder

FILE = "test-openings.jsonl"


@dataclass(frozen=True)
class Opening:
    """One look: at what, in which manner, where, and what came out (empty: it was broken off)."""

    number: int  # the how-manieth look at these images
    line: int  # ties its two lines together
    data: str
    split: str
    views: int
    weights: str
    machine: str | None
    data_hash: str | None
    found: dict[str, Any]

    @property
    def of_the_run(self) -> bool:
        """A finished look at the run's own answers, not at a probe's on its features."""
        return bool(self.found) and self.weights in ("last", "best")

    @property
    def what(self) -> tuple[str, str, int, str]:
        return self.data, self.split, self.views, self.weights


def read_openings(run: Run) -> list[Opening]:
    """In the order they were made. A line torn by a kill is a look at the run's own test images without a result."""
    path = run.file(FILE)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    said = [_parsed(line) for line in lines if line.strip()]
    results = {line["opening"]: line for line in said if "accuracy" in line and "opening" in line}
    openings: list[Opening] = []
    for number, line in enumerate(said, start=1):
        if "accuracy" in line:
            continue
        data, split = line.get("data") or run.recipe.data.name, line.get("split", "test")
        before = sum((known.data, known.split) == (data, split) for known in openings)
        tie = line.get("opening", -number)
        openings.append(
            Opening(
                number=before + 1,
                line=tie,
                data=data,
                split=split,
                views=line.get("views", 1),
                weights=line.get("weights", "last"),
                machine=line.get("machine"),
                data_hash=line.get("data_hash"),
                found=results.get(tie, {}),
            )
        )
    return openings


def note_opening(run: Run, **said: Any) -> int:
    """Written before the model sees the images, so that no look goes unnoticed; ties the result's line to this one."""
    tie = 1 + max(0, *(opening.line for opening in read_openings(run)), 0)  # torn lines count below 0
    when = datetime.now(UTC).isoformat(timespec="seconds")
    make_folder(run.path)  # a model from outside has none yet
    append_line(run.file(FILE), {"opening": tie, "when": when, **said})
    return tie


def note_result(run: Run, tie: int, found: dict[str, Any]) -> None:
    append_line(run.file(FILE), {"opening": tie, **found})


def first_result(run: Run, views: int) -> Opening | None:
    """The first look at the run's own test images with the last epoch's weights and so many views that was finished."""
    wanted = (run.recipe.data.name, "test", views, "last")
    return next((opening for opening in read_openings(run) if opening.what == wanted and opening.found), None)


def _parsed(line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}
