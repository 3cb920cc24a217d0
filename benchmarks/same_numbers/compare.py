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


def compare_runs(base_runs: Sequence[Path], new_runs: Sequence[Path], metric_names: MetricNames) -> Comparison:
    """Compare the runs of one setting in the order of their creation."""
    result = Comparison()
    if len(base_runs) != len(new_runs):
        result.note_difference(f"{len(base_runs)} runs in {SIDES[0]}, {len(new_runs)} in {SIDES[1]}")
    for number, (old, new) in enumerate(zip(base_runs, new_runs, strict=False), start=1):
        place = f"run {number} of {len(new_runs)}, " if len(new_runs) > 1 else ""
        compare_metrics(
            read_metric_rows(old, metric_names), read_metric_rows(new, metric_names), metric_names, result, place
        )
        for file in WEIGHT_FILES:
            _compare_weight_files(old / file, new / file, result, f"{place}{file}")
    return result


def read_metric_rows(run_folder: Path, metric_names: MetricNames) -> list[Row]:
    """Read metrics.jsonl without times, in the working tree's names."""
    file = run_folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [_use_new_names(json.loads(line), metric_names) for line in lines]


def _use_new_names(row: Row, metric_names: MetricNames) -> Row:
    known = {rename.old: rename.new for rename in metric_names.renames}
    return {known.get(name, name): value for name, value in row.items() if not is_time_metric(name)}


def is_time_metric(metric_name: str) -> bool:
    return metric_name.endswith(("seconds", "per_second"))


def compare_metrics(
    base_rows: Sequence[Row], new_rows: Sequence[Row], metric_names: MetricNames, result: Comparison, location: str = ""
) -> None:
    for number, (old, new) in enumerate(zip_longest(base_rows, new_rows), start=1):
        if old is None or new is None:
            result.note_difference(
                f"{location}{len(base_rows)} metric rows in {SIDES[0]}, {len(new_rows)} in {SIDES[1]}"
            )
            return
        result.rows += 1
        result.metrics.update(new)
        at = f"{location}epoch {new.get('epoch', number)}"
        for name in [*old, *(name for name in new if name not in old)]:
            if name in old and name in new:
                if not is_same_value(old[name], new[name]):
                    result.note_difference(f"{name}, {at}: {old[name]!r} in {SIDES[0]}, {new[name]!r} in {SIDES[1]}")
                continue
            side, intended = (SIDES[0], metric_names.removed) if name in old else (SIDES[1], metric_names.added)
            if name in intended:
                result.notes.add(f"{name} only in {side}")
            else:
                result.note_difference(f"{name}, {at}: only in {side}")


def is_same_value(one: object, other: object) -> bool:
    """Numbers by their bits: NaN equals NaN, 0.0 does not equal -0.0, 1 does not equal 1.0."""
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return type(one) is type(other) and one == other


def _compare_weight_files(base_file: Path, new_file: Path, result: Comparison, location: str) -> None:
    exists = base_file.is_file(), new_file.is_file()
    if all(exists):
        compare_weights(load_file(base_file), load_file(new_file), result, location)
    elif any(exists):
        result.note_difference(f"{location}: only in {SIDES[exists.index(True)]}")


def compare_weights(base_weights: Weights, new_weights: Weights, result: Comparison, location: str = "") -> None:
    for name in _join_names(base_weights, new_weights):
        if name not in base_weights or name not in new_weights:
            result.note_difference(f"{location}: {name}: only in {SIDES[name not in base_weights]}")
            continue
        result.tensors += 1
        old, new = base_weights[name], new_weights[name]
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            kinds = [
                f"{tensor.dtype} {tuple(tensor.shape)} in {side}"
                for tensor, side in zip((old, new), SIDES, strict=True)
            ]
            result.note_difference(f"{location}: {name}: {', '.join(kinds)}")
        elif not has_same_bits(old, new):
            largest = (old.double() - new.double()).abs().max().item()
            count = int((_view_bytes(old) != _view_bytes(new)).any(1).sum())
            result.note_difference(
                f"{location}: {name}: {count} of {old.numel()} values, largest difference {largest:.3g}"
            )


def _join_names(base_names: Iterable[str], new_names: Iterable[str]) -> list[str]:
    """All names, in the order of the working tree's."""
    return list(dict.fromkeys([*new_names, *base_names]))


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bytes: NaN equals NaN of the same bits."""
    return torch.equal(_view_bytes(one), _view_bytes(other))


def _view_bytes(tensor: Tensor) -> Tensor:
    """Return a table with one row of bytes per value."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
