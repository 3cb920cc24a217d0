"""Ablation records: mean accuracy over seeds, and the paired difference between each arm and its baseline."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

from vitascope.number_format import format_number

CI_LABEL = "± 95 % confidence interval of the mean"
NOT_SIGNIFICANT = "no significant difference"
MIN_SEEDS_FOR_INTERVAL = 3  # values: with fewer, the values are printed instead of an interval

ROUNDING_TOLERANCE = 1e-9  # below this, the differences of all seeds are equal up to rounding

AblationRow = dict[str, Any]  # one run: arm, seed, accuracy, parameters, steady_seconds, …


class GainInPoints(NamedTuple):
    """The difference between an arm and its baseline in percentage points, for a figure."""

    label: str
    points: float
    ci_half_width: float | None


@dataclass(frozen=True)
class PairedDifference:
    """A paired difference, seed by seed: the mean and the half-width of its 95 % confidence interval."""

    mean_difference: float
    ci_half_width: float | None  # None with one seed
    differences: tuple[float, ...] = ()  # one per seed

    @classmethod
    def from_pairs(cls, differences: list[float], num_comparisons: int = 1) -> "PairedDifference":
        """Compute mean and interval, with Bonferroni correction for `num_comparisons`."""
        return cls(mean(differences), compute_ci_half_width(differences, num_comparisons), tuple(differences))

    def format_with_interval(self, scale: float = 1.0) -> str:
        """Format the mean with its interval; with one or two seeds, the differences themselves."""
        return format_mean_difference_or_values(self.differences, self.ci_half_width, scale)

    @property
    def has_no_spread(self) -> bool:
        """Whether the difference is equal in all seeds."""
        return self.ci_half_width is not None and self.ci_half_width < ROUNDING_TOLERANCE

    @property
    def verdict(self) -> str:
        """Whether the difference is significant at 5 %: better, worse or not."""
        if self.ci_half_width is None:
            return "one seed"
        if self.has_no_spread:  # with few seeds, identical differences are a coincidence
            return "not testable"
        if abs(self.mean_difference) <= self.ci_half_width:
            return NOT_SIGNIFICANT
        return "better" if self.mean_difference > 0 else "worse"

    @property
    def effect_verdict(self) -> str:
        """The verdict on a change: helps, hurts or not significant."""
        return {"better": "helps", "worse": "hurts"}.get(self.verdict, self.verdict)


@dataclass(frozen=True)
class AblationArm:
    """One arm of an ablation and its runs. Values are fractions, not percent."""

    name: str
    rows: list[AblationRow]
    baseline_name: str = ""
    difference: PairedDifference | None = None  # to the baseline; None for the first arm and without common seeds

    @property
    def mean_accuracy(self) -> float:
        return mean(row["accuracy"] for row in self.rows)

    @property
    def verdict(self) -> str:
        return "–" if self.difference is None else self.difference.effect_verdict


@dataclass(frozen=True)
class ResidualNoise:
    """Residual standard deviation after removing the effects of arm and seed, pooled over all arms of a record. With
    many arms and few seeds, the pooled estimate is more reliable than each arm's own. For two arms it is identical to
    the paired difference's own."""

    std: float
    degrees_of_freedom: int  # degrees of freedom of the estimate

    def compute_standard_error(self, num_pairs: int) -> float:
        """Compute the standard error of the mean of this many paired differences between two arms."""
        return self.std * math.sqrt(2 / num_pairs)

    def compute_ci_half_width(self, num_pairs: int) -> float:
        """Compute the half-width of the 95 % confidence interval of that mean."""
        return float(student.ppf(0.975, self.degrees_of_freedom)) * self.compute_standard_error(num_pairs)


