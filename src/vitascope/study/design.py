"""Words of a study -> its cells: every combination of the settings' values, each checked before anything runs."""

import math
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from vitascope.data.opening import check_known
from vitascope.errors import UserError
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import Recipe
from vitascope.recipe.writing import chosen_settings, settings_of, short_name

MOST = 10_000  # runs: more are a mistake in the words
LOG_FROM = 10.0  # a range whose ends differ by this factor is searched on a logarithmic scale


@dataclass(frozen=True)
class Range:
    """`low..high`, for a search: whole numbers where both ends are, on a logarithmic scale where they are far apart."""

    low: float
    high: float
    whole: bool

    @property
    def log(self) -> bool:
        return self.low > 0 and self.high / self.low >= LOG_FROM


@dataclass(frozen=True)
class Design:
    """What is varied (`axes`: setting -> its values as words; `ranges`, to search in), and what is the same for all."""

    recipe: str
    fixed: tuple[str, ...]
    axes: dict[str, list[str]]
    ranges: dict[str, Range] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    judge: str = "val"
    search: int = 0  # trials of a search, 0: the whole grid

    @property
    def varied(self) -> list[str]:
        return [*self.axes, *self.ranges]

    @property
    def objectives(self) -> set[str]:
        """What is learnt: classify, dino, mae."""
        return set(self.axes.get("train.objective") or [self.recipe_for(self._corners()[0], 0).train.objective])

    @property
    def cells(self) -> list[dict[str, str]]:
        """Every combination, the last setting changing fastest."""
        return [dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values())]

    @property
    def identity(self) -> str:
        """A short name for exactly this study; how many runs are wanted of it may grow."""
        said: list[Any] = [self._common(), self.judge, bool(self.search), sorted(self.varied)]
        if self.search:  # a sampler learns over one space, by the means of the same seeds
            ranges = sorted((key, str(found)) for key, found in self.ranges.items())
            said += [list(self.seeds), sorted(self.axes.items()), ranges]
        return short_name(said, 12)

    @property
    def described(self) -> dict[str, str]:
        """What the identity is made of, by name, to say what differs between two."""
        said = settings_of(self._common()) | {"judge": self.judge, "varied": ", ".join(sorted(self.varied))}
        if self.search:
            said |= {"seeds": str(len(self.seeds))} | {key: ",".join(values) for key, values in self.axes.items()}
            said |= {key: f"{found.low:g}..{found.high:g}" for key, found in self.ranges.items()}
        return said | {"a search": "yes" if self.search else "no"}

    def _common(self) -> dict[str, Any]:
        """What is the same for all: any combination's recipe without what is varied."""
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
        """Refused where a combination cannot be: before anything runs, naming it."""
        if self.ranges and not self.search:
            raise UserError(f"{next(iter(self.ranges))} is a range, which only a search takes: --search 20")
        runs = math.prod(map(len, self.axes.values())) * len(self.seeds)
        if not self.search and runs > MOST:
            raise UserError(f"That is {runs:,} runs. Vary less, or let --search 50 choose.")
        for cell in self._corners():
            try:
                recipe = self.recipe_for(cell, self.seeds[0])
                check_known(recipe.data)
            except UserError as error:
                raise UserError(f"The combination {named(cell)} cannot be: {error}" if cell else str(error)) from error
            if self.judge == "val" and recipe.data.validation == 0:
                raise UserError("A study is judged by validation images, but data.validation=0. Or take --judge test.")

    def _corners(self) -> list[dict[str, str]]:
        """All cells of a grid; of a search every value, with the ends of every range."""
        ends = {key: [spelt(found, found.low), spelt(found, found.high)] for key, found in self.ranges.items()}
        every = self.axes | ends
        return [dict(zip(every, values, strict=True)) for values in islice(product(*every.values()), MOST)]


def named(cell: dict[str, str], *more: str) -> str:
    """As its settings are typed, and what else is to be said of it."""
    return ", ".join([*(f"{key}={value}" for key, value in cell.items()), *more])


def spelt(found: Range, value: float) -> str:
    return str(int(value)) if found.whole else f"{value:.6g}"


def design(
    recipe: str, words: list[str], seeds: int, *, first_seed: int = 1, search: int = 0, one: bool = False, **more: Any
) -> Design:
    """`words`: settings; those with several values (a,b,c) or a range (low..high) are varied; nothing needs to be where
    `one` combination is enough."""
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
            raise UserError(f"{key} is varied twice. Put all its values in one word.")
        if key == "train.seed":
            raise UserError("train.seed is what --seeds varies. Leave it out.")
        values = split_values(text)
        if len(values) > 1:
            axes[key] = _different(key, values)
        elif ".." in text and (found := _range(key, text)):
            ranges[key] = found
        else:
            fixed.append(word)
    if both := [key for key in (*axes, *ranges) if key in {word.partition("=")[0] for word in fixed}]:
        raise UserError(f"{both[0]} is set and varied. Say it once.")
    numbers = tuple(range(first_seed, first_seed + seeds))
    made = Design(recipe, tuple(fixed), axes, ranges, numbers, search=search, **more)
    if not made.varied and not one:
        raise UserError("Nothing is varied. Give a setting several values: model.depth=2,4,8")
    made.check()
    return made


def split_values(text: str) -> list[str]:
    """At commas that stand in no brackets: [0.9,0.95],[0.9,0.99] are two values."""
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
    """1e-3 and 0.001 are one value."""
    try:
        return float(value)
    except ValueError:
        return value


def _range(key: str, text: str) -> Range | None:
    """None where it is a path."""
    low, _, high = text.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError as error:
        if "/" in text or "\\" in text:
            return None
        raise UserError(f"{key}={text} is no range: write low..high, two numbers.") from error
    if not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise UserError(f"{key}={text} is no range: the first number must be the smaller one.")
    return Range(*ends, whole=all(end.lstrip("+-").isdigit() for end in (low, high)))
