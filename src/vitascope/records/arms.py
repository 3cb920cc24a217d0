"""Records of ablations -> what each change was worth: mean over seeds, and the difference to the plain arm in pairs."""

import math
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student


@dataclass(frozen=True)
class Arm:
    """One way of doing it, over its seeds; shares, not points. The arm that others are held against has no `gain`."""

    name: str
    rows: list[dict[str, Any]]
    gain: float | None
    half: float | None  # of the 95 % interval of `gain`; None: one seed tells nothing about it
    base: str = ""  # the arm it is held against

    @property
    def accuracy(self) -> float:
        return mean(row["accuracy"] for row in self.rows)

    @property
    def spread(self) -> float | None:
        return stdev([row["accuracy"] for row in self.rows]) if len(self.rows) > 1 else None

    @property
    def verdict(self) -> str:
        """Whether the difference can be told from the seeds' noise."""
        if self.gain is None:
            return "–"
        if self.half is None:
            return "one seed"
        return "helps" if self.gain > self.half else "hurts" if self.gain < -self.half else "cannot be told"


def arms_of(rows: list[dict[str, Any]]) -> list[Arm]:
    """In the order they were measured. Each is held against the first, seed by seed; one that is called like another
    and something more ("+ SPT, dropout 0.1") against that other, or the one most like it."""
    names = list(dict.fromkeys(row["arm"] for row in rows))
    groups = {name: [row for row in rows if row["arm"] == name] for name in names}
    found = []
    for name, group in groups.items():
        base = max((other for other in names if name.startswith(f"{other}, ")), key=len, default=names[0])
        known = {row["seed"]: row["accuracy"] for row in groups[base]}
        pairs = [row["accuracy"] - known[row["seed"]] for row in group if row["seed"] in known]
        if name == names[0] or not pairs:
            found.append(Arm(name, group, None, None))
        else:
            found.append(Arm(name, group, mean(pairs), interval(pairs), base))
    return found


def worth_of(arms: list[Arm]) -> list[tuple[str, float, float | None]]:
    """For a picture: name (and against what, unless it is the first), points, half of their interval."""
    first = arms[0].name
    return [
        (
            arm.name if arm.base == first else f"{arm.name}\n(against {arm.base})",
            100 * arm.gain,
            100 * arm.half if arm.half else None,
        )
        for arm in arms
        if arm.gain is not None
    ]


def interval(values: list[float], comparisons: int = 1) -> float | None:
    """Half of the 95 % interval of their mean (Student's t); wider where several are to hold together (Bonferroni)."""
    if len(values) < 2:
        return None
    return float(student.ppf(1 - 0.025 / comparisons, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
