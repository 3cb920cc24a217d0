"""Read a study's settings into combinations, and check every combination before training."""

import math
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from vitascope.data.opening import check_known
from vitascope.errors import UserError, format_count
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import chosen_settings, settings_of, short_name

MOST = 10_000  # runs; more are treated as a mistake
LOG_FROM = 10.0  # a range whose ends differ by at least this factor is searched on a log scale


@dataclass(frozen=True)
class Range:
    """`low..high`, for a search: integers if both ends are integers, on a log scale if the ends are far apart."""

    low: float
    high: float
    whole: bool

    @property
    def log(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOG_FROM


@dataclass(frozen=True)
class Design:
    """The varied settings (`axes`: setting -> its values; `ranges`: for a search) and the fixed ones."""

    recipe: str
    fixed: tuple[str, ...]
    axes: dict[str, list[str]]
    ranges: dict[str, Range] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    judge: str = "val"
    search: int = 0  # number of trials of a search; 0: the whole grid

    @property
    def varied(self) -> list[str]:
        return [*self.axes, *self.ranges]

    @property
    def unit(self) -> str:
        """What is queued: a search gives a combination with all its seeds to a worker, a grid a single run."""
        return "combination" if self.search else "run"

    @property
    def size(self) -> str:
        """The number of runs and combinations, as text."""
        count, seeds = self.search or len(self.cells), len(self.seeds)
        parts = f"{format_count(count, 'combination')} × {format_count(seeds, 'seed')}"
        return f"{format_count(count * seeds, 'run')} ({parts})"

    @property
    def score(self) -> str:
        """The name of a run's result."""
        probed = "" if "classify" in self.objectives else "linear probe "
        return f"{'test' if self.judge == 'test' else 'validation'} {probed}accuracy"

    @property
    def objectives(self) -> set[str]:
        """The training objectives: classify, dino, mae."""
        return set(self.axes.get("train.objective") or [self.recipe_for(self._corners()[0], 0).train.objective])

    @property
    def cells(self) -> list[dict[str, str]]:
        """Every combination; the last setting changes fastest."""
        return [dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values())]

    @property
    def identity(self) -> str:
        """A hash of this study's settings, without the number of runs, which may grow."""
        said: list[Any] = [self._common(), self.judge, bool(self.search), sorted(self.varied)]
        if self.search:  # the sampler needs one search space and the same seeds
            ranges = sorted((key, str(found)) for key, found in self.ranges.items())
            said += [list(self.seeds), sorted(self.axes.items()), ranges]
        return short_name(said, 12)

    @property
    def described(self) -> dict[str, str]:
        """The settings behind the identity, by name, to report differences between two studies."""
        said = settings_of(self._common()) | {"judge": self.judge, "varied": ", ".join(sorted(self.varied))}
        if self.search:
            said |= {"seeds": str(len(self.seeds))} | {key: ",".join(values) for key, values in self.axes.items()}
            said |= {key: f"{found.low:g}..{found.high:g}" for key, found in self.ranges.items()}
        return said | {"search": "yes" if self.search else "no"}

    def _common(self) -> dict[str, Any]:
        """The fixed settings: any combination's recipe without the varied settings."""
        first = replace(self.recipe_for(self._corners()[0], 0), name="recipe")
        common = chosen_settings(first, every="train.objective" in self.varied)
        for setting in [*self.varied, "train.seed"]:
            *places, last = setting.split(".")
            part = common
            for place in places:
                part = part.get(place, {})
            part.pop(last, None)
        return {name: part for name, part in common.items() if part != {}}

    def recipe_for(self, cell: dict[str, str], seed: int) -> Recipe:
        words = [*self.fixed, *(f"{key}={value}" for key, value in cell.items()), f"train.seed={seed}"]
        return read_recipe(self.recipe, words)

    def check(self) -> None:
        """Reject invalid combinations before training starts."""
        if self.ranges and not self.search:
            raise UserError(f"{next(iter(self.ranges))} is a range, which needs a search. Add --search 20.")
        runs = math.prod(map(len, self.axes.values())) * len(self.seeds)
        if not self.search and runs > MOST:
            raise UserError(f"The grid has {runs:,} runs. Vary fewer values, or use --search 50.")
        for cell in self._corners():
            try:
                recipe = self.recipe_for(cell, self.seeds[0])
                check_known(recipe.data)
            except UserError as error:
                raise UserError(
                    f"The combination {named(cell)} is not possible: {error}" if cell else str(error)
                ) from error
            if self.judge == "val" and recipe.data.validation == 0:
                raise UserError(
                    "A study compares validation accuracy, but data.validation=0. Set it to 0.1, or use --split test."
                )

    def _corners(self) -> list[dict[str, str]]:
        """All cells of a grid; for a search, every value combined with the ends of every range."""
        ends = {key: [spelt(found, found.low), spelt(found, found.high)] for key, found in self.ranges.items()}
        every = self.axes | ends
        return [dict(zip(every, values, strict=True)) for values in islice(product(*every.values()), MOST)]


