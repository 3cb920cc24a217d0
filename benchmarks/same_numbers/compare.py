"""Compare the metrics and weights of two runs bit by bit."""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.same_numbers.worker import Rename

Row = dict[str, object]  # one line of metrics.jsonl
Weights = dict[str, Tensor]

WEIGHT_FILES = ("model.safetensors", "best.safetensors")
SIDES = ("the base", "the working tree")


@dataclass(frozen=True)
class MetricNames:
    """Which names of metrics changed between the trees."""

    renames: Sequence[Rename] = ()
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


@dataclass
class Comparison:
    """How much was compared, the first difference, and metrics that only one tree writes as intended."""

    rows: int = 0
    tensors: int = 0
    difference: str = ""
    notes: set[str] = field(default_factory=set)
    metrics: set[str] = field(default_factory=set)  # names that the working tree wrote

    def note_difference(self, text: str) -> None:
        """Keep the first one only."""
        self.difference = self.difference or text


def compare_runs(base: Sequence[Path], here: Sequence[Path], names: MetricNames) -> Comparison:
    """Compare the runs of one setting in the order of their creation."""
    result = Comparison()
    if len(base) != len(here):
        result.note_difference(f"{len(base)} runs in {SIDES[0]}, {len(here)} in {SIDES[1]}")
    for number, (old, new) in enumerate(zip(base, here, strict=False), start=1):
        place = f"run {number} of {len(here)}, " if len(here) > 1 else ""
        compare_metrics(read_rows(old, names), read_rows(new, names), names, result, place)
        for file in WEIGHT_FILES:
            _compare_files(old / file, new / file, result, f"{place}{file}")
    return result


def read_rows(run: Path, names: MetricNames) -> list[Row]:
    """Read metrics.jsonl without times, in the working tree's names."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [_use_new_names(json.loads(line), names) for line in lines]


def _use_new_names(row: Row, names: MetricNames) -> Row:
    known = {rename.old: rename.new for rename in names.renames}
    return {known.get(name, name): value for name, value in row.items() if not is_time(name)}


def is_time(name: str) -> bool:
    return name.endswith(("seconds", "per_second"))


def compare_metrics(
    base: Sequence[Row], here: Sequence[Row], names: MetricNames, result: Comparison, place: str = ""
) -> None:
    for number, (old, new) in enumerate(zip_longest(base, here), start=1):
        if old is None or new is None:
            result.note_difference(f"{place}{len(base)} metric rows in {SIDES[0]}, {len(here)} in {SIDES[1]}")
            return
        result.rows += 1
        result.metrics.update(new)
        at = f"{place}epoch {new.get('epoch', number)}"
        for name in [*old, *(name for name in new if name not in old)]:
            if name in old and name in new:
                if not is_same_value(old[name], new[name]):
                    result.note_difference(f"{name}, {at}: {old[name]!r} in {SIDES[0]}, {new[name]!r} in {SIDES[1]}")
                continue
            side, intended = (SIDES[0], names.removed) if name in old else (SIDES[1], names.added)
            if name in intended:
                result.notes.add(f"{name} only in {side}")
            else:
                result.note_difference(f"{name}, {at}: only in {side}")


def is_same_value(one: object, other: object) -> bool:
    """Numbers by their bits: NaN equals NaN, 0.0 does not equal -0.0, 1 does not equal 1.0."""
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return type(one) is type(other) and one == other


def _compare_files(base: Path, here: Path, result: Comparison, place: str) -> None:
    exists = base.is_file(), here.is_file()
    if all(exists):
        compare_weights(load_file(base), load_file(here), result, place)
    elif any(exists):
        result.note_difference(f"{place}: only in {SIDES[exists.index(True)]}")


def compare_weights(base: Weights, here: Weights, result: Comparison, place: str = "") -> None:
    for name in _join_names(base, here):
        if name not in base or name not in here:
            result.note_difference(f"{place}: {name}: only in {SIDES[name not in base]}")
            continue
        result.tensors += 1
        old, new = base[name], here[name]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            kinds = [
                f"{tensor.dtype} {tuple(tensor.shape)} in {side}"
                for tensor, side in zip((old, new), SIDES, strict=True)
            ]
            result.note_difference(f"{place}: {name}: {', '.join(kinds)}")
        elif not has_same_bits(old, new):
            largest = (old.double() - new.double()).abs().max().item()
            count = int((_view_bytes(old) != _view_bytes(new)).any(1).sum())
            result.note_difference(
                f"{place}: {name}: {count} of {old.numel()} values, largest difference {largest:.3g}"
            )


def _join_names(base: Iterable[str], here: Iterable[str]) -> list[str]:
    """All names, in the order of the working tree's."""
    return list(dict.fromkeys([*here, *base]))


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bytes: NaN equals NaN of the same bits."""
    return torch.equal(_view_bytes(one), _view_bytes(other))


def _view_bytes(tensor: Tensor) -> Tensor:
    """Return a table with one row of bytes per value."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
