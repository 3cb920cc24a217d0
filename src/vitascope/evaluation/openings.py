"""Log every use of test images in the run: one line before the evaluation, one with its result."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vitascope.run.directory import Run
from vitascope.run.files import append_line, make_folder

FILE = "test-openings.jsonl"


@dataclass(frozen=True)
class Opening:
    """One use of test images: data, settings, machine and result (empty if it was interrupted)."""

    number: int  # 1 for the first use of these images by this run
    line: int  # links its two lines
    data: str
    split: str
    views: int
    weights: str
    machine: str | None
    data_hash: str | None
    found: dict[str, Any]

    @property
    def of_the_run(self) -> bool:
        """Whether this is a finished evaluation of the run's own classifier, not of a probe."""
        return bool(self.found) and self.weights in ("last", "best")

    @property
    def what(self) -> tuple[str, str, int, str]:
        return self.data, self.split, self.views, self.weights


def read_openings(run: Run) -> list[Opening]:
    """Return all uses in order. A truncated line counts as a use of the run's test images without a result."""
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
    """Log a use before the evaluation starts, so that none is missed; return the id for `note_result`."""
    tie = 1 + max(0, *(opening.line for opening in read_openings(run)), 0)  # truncated lines have ids below 0
    when = datetime.now(UTC).isoformat(timespec="seconds")
    make_folder(run.path)  # an external model has none yet
    append_line(run.file(FILE), {"opening": tie, "when": when, **said})
    return tie


def note_result(run: Run, tie: int, found: dict[str, Any]) -> None:
    append_line(run.file(FILE), {"opening": tie, **found})


def first_result(run: Run, views: int) -> Opening | None:
    """Return the first finished evaluation of the run's test images with the last weights and this many views."""
    wanted = (run.recipe.data.name, "test", views, "last")
    return next((opening for opening in read_openings(run) if opening.what == wanted and opening.found), None)


def _parsed(line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}
