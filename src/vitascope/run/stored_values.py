"""Check values that were read from a run's JSON files: another version or a damaged disk may have written them."""

import math
from typing import Any, cast

from vitascope.run.machine import RunMachineInfo

REQUIRED_METRICS = ("epoch", "step", "images_seen", "seconds", "train_loss")
MAX_EPOCH = 10**9
DEVICES, PRECISIONS = ("cuda", "mps", "cpu"), ("float32", "bfloat16", "float16")


def find_problem_of_epoch(row: Any) -> str | None:
    """Return what is wrong with a line that belongs to an epoch; None if nothing is."""
    if not isinstance(row, dict):
        return "is not a JSON object"
    epoch = row.get("epoch")
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 1 <= epoch <= MAX_EPOCH:
        return "has no epoch number"
    return None


def find_problem_of_metrics(row: Any) -> str | None:
    """Return what is wrong with a line of metrics.jsonl; None if nothing is."""
    if problem := find_problem_of_epoch(row):
        return problem
    if missing := [name for name in REQUIRED_METRICS if name not in row]:
        return f"has no {missing[0]}"
    wrong = next((name for name, value in row.items() if not is_finite_number(value)), None)
    return None if wrong is None else f"has a {wrong[:40]!r} that is not a finite number"


def is_finite_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def keep_valid_machine_fields(content: dict[str, Any]) -> RunMachineInfo:
    """Return machine.json without the fields whose values have a wrong type."""
    checks = {
        "machine": lambda value: _is_mapping_of(value, str) and "cpu" in value,
        "versions": lambda value: _is_mapping_of(value, str, type(None)),
        "commit": lambda value: value is None or isinstance(value, str),
        "date": lambda value: isinstance(value, str),
        "hardware": is_stored_hardware,
        "data_hash": lambda value: isinstance(value, str),
        "whole_data_hash": lambda value: value is None or isinstance(value, str),
        "training_images": lambda value: is_finite_number(value) and value >= 1,
        "validation_images": lambda value: is_finite_number(value) and value >= 0,
        "resumed": lambda value: isinstance(value, list) and all(map(_is_machine_info, value)),
        "wall_seconds": lambda value: is_finite_number(value) and value >= 0,
    }
    return cast(
        RunMachineInfo,
        {name: value for name, value in content.items() if name not in checks or checks[name](value)},
    )


def is_stored_hardware(value: Any) -> bool:
    """Return whether this describes the device, precision and execution mode of a run."""
    if not isinstance(value, dict) or value.get("device") not in DEVICES or value.get("precision") not in PRECISIONS:
        return False
    flags, threads = [value.get(name, False) for name in ("compiled", "captured")], value.get("threads", 1)
    has_threads = isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= 2**16
    return (
        all(isinstance(flag, bool) for flag in flags) and has_threads and _is_mapping_of(value.get("kernels", {}), str)
    )


def _is_machine_info(value: Any) -> bool:
    return isinstance(value, dict) and all(name in value for name in ("machine", "commit", "versions"))


def _is_mapping_of(value: Any, *types: type) -> bool:
    return isinstance(value, dict) and all(isinstance(item, types) for item in value.values())
