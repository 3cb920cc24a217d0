"""The result of checking one part or one file, as text, HTML and JSON."""

from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, NotRequired, TypedDict

from vitascope.coursework.checker.mistakes import MISTAKES

NOTHING_RECOGNIZED = "No transformer part was recognised in it."
RESULT_SIGNS = {True: "✓", False: "✗", None: "–"}


class FirstDifference(TypedDict):
    """The first difference from the reference; the keys are those of the JSON output."""

    check: str
    index: list[int] | None
    expected: float | str | None
    got: float | str | None
    error: NotRequired[str]


@dataclass
class CheckRow:
    """One line of the table of checks; `passed` is None if it was not checked."""

    check: str
    passed: bool | None
    note: str = ""


@dataclass
class CheckReport:
    """The result of checking one function or class."""

    part: str
    name: str
    passed: bool
    mistakes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    first_difference: FirstDifference | None = None
    assumptions: list[str] = field(default_factory=list)
    table: list[CheckRow] = field(default_factory=list)
    example: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""  # instead of correct or wrong: not filled in yet, could not be checked

    def to_json_summary(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        keys = ("part", "name", "passed", "mistakes", "hints", "first_difference")
        return {key: asdict(self)[key] for key in keys}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, to be sent to another process."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([self.format_headline(), *("  " + line for line in self.format_lines())])

    __repr__ = __str__

    def format_headline(self) -> str:
        verdict = self.verdict or ("correct" if self.passed else f"wrong: {', '.join(self.mistakes)}")
        return f"{RESULT_SIGNS[self.passed]} {self.name} ({self.part}): {verdict}"

    def format_lines(self) -> list[str]:
        """Return the lines below the headline."""
        lines = [f"{name}: {MISTAKES[name].description}" for name in self.mistakes if not self.verdict]
        lines += self.evidence
        if self.first_difference and not self.verdict:
            lines.append(f"First difference: {format_first_difference(self.first_difference)}")
        if self.example:
            lines += ["Smallest failing example:", *("  " + line for line in self.example)]
        lines += [f"Hint: {hint}" for hint in self.hints]
        lines += [f"Assumed: {line}" for line in self.assumptions]
        lines += [f"Note: {line}" for line in self.notes]
        width = max((len(row.check) for row in self.table), default=0)
        return lines + [f"{RESULT_SIGNS[row.passed]} {row.check:<{width}}  {row.note}".rstrip() for row in self.table]

    def _repr_html_(self) -> str:
        lines = "".join(
            f"<li>{escape(line)}</li>" for line in self.format_lines()[: len(self.format_lines()) - len(self.table)]
        )
        rows = "".join(
            f"<tr><td>{RESULT_SIGNS[row.passed]}</td><td>{escape(row.check)}</td><td>{escape(row.note)}</td></tr>"
            for row in self.table
        )
        return f"<p><b>{escape(self.format_headline())}</b></p><ul>{lines}</ul><table>{rows}</table>"


@dataclass
class FileReport:
    """The reports of all parts of one file; `error` gives the reason why it could not be checked."""

    part_reports: list[CheckReport] = field(default_factory=list)
    error: str | None = None
    unrecognized_names: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.error is None and bool(self.part_reports) and all(part.passed for part in self.part_reports)

    @property
    def is_empty(self) -> bool:
        """Return whether the file runs but contains nothing to check."""
        return self.error is not None and self.error.startswith(NOTHING_RECOGNIZED)

    @property
    def exit_code(self) -> int:
        """0: everything is correct; 1: a mistake was found; 2: the file could not be checked."""
        return 2 if self.error is not None or not self.part_reports else int(not self.passed)

    def to_json_summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {"parts": [part.to_json_summary() for part in self.part_reports]}
        summary |= {"passed_over": self.unrecognized_names} if self.unrecognized_names else {}
        return summary if self.error is None else summary | {"error": self.error}

    def __str__(self) -> str:
        paragraphs = [str(part) for part in self.part_reports]
        paragraphs += [] if self.error is None else [f"The file could not be checked. {self.error}"]
        return "\n\n".join(paragraphs)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        error = "" if self.error is None else f"<p>The file could not be checked. {escape(self.error)}</p>"
        return "".join(part._repr_html_() for part in self.part_reports) + error


def build_report_from_dict(report_fields: dict[str, Any]) -> CheckReport:
    """Create a report from the fields that `CheckReport.to_dict` returns."""
    rows = [CheckRow(**row) for row in report_fields["table"]]
    return CheckReport(**{name: value for name, value in report_fields.items() if name != "table"}, table=rows)


def format_first_difference(first_difference: FirstDifference) -> str:
    """Describe a `first_difference` in one line."""
    if "error" in first_difference:
        return f"{first_difference['check']}: raised {first_difference['error']}"
    if first_difference["index"] is None:
        return f"{first_difference['check']}: expected {first_difference['expected']}, got {first_difference['got']}"
    index = ", ".join(map(str, first_difference["index"]))
    expected, got = (
        value if isinstance(value, str) else f"{value:.6g}"
        for value in (first_difference["expected"], first_difference["got"])
    )
    return f"{first_difference['check']}, output[{index}]: expected {expected}, got {got}"