def named(cell: dict[str, str], *more: str) -> str:
    """The settings as they are typed, followed by `more`."""
    return ", ".join([*(f"{key}={value}" for key, value in cell.items()), *more])


def spelt(found: Range, value: float) -> str:
    return str(int(value)) if found.whole else f"{value:.6g}"


def design(
    recipe: str, words: list[str], seeds: int, *, first_seed: int = 1, search: int = 0, one: bool = False, **more: Any
) -> Design:
    """Read settings; those with several values (a,b,c) or a range (low..high) are varied. `one`: allow a single
    combination."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds} must be at least 1.")
    if search < 0:
        raise UserError(f"--search {search} must be 0 (the whole grid) or more.")
    fixed, axes, ranges = [], {}, {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise UserError(f"'{word}' is not a setting. Write key=value, or key=a,b,c to vary it.")
        if key in (*axes, *ranges):
            raise UserError(f"{key} is varied twice. Give all its values at once: {key}=a,b,c")
        if key == "train.seed":
            raise UserError("--seeds sets train.seed. Leave train.seed out.")
        values = split_values(text)
        if len(values) > 1:
            axes[key] = _different(key, values)
        elif ".." in text and (found := _range(key, text)):
            ranges[key] = found
        else:
            fixed.append(word)
    if both := [key for key in (*axes, *ranges) if key in {word.partition("=")[0] for word in fixed}]:
        raise UserError(f"{both[0]} is both fixed and varied. Give it once.")
    numbers = tuple(range(first_seed, first_seed + seeds))
    made = Design(recipe, tuple(fixed), axes, ranges, numbers, search=search, **more)
    if not made.varied and not one:
        raise UserError("Nothing is varied. Give a setting several values: model.depth=2,4,8")
    made.check()
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


def _different(key: str, values: list[str]) -> list[str]:
    if "" in values:
        raise UserError(f"{key}={','.join(values)} has an empty value. Write {key}=a,b,c without spaces.")
    same = [_meaning(value) for value in values]
    if repeated := [value for value, meant in zip(values, same, strict=True) if same.count(meant) > 1]:
        raise UserError(f"{key} has the value {repeated[0]} twice.")
    return values


def _meaning(value: str) -> float | str:
    """1e-3 and 0.001 are the same value."""
    try:
        return float(value)
    except ValueError:
        return value


def _range(key: str, text: str) -> Range | None:
    """Read low..high; None if the text is a path."""
    low, _, high = text.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError as error:
        if "/" in text or "\\" in text:
            return None
        raise UserError(f"{key}={text} is not a range. Write two numbers: low..high.") from error
    if not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise UserError(f"{key}={text} is not a range. The first number must be smaller.")
    return Range(*ends, whole=all(end.lstrip("+-").isdigit() for end in (low, high)))
