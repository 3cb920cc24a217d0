"""Count how commands end: refused in a sentence, recovered, completed, lost, with a traceback, or not at all."""

import random
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.processes import Outcome

MAX_EXAMPLES = 8
COUNTED = ("tries", "refused", "recovered", "completed", "lost", "tracebacks", "hangs", "wrong_exit_codes")


@dataclass
class FaultCounts:
    """The outcomes of one kind of fault. `refused`: exit code 2 and a sentence. `recovered`: bit-identical results.
    `completed`: exit code 0 with an input that may be valid. `lost`: another result, silently or for ever."""

    fault: str
    result: str  # what happens, in words
    tries: int = 0
    refused: int = 0
    recovered: int = 0
    completed: int = 0
    lost: int = 0
    tracebacks: int = 0
    hangs: int = 0
    wrong_exit_codes: int = 0
    skipped: str = ""
    examples: list[str] = field(default_factory=list)

    @property
    def num_failures(self) -> int:
        return self.lost + self.tracebacks + self.hangs + self.wrong_exit_codes

    def as_row(self) -> dict[str, Any]:
        return asdict(self)

    def add(self, other: "FaultCounts") -> None:
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped = self.skipped or other.skipped
        self.examples = [*self.examples, *other.examples][:MAX_EXAMPLES]

    def count_recovery(self, is_recovered: bool, description: str) -> None:
        self.tries += 1
        if is_recovered:
            self.recovered += 1
        else:
            self.lost += 1
            self.add_example(f"lost: {description}")

    def count_outcome(self, outcome: Outcome, description: str) -> str:
        """Count the end of a command whose input was changed; return its kind."""
        self.tries += 1
        kind = classify_outcome(outcome)
        setattr(self, kind, getattr(self, kind) + 1)
        if kind in ("tracebacks", "hangs", "wrong_exit_codes"):
            self.add_example(f"{kind}: {description}: {shorten_outcome(outcome)}")
        return kind

    def add_example(self, text: str) -> None:
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(text)


def classify_outcome(outcome: Outcome) -> str:
    """Return completed, refused, tracebacks, hangs or wrong_exit_codes."""
    if outcome.hung:
        return "hangs"
    if "Traceback (most recent call last)" in outcome.errors + outcome.output:
        return "tracebacks"
    if outcome.exit_code == 0:
        return "completed"
    has_sentence = bool(re.search(r"(?m)^vitascope: .+", outcome.errors)) or "Usage: " in outcome.output
    return "refused" if outcome.exit_code == 2 and has_sentence else "wrong_exit_codes"


def shorten_outcome(outcome: Outcome) -> str:
    lines = [line for line in (outcome.errors or outcome.output).splitlines() if line.strip()]
    return f"exit code {outcome.exit_code}, {lines[-1][:200] if lines else 'no output'}"


@dataclass
class Attack:
    """What every fault needs: a folder of its own, a random generator, and the number of tries in a limited time."""

    folder: Path
    rng: random.Random
    num_tries: int
    end: float  # time.monotonic

    def list_tries(self) -> Iterator[Path]:
        """Yield an empty folder for each try, until the time is over. The first try is always made."""
        for index in range(self.num_tries):
            if index and time.monotonic() > self.end:
                return
            folder = self.folder / f"try-{index}"
            folder.mkdir(parents=True)
            yield folder
