"""The result of checking one part or one file, as text, HTML and JSON."""

from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from vitascope.checking.mistakes import MISTAKES

NOTHING = "No transformer part was recognised in it."
SIGNS = {True: "✓", False: "✗", None: "–"}


@dataclass
class Row:
    """One line of the table of checks; `holds` is None if it was not checked."""

    check: str
    holds: bool | None
    note: str = ""


@dataclass
class Report:
    """The result of checking one function or class."""

    part: str
    name: str
    passed: bool
    mistakes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    first_difference: dict[str, Any] | None = None
    assumed: list[str] = field(default_factory=list)
    table: list[Row] = field(default_factory=list)
    example: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""  # instead of correct or wrong: not filled in yet, could not be checked

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        keys = ("part", "name", "passed", "mistakes", "hints", "first_difference")
        return {key: asdict(self)[key] for key in keys}

    def whole(self) -> dict[str, Any]:
        """Return all fields, to be sent to another process."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([self.headline(), *("  " + line for line in self.lines())])

    __repr__ = __str__

    def headline(self) -> str:
        verdict = self.verdict or ("correct" if self.passed else f"wrong: {', '.join(self.mistakes)}")
        return f"{SIGNS[self.passed]} {self.name} ({self.part}): {verdict}"

    def lines(self) -> list[str]:
        """Return the lines below the headline."""
        lines = [f"{name}: {MISTAKES[name].meaning}" for name in self.mistakes if not self.verdict]
        lines += self.evidence
        if self.first_difference and not self.verdict:
            lines.append(f"First difference: {difference_words(self.first_difference)}")
        if self.example:
            lines += ["Smallest failing example:", *("  " + line for line in self.example)]
        lines += [f"Hint: {hint}" for hint in self.hints]
        lines += [f"Assumed: {line}" for line in self.assumed]
        lines += [f"Note: {line}" for line in self.notes]
        width = max((len(row.check) for row in self.table), default=0)
        return lines + [f"{SIGNS[row.holds]} {row.check:<{width}}  {row.note}".rstrip() for row in self.table]

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{escape(line)}</li>" for line in self.lines()[: len(self.lines()) - len(self.table)])
        rows = "".join(
            f"<tr><td>{SIGNS[row.holds]}</td><td>{escape(row.check)}</td><td>{escape(row.note)}</td></tr>"
            for row in self.table
        )
        return f"<p><b>{escape(self.headline())}</b></p><ul>{lines}</ul><table>{rows}</table>"


@dataclass
class Reports:
    """All parts of one file; `error` says why it could not be checked."""

    parts: list[Report] = field(default_factory=list)
    error: str | None = None
    passed_over: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.error is None and bool(self.parts) and all(part.passed for part in self.parts)

    @property
    def is_empty(self) -> bool:
        """Whether the file runs but contains nothing to check."""
        return self.error is not None and self.error.startswith(NOTHING)

    @property
    def exit_code(self) -> int:
        """0: everything is correct; 1: a mistake was found; 2: the file could not be checked."""
        return 2 if self.error is not None or not self.parts else int(not self.passed)

    def as_json(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"parts": [part.as_json() for part in self.parts]}
        answer |= {"passed_over": self.passed_over} if self.passed_over else {}
        return answer if self.error is None else answer | {"error": self.error}

    def __str__(self) -> str:
        words = [str(part) for part in self.parts]
        words += [] if self.error is None else [f"The file could not be checked. {self.error}"]
        return "\n\n".join(words)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        error = "" if self.error is None else f"<p>The file could not be checked. {escape(self.error)}</p>"
        return "".join(part._repr_html_() for part in self.parts) + error


def report_from(data: dict[str, Any]) -> Report:
    """The inverse of `Report.whole`."""
    rows = [Row(**row) for row in data["table"]]
    return Report(**{name: value for name, value in data.items() if name != "table"}, table=rows)


def difference_words(difference: dict[str, Any]) -> str:
    """Describe a `first_difference` in one line."""
    if "error" in difference:
        return f"{difference['check']}: raised {difference['error']}"
    if difference["index"] is None:
        return f"{difference['check']}: expected {difference['expected']}, got {difference['got']}"
    where = ", ".join(map(str, difference["index"]))
    expected, got = (n if isinstance(n, str) else f"{n:.6g}" for n in (difference["expected"], difference["got"]))
    return f"{difference['check']}, output[{where}]: expected {expected}, got {got}"
