"""Read a study's settings into combinations, and check every combination before training."""

import math
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from vitascope.data.open_data import check_data_exists
from vitascope.errors import UserError, format_count
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import find_non_default_settings, format_setting_values, hash_values

MAX_RUNS = 10_000  # runs; more are treated as a mistake
LOG_SCALE_RATIO = 10.0  # a range whose ends differ by at least this factor is searched on a log scale


@dataclass(frozen=True)
class Range:
    """`low..high`, for a search: integers if both ends are integers, on a log scale if the ends are far apart."""

    low: float
    high: float
    whole: bool

    @property
    def is_log_scale(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOG_SCALE_RATIO


@dataclass(frozen=True)
class Design:
    """The varied settings (`axes`: setting -> its values; `ranges`: for a search) and the fixed ones."""

    recipe: str
    fixed_overrides: tuple[str, ...]
    values_by_setting: dict[str, list[str]]
    ranges_by_setting: dict[str, Range] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    eval_split: str = "val"
    num_search_trials: int = 0  # number of trials of a search; 0: the whole grid

    @property
    def varied_settings(self) -> list[str]:
        return [*self.values_by_setting, *self.ranges_by_setting]

    @property
    def unit(self) -> str:
        """What is queued: a search gives a combination with all its seeds to a worker, a grid a single run."""
        return "combination" if self.num_search_trials else "run"

    @property
    def size(self) -> str:
        """The number of runs and combinations, as text."""
        count, seeds = self.num_search_trials or len(self.combinations), len(self.seeds)
        parts = f"{format_count(count, 'combination')} × {format_count(seeds, 'seed')}"
        return f"{format_count(count * seeds, 'run')} ({parts})"

    @property
    def score(self) -> str:
        """The name of a run's result."""
        probed = "" if "classify" in self.objectives else "linear probe "
        return f"{'test' if self.eval_split == 'test' else 'validation'} {probed}accuracy"

    @property
    def objectives(self) -> set[str]:
        """The training objectives: classify, dino, mae."""
        return set(
            self.values_by_setting.get("train.objective")
            or [self.build_recipe(self._list_corner_combinations()[0], 0).train.objective]
        )

    @property
    def combinations(self) -> list[dict[str, str]]:
        """Every combination; the last setting changes fastest."""
        return [
            dict(zip(self.values_by_setting, values, strict=True))
            for values in product(*self.values_by_setting.values())
        ]

    @property
    def identity_hash(self) -> str:
        """A hash of this study's settings, without the number of runs, which may grow."""
        said: list[Any] = [
            self._get_fixed_settings(),
            self.eval_split,
            bool(self.num_search_trials),
            sorted(self.varied_settings),
        ]
        if self.num_search_trials:  # the sampler needs one search space and the same seeds
            ranges = sorted((key, str(found)) for key, found in self.ranges_by_setting.items())
            said += [list(self.seeds), sorted(self.values_by_setting.items()), ranges]
        return hash_values(said, 12)

    @property
    def identity_fields(self) -> dict[str, str]:
        """The settings behind the identity, by name, to report differences between two studies."""
        said = format_setting_values(self._get_fixed_settings()) | {
            "judge": self.eval_split,
            "varied": ", ".join(sorted(self.varied_settings)),
        }
        if self.num_search_trials:
            said |= {"seeds": str(len(self.seeds))} | {
                key: ",".join(values) for key, values in self.values_by_setting.items()
            }
            said |= {key: f"{found.low:g}..{found.high:g}" for key, found in self.ranges_by_setting.items()}
        return said | {"search": "yes" if self.num_search_trials else "no"}

    def _get_fixed_settings(self) -> dict[str, Any]:
        """The fixed settings: any combination's recipe without the varied settings."""
        first = replace(self.build_recipe(self._list_corner_combinations()[0], 0), name="recipe")
        common = find_non_default_settings(first, all_sections="train.objective" in self.varied_settings)
        for setting in [*self.varied_settings, "train.seed"]:
            *places, last = setting.split(".")
            part = common
            for place in places:
                part = part.get(place, {})
            part.pop(last, None)
        return {name: part for name, part in common.items() if part != {}}

    def build_recipe(self, settings: dict[str, str], seed: int) -> Recipe:
        words = [*self.fixed_overrides, *(f"{key}={value}" for key, value in settings.items()), f"train.seed={seed}"]
        return read_recipe(self.recipe, words)

    def check_combinations(self) -> None:
        """Reject invalid combinations before training starts."""
        if self.ranges_by_setting and not self.num_search_trials:
            raise UserError(f"{next(iter(self.ranges_by_setting))} is a range, which needs a search. Add --search 20.")
        runs = math.prod(map(len, self.values_by_setting.values())) * len(self.seeds)
        if not self.num_search_trials and runs > MAX_RUNS:
            raise UserError(f"The grid has {runs:,} runs. Vary fewer values, or use --search 50.")
        for cell in self._list_corner_combinations():
            try:
                recipe = self.build_recipe(cell, self.seeds[0])
                check_data_exists(recipe.data)
            except UserError as error:
                raise UserError(
                    f"The combination {format_combination(cell)} is not possible: {error}" if cell else str(error)
                ) from error
            if self.eval_split == "val" and recipe.data.validation == 0:
                raise UserError(
                    "A study compares validation accuracy, but data.validation=0. Set it to 0.1, or use --split test."
                )

    def _list_corner_combinations(self) -> list[dict[str, str]]:
        """All cells of a grid; for a search, every value combined with the ends of every range."""
        ends = {
            key: [format_range_value(found, found.low), format_range_value(found, found.high)]
            for key, found in self.ranges_by_setting.items()
        }
        every = self.values_by_setting | ends
        return [dict(zip(every, values, strict=True)) for values in islice(product(*every.values()), MAX_RUNS)]


def format_combination(settings: dict[str, str], *extra_labels: str) -> str:
    """The settings as they are typed, followed by `more`."""
    return ", ".join([*(f"{key}={value}" for key, value in settings.items()), *extra_labels])


def format_range_value(value_range: Range, value: float) -> str:
    return str(int(value)) if value_range.whole else f"{value:.6g}"


def read_design(
    recipe: str,
    overrides: list[str],
    num_seeds: int,
    *,
    first_seed: int = 1,
    num_search_trials: int = 0,
    allow_single: bool = False,
    **more: Any,
) -> Design:
    """Read settings; those with several values (a,b,c) or a range (low..high) are varied. `one`: allow a single
    combination."""
    if num_seeds < 1:
        raise UserError(f"--seeds {num_seeds} must be at least 1.")
    if num_search_trials < 0:
        raise UserError(f"--search {num_search_trials} must be 0 (the whole grid) or more.")
    fixed, axes, ranges = [], {}, {}
    for word in overrides:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise UserError(f"'{word}' is not a setting. Write key=value, or key=a,b,c to vary it.")
        if key in (*axes, *ranges):
            raise UserError(f"{key} is varied twice. Give all its values at once: {key}=a,b,c")
        if key == "train.seed":
            raise UserError("--seeds sets train.seed. Leave train.seed out.")
        values = split_values(text)
        if len(values) > 1:
            axes[key] = _check_distinct_values(key, values)
        elif ".." in text and (found := _parse_range(key, text)):
            ranges[key] = found
        else:
            fixed.append(word)
    if both := [key for key in (*axes, *ranges) if key in {word.partition("=")[0] for word in fixed}]:
        raise UserError(f"{both[0]} is both fixed and varied. Give it once.")
    numbers = tuple(range(first_seed, first_seed + num_seeds))
    made = Design(recipe, tuple(fixed), axes, ranges, numbers, num_search_trials=num_search_trials, **more)
    if not made.varied_settings and not allow_single:
        raise UserError("Nothing is varied. Give a setting several values: model.depth=2,4,8")
    made.check_combinations()
    return made


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets: [0.9,0.95],[0.9,0.99] are two values."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _check_distinct_values(setting: str, values: list[str]) -> list[str]:
    if "" in values:
        raise UserError(f"{setting}={','.join(values)} has an empty value. Write {setting}=a,b,c without spaces.")
    same = [_parse_number_or_text(value) for value in values]
    if repeated := [value for value, meant in zip(values, same, strict=True) if same.count(meant) > 1]:
        raise UserError(f"{setting} has the value {repeated[0]} twice.")
    return values


def _parse_number_or_text(text: str) -> float | str:
    """1e-3 and 0.001 are the same value."""
    try:
        return float(text)
    except ValueError:
        return text


def _parse_range(setting: str, text: str) -> Range | None:
    """Read low..high; None if the text is a path."""
    low, _, high = text.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError as error:
        if "/" in text or "\\" in text:
            return None
        raise UserError(f"{setting}={text} is not a range. Write two numbers: low..high.") from error
    if not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise UserError(f"{setting}={text} is not a range. The first number must be smaller.")
    return Range(*ends, whole=all(end.lstrip("+-").isdigit() for end in (low, high)))
