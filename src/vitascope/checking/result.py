"""What was found about one part of a reader's code, as text, HTML and JSON."""

from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from vitascope.checking.mistakes import MISTAKES

NOTHING = "Nothing in it was recognised as a part."
SIGNS = {True: "✓", False: "✗", None: "–"}


@dataclass
class Row:
    """One line of the table of what holds; `holds` is None where it could not be asked."""

    check: str
    holds: bool | None
    note: str = ""


@dataclass
class Report:
    """One function or class, judged."""

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
    verdict: str = ""  # where nothing was judged: not filled in yet, could not be examined

    def as_json(self) -> dict[str, Any]:
        """What programs read."""
        keys = ("part", "name", "passed", "mistakes", "hints", "first_difference")
        return {key: asdict(self)[key] for key in keys}

    def whole(self) -> dict[str, Any]:
        """Everything, to be carried from one process to another."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([self.headline(), *("  " + line for line in self.lines())])

    __repr__ = __str__

    def headline(self) -> str:
        verdict = self.verdict or ("right" if self.passed else f"wrong: {', '.join(self.mistakes)}")
        return f"{SIGNS[self.passed]} {self.name} ({self.part}): {verdict}"

    def lines(self) -> list[str]:
        """The story under the headline."""
        lines = [f"{name}: {MISTAKES[name].meaning}" for name in self.mistakes if not self.verdict]
        lines += [f"Evidence: {line}" for line in self.evidence]
        if self.first_difference and not self.verdict:
            lines.append(f"First difference: {difference_words(self.first_difference)}")
        if self.example:
            lines += ["Smallest example that fails:", *("  " + line for line in self.example)]
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
    """All parts of one file; `error` says why it could not be used."""

    parts: list[Report] = field(default_factory=list)
    error: str | None = None
    passed_over: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.error is None and bool(self.parts) and all(part.passed for part in self.parts)

    @property
    def is_empty(self) -> bool:
        """The file runs, but holds nothing that could be checked."""
        return self.error is not None and self.error.startswith(NOTHING)

    @property
    def exit_code(self) -> int:
        """0: all right; 1: something is wrong; 2: the file could not be used."""
        return 2 if self.error is not None or not self.parts else int(not self.passed)

    def as_json(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"parts": [part.as_json() for part in self.parts]}
        answer |= {"passed_over": self.passed_over} if self.passed_over else {}
        return answer if self.error is None else answer | {"error": self.error}

    def __str__(self) -> str:
        words = [str(part) for part in self.parts]
        words += [] if self.error is None else [f"Could not be used: {self.error}"]
        return "\n\n".join(words)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        error = "" if self.error is None else f"<p>Could not be used: {escape(self.error)}</p>"
        return "".join(part._repr_html_() for part in self.parts) + error


def report_from(data: dict[str, Any]) -> Report:
    """The inverse of `Report.whole`."""
    rows = [Row(**row) for row in data["table"]]
    return Report(**{name: value for name, value in data.items() if name != "table"}, table=rows)


def difference_words(difference: dict[str, Any]) -> str:
    """One sentence from a `first_difference`."""
    if "error" in difference:
        return f"{difference['check']}: it raised {difference['error']}"
    if difference["index"] is None:
        return f"{difference['check']}: expected {difference['expected']}, got {difference['got']}"
    where = ", ".join(map(str, difference["index"]))
    expected, got = (n if isinstance(n, str) else f"{n:.6g}" for n in (difference["expected"], difference["got"]))
    return f"{difference['check']}, output[{where}]: expected {expected}, got {got}"