def estimate_residual_noise(rows: list[AblationRow], metric_name: str = "accuracy") -> ResidualNoise | None:
    """Fit one effect per arm and one per seed by least squares, and return the residual noise. None if no degrees of
    freedom are left (one seed or one arm)."""
    values = np.array([row[metric_name] for row in rows])
    arms, seeds = (sorted({row[key] for row in rows}) for key in ("arm", "seed"))
    indicators = [[row["arm"] == arm for arm in arms] + [row["seed"] == seed for seed in seeds] for row in rows]
    design_matrix = np.array(indicators, dtype=float)
    effects, _, rank, _ = np.linalg.lstsq(design_matrix, values, rcond=None)
    degrees_of_freedom = len(rows) - int(rank)
    if degrees_of_freedom == 0:
        return None
    squared_residuals = float(((values - design_matrix @ effects) ** 2).sum())
    return ResidualNoise(math.sqrt(squared_residuals / degrees_of_freedom), degrees_of_freedom)


def compare_arms_with_baselines(rows: list[AblationRow], noise: ResidualNoise | None = None) -> list[AblationArm]:
    """Compare each arm with the first one, seed by seed, in measured order. An arm whose name extends another name ("+
    SPT, dropout 0.1") is compared with that arm. With `noise`, intervals use the pooled noise, else each arm's own."""
    names = list(dict.fromkeys(row["arm"] for row in rows))
    groups = {name: [row for row in rows if row["arm"] == name] for name in names}
    arms = []
    for name, group in groups.items():
        baseline = max((other for other in names if name.startswith(f"{other}, ")), key=len, default=names[0])
        accuracies = {row["seed"]: row["accuracy"] for row in groups[baseline]}
        differences = [row["accuracy"] - accuracies[row["seed"]] for row in group if row["seed"] in accuracies]
        if name == names[0] or not differences:
            arms.append(AblationArm(name, group))
            continue
        difference = PairedDifference.from_pairs(differences)
        if noise and len(differences) > 1:
            difference = replace(difference, ci_half_width=noise.compute_ci_half_width(len(differences)))
        arms.append(AblationArm(name, group, baseline, difference))
    return arms


def list_gains_in_percentage_points(arms: list[AblationArm]) -> list[GainInPoints]:
    """Return the gain of every arm except the first."""
    first = arms[0].name
    return [
        GainInPoints(
            arm.name if arm.baseline_name == first else f"{arm.name}\n(compared with {arm.baseline_name})",
            100 * arm.difference.mean_difference,
            100 * arm.difference.ci_half_width if arm.difference.ci_half_width else None,
        )
        for arm in arms
        if arm.difference is not None
    ]


def compute_ci_half_width(values: Sequence[float], num_comparisons: int = 1) -> float | None:
    """Compute the half-width of the 95 % confidence interval of the mean (Student's t), wider for several comparisons
    (Bonferroni). None with one value."""
    if len(values) < 2:
        return None
    return float(student.ppf(1 - 0.025 / num_comparisons, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def format_percent_mean_or_values(fractions: Sequence[float]) -> str:
    """Format in percent: the mean with its confidence interval; one or two values themselves, in the given order."""
    values = [100 * fraction for fraction in fractions]
    return f"{_format_mean_or_values(values, compute_ci_half_width(values), '')} %"


def describe_mean_and_interval_notation(seed_counts: Iterable[int]) -> str:
    """Describe what `format_mean` prints for these numbers of seeds, for the header of a column."""
    counts = set(seed_counts)
    parts = [CI_LABEL] if max(counts, default=MIN_SEEDS_FOR_INTERVAL) >= MIN_SEEDS_FOR_INTERVAL else []
    parts += ["two seeds: both values"] if 2 in counts else []
    return "; ".join(parts) or "one seed"


def format_mean_difference_or_values(
    differences: Sequence[float], ci_half_width: float | None, scale: float = 1.0
) -> str:
    """Format the mean of paired differences with the half-width of its interval; one or two differences themselves."""
    return _format_mean_or_values(
        [scale * value for value in differences], None if ci_half_width is None else scale * ci_half_width, "+"
    )


def _format_mean_or_values(values: list[float], ci_half_width: float | None, sign_format: str) -> str:
    """Format a mean with ±; fewer than three values themselves. `sign_format`: '+' for a sign before all numbers."""
    if ci_half_width is None or len(values) < MIN_SEEDS_FOR_INTERVAL:
        return ", ".join(format_number(value, f"{sign_format}z.2f") for value in values)
    return f"{format_number(mean(values), f'{sign_format}z.2f')} ± {ci_half_width:.2f}"
