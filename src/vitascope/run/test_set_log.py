"""Log every use of test images in the run: one line before the evaluation, one with its result."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vitascope.run.directory import Run
from vitascope.run.files import append_json_line, make_folder

LOG_FILE = "test-openings.jsonl"


@dataclass(frozen=True)
class EvalLogEntry:
    """One use of test images: data, settings, machine and result (empty if it was interrupted)."""

    use_count: int  # 1 for the first use of these images by this run
    entry_id: int  # links its two lines
    data_name: str
    split: str
    views: int
    weights_label: str
    machine: str | None
    data_hash: str | None
    result: dict[str, Any]

    @property
    def is_finished_classifier_result(self) -> bool:
        """Whether this is a finished evaluation of the run's own classifier, not of a probe."""
        return bool(self.result) and self.weights_label in ("last", "best")

    @property
    def settings(self) -> tuple[str, str, int, str]:
        return self.data_name, self.split, self.views, self.weights_label


def read_test_set_log(run: Run) -> list[EvalLogEntry]:
    """Return all uses in order. A truncated line counts as a use of the run's test images without a result."""
    path = run.get_path(LOG_FILE)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    said = [_parse_log_line(line) for line in lines if line.strip()]
    results = {line["opening"]: line for line in said if "accuracy" in line and "opening" in line}
    openings: list[EvalLogEntry] = []
    for number, line in enumerate(said, start=1):
        if "accuracy" in line:
            continue
        data, split = line.get("data") or run.recipe.data.name, line.get("split", "test")
        before = sum((known.data_name, known.split) == (data, split) for known in openings)
        tie = line.get("opening", -number)
        openings.append(
            EvalLogEntry(
                use_count=before + 1,
                entry_id=tie,
                data_name=data,
                split=split,
                views=line.get("views", 1),
                weights_label=line.get("weights", "last"),
                machine=line.get("machine"),
                data_hash=line.get("data_hash"),
                result=results.get(tie, {}),
            )
        )
    return openings


def log_test_set_use(run: Run, **details: Any) -> int:
    """Log a use before the evaluation starts, so that none is missed; return the id for `note_result`."""
    tie = 1 + max(0, *(opening.entry_id for opening in read_test_set_log(run)), 0)  # truncated lines have ids below 0
    when = datetime.now(UTC).isoformat(timespec="seconds")
    make_folder(run.path)  # an external model has none yet
    append_json_line(run.get_path(LOG_FILE), {"opening": tie, "when": when, **details})
    return tie


def log_test_set_result(run: Run, entry_id: int, result: dict[str, Any]) -> None:
    append_json_line(run.get_path(LOG_FILE), {"opening": entry_id, **result})


def find_first_test_result(run: Run, views: int) -> EvalLogEntry | None:
    """Return the first finished evaluation of the run's test images with the last weights and this many views."""
    wanted = (run.recipe.data.name, "test", views, "last")
    return next((opening for opening in read_test_set_log(run) if opening.settings == wanted and opening.result), None)


def _parse_log_line(line: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}
