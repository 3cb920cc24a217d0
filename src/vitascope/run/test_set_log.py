"""Log every use of test images in the run: one line before the evaluation, one with its result."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, NewType

from vitascope.errors import JSON_ERRORS
from vitascope.run.directory import Run
from vitascope.run.files import append_json_line, make_folder
from vitascope.run.stored_values import is_finite_number

LOG_FILE = "test-openings.jsonl"
FIELD_TYPES = {"opening": int, "views": int} | dict.fromkeys(("data", "split", "weights", "machine", "data_hash"), str)
EntryId = NewType("EntryId", int)  # links the two lines of one use


@dataclass(frozen=True)
class EvalLogEntry:
    """One use of test images: data, settings, machine and result (empty if it was interrupted)."""

    use_count: int  # 1 for the first use of these images by this run
    entry_id: EntryId
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
    def settings(self) -> "EvalSettings":
        return EvalSettings(self.data_name, self.split, self.views, self.weights_label)


class EvalSettings(NamedTuple):
    """What was evaluated and how."""

    data_name: str
    split: str
    views: int
    weights_label: str


def read_test_set_log(run: Run) -> list[EvalLogEntry]:
    """Return all uses in order. A truncated line counts as a use of the run's test images without a result."""
    path = run.get_path(LOG_FILE)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    parsed_lines = [_parse_log_line_or_empty(line) for line in lines if line.strip()]
    results = {line["opening"]: line for line in parsed_lines if "accuracy" in line and "opening" in line}
    entries: list[EvalLogEntry] = []
    for line_number, line in enumerate(parsed_lines, start=1):
        if "accuracy" in line:
            continue
        data_name, split = line.get("data") or run.recipe.data.name, line.get("split", "test")
        num_uses_before = sum((entry.data_name, entry.split) == (data_name, split) for entry in entries)
        entry_id = EntryId(line.get("opening", -line_number))
        entries.append(
            EvalLogEntry(
                use_count=num_uses_before + 1,
                entry_id=entry_id,
                data_name=data_name,
                split=split,
                views=line.get("views", 1),
                weights_label=line.get("weights", "last"),
                machine=line.get("machine"),
                data_hash=line.get("data_hash"),
                result=results.get(entry_id, {}),
            )
        )
    return entries


def add_test_use_entry(run: Run, **details: Any) -> EntryId:
    """Log a use before the evaluation starts, so that none is missed; return the id for `log_test_set_result`."""
    known_ids = [entry.entry_id for entry in read_test_set_log(run)]  # those of truncated lines are below 0
    entry_id = EntryId(1 + max([0, *known_ids]))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    make_folder(run.path)  # an external model has none yet
    append_json_line(run.get_path(LOG_FILE), {"opening": entry_id, "when": when, **details})
    return entry_id


def log_test_set_result(run: Run, entry_id: EntryId, result: dict[str, Any]) -> None:
    """Log the result of the use with this id."""
    append_json_line(run.get_path(LOG_FILE), {"opening": entry_id, **result})


def find_first_finished_test_entry(run: Run, views: int) -> EvalLogEntry | None:
    """Return the first finished evaluation of the run's test images with the last weights and this many views."""
    settings = EvalSettings(run.recipe.data.name, "test", views, "last")
    return next((entry for entry in read_test_set_log(run) if entry.settings == settings and entry.result), None)


def _parse_log_line_or_empty(line: str) -> dict[str, Any]:
    """Return an empty dict for a damaged line, also if a value has the wrong type."""
    try:
        parsed = json.loads(line)
    except JSON_ERRORS:
        return {}
    if not isinstance(parsed, dict) or ("accuracy" in parsed and not is_finite_number(parsed["accuracy"])):
        return {}
    known = {name: value for name, value in parsed.items() if value is not None and name in FIELD_TYPES}
    return parsed if all(isinstance(value, FIELD_TYPES[name]) for name, value in known.items()) else {}
