"""Ablation records: mean accuracy over seeds, and the paired difference between each arm and its baseline."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
from scipy.stats import t as student

CONFIDENCE = "± 95 % confidence interval of the mean"
NOT_SIGNIFICANT = "no significant difference"
ENOUGH = 3  # values: with fewer, the values are printed instead of an interval


@dataclass(frozen=True)
class Arm:
    """One arm of an ablation and its runs. Values are fractions, not percent. The baseline arm has no `gain`."""

    name: str
    rows: list[dict[str, Any]]
    gain: float | None
    half: float | None  # half-width of the 95 % confidence interval of `gain`; None with one seed
    base: str = ""  # name of the baseline arm
    pairs: tuple[float, ...] = ()  # differences to the baseline, one per common seed

    @property
    def accuracy(self) -> float:
        return mean(row["accuracy"] for row in self.rows)

    @property
    def verdict(self) -> str:
        """Whether the difference to the baseline is significant at 5 %."""
        if self.gain is None:
            return "–"
        if self.half is None:
            return "one seed"
        return "helps" if self.gain > self.half else "hurts" if self.gain < -self.half else NOT_SIGNIFICANT


@dataclass(frozen=True)
class Noise:
    """Residual standard deviation after removing the effects of arm and seed, pooled over all arms of a record. With
    many arms and few seeds, the pooled estimate is more reliable than each arm's own. For two arms it is identical to
    the paired difference's own."""

    size: float
    freedom: int  # degrees of freedom of the estimate

    def error(self, pairs: int) -> float:
        """Standard error of the mean of this many paired differences between two arms."""
        return self.size * math.sqrt(2 / pairs)

    def half(self, pairs: int) -> float:
        """Half-width of the 95 % confidence interval of that mean."""
        return float(student.ppf(0.975, self.freedom)) * self.error(pairs)


def noise_of(rows: list[dict[str, Any]], name: str = "accuracy") -> Noise | None:
    """Fit one effect per arm and one per seed by least squares, and return the residual noise. None if no degrees of
    freedom are left (one seed or one arm)."""
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
    """Compare each arm with the first one, seed by seed, in measured order. An arm whose name extends another name ("+
    SPT, dropout 0.1") is compared with that arm. With `noise`, intervals use the pooled noise, else each arm's own."""
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
            found.append(Arm(name, group, mean(pairs), half, base, tuple(pairs)))
    return found


def worth_of(arms: list[Arm]) -> list[tuple[str, float, float | None]]:
    """For a figure: name, difference in percentage points, half-width of its interval."""
    first = arms[0].name
    return [
        (
            arm.name if arm.base == first else f"{arm.name}\n(compared with {arm.base})",
            100 * arm.gain,
            100 * arm.half if arm.half else None,
        )
        for arm in arms
        if arm.gain is not None
    ]


def interval(values: Sequence[float], comparisons: int = 1) -> float | None:
    """Half-width of the 95 % confidence interval of their mean (Student's t); wider for several comparisons
    (Bonferroni). None with one value."""
    if len(values) < 2:
        return None
    return float(student.ppf(1 - 0.025 / comparisons, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def format_mean(fractions: Sequence[float]) -> str:
    """In percent: the mean with its confidence interval; one or two values themselves, in the given order."""
    values = [100 * fraction for fraction in fractions]
    return f"{_format_values(values, interval(values), '')} %"


def explain_mean(seed_counts: Iterable[int]) -> str:
    """What `format_mean` prints for these numbers of seeds, for the head of a column."""
    counts = set(seed_counts)
    parts = [CONFIDENCE] if max(counts, default=ENOUGH) >= ENOUGH else []
    parts += ["two seeds: both values"] if 2 in counts else []
    return "; ".join(parts) or "one seed"


def format_difference(values: Sequence[float], half: float | None, scale: float = 1.0) -> str:
    """The mean of paired differences with the half-width of its interval; one or two differences in the given order."""
    return _format_values([scale * value for value in values], None if half is None else scale * half, "+")


def _format_values(values: list[float], half: float | None, sign: str) -> str:
    if half is None or len(values) < ENOUGH:
        return ", ".join(f"{value:{sign}.2f}" for value in values)
    return f"{mean(values):{sign}.2f} ± {half:.2f}"
