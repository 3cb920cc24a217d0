"""Read a study's settings into combinations, and check every combination before training."""

import math
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any, Literal

from vitascope.data.open_data import check_data_name_exists
from vitascope.errors import UserError, format_count
from vitascope.recipe.choices import LABELLED_OBJECTIVE
from vitascope.recipe.reading import explain_override_without_value, read_recipe
from vitascope.recipe.schema import (
    Recipe,
    SectionSettings,
    find_non_default_settings,
    flatten_and_format_settings,
    hash_values,
)
from vitascope.study.storage import Settings

MAX_RUNS = 10_000  # runs; more are treated as a mistake
OPTION_BY_FIELD = {"judge": "--split"}  # identity field -> option, for the error
MAX_DIFFERENCES = 4  # between two studies, listed in the error
EvalSplit = Literal["val", "test"]
LOG_SCALE_RATIO = 10.0  # a range whose ends differ by at least this factor is searched on a log scale


@dataclass(frozen=True)
class Range:
    """`low..high`, for a search: integers if both ends are integers, on a log scale if the ends are far apart."""

    low: float
    high: float
    is_integer: bool

    @property
    def is_log_scale(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOG_SCALE_RATIO

    def format_value(self, value: float) -> str:
        """Format a value of this range as typed."""
        return str(int(value)) if self.is_integer else f"{value:.6g}"


@dataclass(frozen=True)
class Design:
    """The settings that a study varies (values, or ranges for a search), the fixed settings and the seeds."""

    recipe: str
    fixed_overrides: tuple[str, ...]
    values_by_setting: dict[str, list[str]]
    ranges_by_setting: dict[str, Range] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    eval_split: EvalSplit = "val"
    num_search_trials: int = 0  # 0: the whole grid

    @property
    def varied_settings(self) -> list[str]:
        return [*self.values_by_setting, *self.ranges_by_setting]

    @property
    def item_name(self) -> str:
        """The name of a queued item: a combination with all its seeds for a search, a single run for a grid."""
        return "combination" if self.num_search_trials else "run"

    @property
    def size_text(self) -> str:
        """The number of runs, combinations and seeds, as text."""
        count, seeds = self.num_search_trials or len(self.combinations), len(self.seeds)
        parts = f"{format_count(count, 'combination')} × {format_count(seeds, 'seed')}"
        return f"{format_count(count * seeds, 'run')} ({parts})"

    @property
    def score_name(self) -> str:
        """The name of the compared accuracy: validation or test; of a linear probe if trained without labels."""
        probed = "" if LABELLED_OBJECTIVE in self.objective_names else "linear probe "
        return f"{'test' if self.eval_split == 'test' else 'validation'} {probed}accuracy"

    @property
    def objective_names(self) -> set[str]:
        """The training objectives."""
        return set(
            self.values_by_setting.get("train.objective")
            or [self.build_recipe(self._list_grid_or_range_end_combinations()[0], 0).train.objective]
        )

    @property
    def combinations(self) -> list[Settings]:
        """Every combination; the last setting changes fastest."""
        return [
            dict(zip(self.values_by_setting, values, strict=True))
            for values in product(*self.values_by_setting.values())
        ]

    @property
    def identity_hash(self) -> str:
        """A hash of this study's settings, without the number of runs, which may grow."""
        identity: list[Any] = [
            self._get_fixed_settings(),
            self.eval_split,
            bool(self.num_search_trials),
            sorted(self.varied_settings),
        ]
        if self.num_search_trials:  # the sampler needs one search space and the same seeds
            ranges = sorted(
                (setting, f"Range(low={r.low!r}, high={r.high!r}, whole={r.is_integer!r})")  # frozen: part of the hash
                for setting, r in self.ranges_by_setting.items()
            )
            identity += [list(self.seeds), sorted(self.values_by_setting.items()), ranges]
        return hash_values(identity, 12)

    @property
    def identity_fields(self) -> dict[str, str]:
        """The settings behind the identity, by name, to report differences between two studies."""
        texts = flatten_and_format_settings(self._get_fixed_settings()) | {
            "judge": self.eval_split,
            "varied": ", ".join(sorted(self.varied_settings)),
        }
        if self.num_search_trials:
            texts |= {"seeds": str(len(self.seeds))} | {
                key: ",".join(values) for key, values in self.values_by_setting.items()
            }
            texts |= {key: f"{bounds.low:g}..{bounds.high:g}" for key, bounds in self.ranges_by_setting.items()}
        return texts | {"search": "yes" if self.num_search_trials else "no"}

    def _get_fixed_settings(self) -> SectionSettings:
        """Return the fixed settings: any combination's recipe without the varied settings."""
        first = replace(self.build_recipe(self._list_grid_or_range_end_combinations()[0], 0), name="recipe")
        common = find_non_default_settings(first)
        for setting in [*self.varied_settings, "train.seed"]:
            *sections, name = setting.split(".")
            values = common
            for section in sections:
                values = values.get(section, {})
            values.pop(name, None)
        return {name: values for name, values in common.items() if values != {}}

    def build_recipe(self, settings: Settings, seed: int) -> Recipe:
        """Return the recipe of one run of the study."""
        varied = [f"{key}={value}" for key, value in settings.items()]
        return read_recipe(self.recipe, [*self.fixed_overrides, *varied, f"train.seed={seed}"])

    def check_combinations(self) -> None:
        """Reject invalid combinations before training starts."""
        if self.ranges_by_setting and not self.num_search_trials:
            raise UserError(f"{next(iter(self.ranges_by_setting))} is a range, which needs a search. Add --search 20.")
        num_runs = math.prod(map(len, self.values_by_setting.values())) * len(self.seeds)
        if not self.num_search_trials and num_runs > MAX_RUNS:
            raise UserError(f"The grid has {num_runs:,} runs. Vary fewer values, or use --search 50.")
        for settings in self._list_grid_or_range_end_combinations():
            try:
                recipe = self.build_recipe(settings, self.seeds[0])
                check_data_name_exists(recipe.data)
            except UserError as error:
                raise UserError(
                    f"The combination {format_combination(settings)} is not possible: {error}"
                    if settings
                    else str(error)
                ) from error
            if self.eval_split == "val" and recipe.data.validation == 0:
                raise UserError(
                    "A study compares validation accuracy, but data.validation=0. Set it to 0.1, or use --split test."
                )

    def _list_grid_or_range_end_combinations(self) -> list[Settings]:
        """Return all combinations of a grid; for a search, every value combined with the ends of every range."""
        ends = {
            setting: [bounds.format_value(bounds.low), bounds.format_value(bounds.high)]
            for setting, bounds in self.ranges_by_setting.items()
        }
        candidates = self.values_by_setting | ends
        combinations = islice(product(*candidates.values()), MAX_RUNS)
        return [dict(zip(candidates, values, strict=True)) for values in combinations]


def format_combination(settings: Settings, *extra_labels: str) -> str:
    """Return the settings as typed, followed by the extra labels."""
    return ", ".join([*(f"{key}={value}" for key, value in settings.items()), *extra_labels])


def parse_and_check_design(
    recipe: str,
    overrides: list[str],
    num_seeds: int,
    *,
    first_seed: int = 1,
    num_search_trials: int = 0,
    allow_no_variation: bool = False,
    eval_split: EvalSplit = "val",
) -> Design:
    """Read settings; those with several values (a,b,c) or a range (low..high) are varied, by default at least one."""
    if num_seeds < 1:
        raise UserError(f"--seeds {num_seeds} must be at least 1.")
    if num_search_trials < 0:
        raise UserError(f"--search {num_search_trials} must be 0 (the whole grid) or more.")
    fixed, values_by_setting, ranges_by_setting = [], {}, {}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key:
            raise UserError(explain_override_without_value(override, overrides, "or key=a,b,c to vary it"))
        if key in (*values_by_setting, *ranges_by_setting):
            raise UserError(f"{key} is varied twice. Give all its values at once: {key}=a,b,c")
        if key == "train.seed":
            raise UserError("--seeds sets train.seed. Leave train.seed out.")
        values = split_at_outer_commas(text)
        if len(values) > 1:
            _check_values_distinct_and_nonempty(key, values)
            values_by_setting[key] = values
        elif ".." in text and (bounds := _parse_range_unless_path(key, text)):
            ranges_by_setting[key] = bounds
        else:
            fixed.append(override)
    fixed_names = {override.partition("=")[0] for override in fixed}
    if both := [key for key in (*values_by_setting, *ranges_by_setting) if key in fixed_names]:
        raise UserError(f"{both[0]} is both fixed and varied. Give it once.")
    seeds = tuple(range(first_seed, first_seed + num_seeds))
    design = Design(recipe, tuple(fixed), values_by_setting, ranges_by_setting, seeds, eval_split, num_search_trials)
    if not design.varied_settings and not allow_no_variation:
        raise UserError("Nothing is varied. Give a setting several values: model.depth=2,4,8")
    design.check_combinations()
    return design


def split_at_outer_commas(text: str) -> list[str]:
    """Split at commas outside brackets: [0.9,0.95],[0.9,0.99] are two values."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _check_values_distinct_and_nonempty(setting: str, values: list[str]) -> None:
    if "" in values:
        raise UserError(f"{setting}={','.join(values)} has an empty value. Write {setting}=a,b,c without spaces.")
    parsed = [_parse_number_or_text(value) for value in values]
    if repeated := [text for text, value in zip(values, parsed, strict=True) if parsed.count(value) > 1]:
        raise UserError(f"{setting} has the value {repeated[0]} twice.")


def _parse_number_or_text(text: str) -> float | str:
    """Parse a value so that 1e-3 and 0.001 are equal."""
    try:
        return float(text)
    except ValueError:
        return text


def _parse_range_unless_path(setting: str, text: str) -> Range | None:
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
    return Range(*ends, is_integer=all(end.lstrip("+-").isdigit() for end in (low, high)))


def format_identity_differences(stored_fields: dict[str, str], new_fields: dict[str, str]) -> str:
    """Return the differing settings as text; empty without stored fields."""
    varied = stored_fields.get("varied", "") + ", " + new_fields["varied"]
    names = (
        [name for name in sorted(stored_fields | new_fields) if stored_fields.get(name) != new_fields.get(name)]
        if stored_fields
        else []
    )
    names = [name for name in names if name not in varied.split(", ") or (name in stored_fields and name in new_fields)]
    differences = [
        f"{OPTION_BY_FIELD.get(name, name)} was {stored_fields.get(name, 'not set')}, "
        f"now {new_fields.get(name, 'not set')}"
        for name in names
    ]
    num_more = len(differences) - MAX_DIFFERENCES
    more = f"; and {num_more} more" if num_more > 0 else ""
    return ": " + "; ".join(differences[:MAX_DIFFERENCES]) + more if differences else ""
