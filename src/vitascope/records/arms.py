"""Records of ablations -> what each change was worth: mean over seeds, and the difference to the plain arm in pairs."""

import math
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
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


@dataclass(frozen=True)
class Noise:
    """By how much a number differs from what its arm and its seed say: one size for all arms of a record. Where many
    arms have few seeds each, all of them tell it better than the two or three of one arm; of two arms, it is the
    paired difference's own."""

    size: float
    freedom: int  # degrees of freedom it was estimated with

    def error(self, pairs: int) -> float:
        """Standard error of the mean of so many differences between two arms."""
        return self.size * math.sqrt(2 / pairs)

    def half(self, pairs: int) -> float:
        """Half of that mean's 95 % interval."""
        return float(student.ppf(0.975, self.freedom)) * self.error(pairs)


def noise_of(rows: list[dict[str, Any]], name: str = "accuracy") -> Noise | None:
    """What is left when each arm and each seed has a share of its own (least squares). None: nothing is left that
    could tell (one seed, one arm)."""
    told = np.array([row[name] for row in rows])
    kinds = [sorted({row[kind] for row in rows}) for kind in ("arm", "seed")]
    shares = [[row["arm"] == arm for arm in kinds[0]] + [row["seed"] == seed for seed in kinds[1]] for row in rows]
    known = np.array(shares, dtype=float)
    found, _, rank, _ = np.linalg.lstsq(known, told, rcond=None)
    freedom = len(rows) - int(rank)
    if freedom == 0:
        return None
    return Noise(math.sqrt(float(((told - known @ found) ** 2).sum()) / freedom), freedom)


def arms_of(rows: list[dict[str, Any]], noise: Noise | None = None) -> list[Arm]:
    """In the order they were measured. Each is held against the first, seed by seed; one that is called like another
    and something more ("+ SPT, dropout 0.1") against that other, or the one most like it. With `noise` the intervals
    are of that, else each arm's own."""
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
            half = noise.half(len(pairs)) if noise and len(pairs) > 1 else interval(pairs)
            found.append(Arm(name, group, mean(pairs), half, base))
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
