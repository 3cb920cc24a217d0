"""Where two results first differ, and the smallest example that shows it."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitascope.errors import first_line

if TYPE_CHECKING:
    from vitascope.checking.bench import Bench, Finding
    from vitascope.checking.subject import Case

MOST = 24  # numbers of a tensor that are shown


def first_difference(bench: "Bench", right: "Finding") -> dict[str, Any] | None:
    """The first required case that fails, and in it the first number."""
    for case in bench.subject.cases():
        found = difference(bench, right, case) if case.required else None
        if found:
            return found
    return None


def difference(bench: "Bench", right: "Finding", case: "Case") -> dict[str, Any] | None:
    theirs, ours = bench.theirs(right.way, case), bench.ours(right.way, case, right.reading)
    found: dict[str, Any] = {"check": case.name, "index": None, "expected": None, "got": None}
    if isinstance(ours, Exception):
        return None
    if isinstance(theirs, Exception):
        return found | {"error": f"{type(theirs).__name__}: {first_line(theirs, 200)}"}
    if theirs.shape != ours.shape:
        return found | {"expected": f"shape {list(ours.shape)}", "got": f"shape {list(theirs.shape)}"}
    theirs, ours = (bench.subject.as_returned(right.way, case, found.double()) for found in (theirs, ours))
    wrong = ~torch.isclose(theirs, ours, rtol=0.0, atol=1e-5 * max(ours.abs().max().item(), 1e-3))
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    return found | {"index": list(index), "expected": plain(ours[index]), "got": plain(theirs[index])}


def plain(number: Tensor) -> float | str:
    """Return a finite number, or nan and inf as text, because JSON does not support them."""
    value = number.item()
    return value if math.isfinite(value) else str(value)


def example_lines(bench: "Bench", right: "Finding") -> list[str]:
    """The smallest case that fails, with its input and both results."""
    whole = sorted(bench.subject.cases(), key=lambda case: sum(case.sizes.values()))
    for case in [*bench.subject.tiny_cases(), *whole]:
        if not difference(bench, right, case):
            continue
        subject, way = bench.subject, right.way
        theirs, ours = bench.theirs(way, case), bench.ours(way, case, right.reading)
        if isinstance(theirs, Tensor) and isinstance(ours, Tensor) and theirs.shape == ours.shape:
            theirs, ours = (subject.as_returned(way, case, found) for found in (theirs, ours))
        passed = subject.as_passed(way, case, bench.given(case))
        lines = [case.name, *(f"{name} = {numbers(tensor)}" for name, tensor in passed.items())]
        weights = subject.weights_shown(case)
        if sum(weight.numel() for weight in weights.values()) <= 2 * MOST:
            lines += [f"{name} = {numbers(weight)}" for name, weight in weights.items()]
        got = numbers(theirs) if isinstance(theirs, Tensor) else f"raises {type(theirs).__name__}: {first_line(theirs)}"
        return [*lines, f"expected {numbers(ours)}" if isinstance(ours, Tensor) else "", f"got      {got}"]
    return []


def numbers(tensor: Tensor) -> str:
    """Format a tensor as nested lists, fractions with four digits; a long tensor is shortened."""
    if tensor.numel() > MOST:
        return f"{_listed(tensor.flatten()[:8])[:-1]}, …] of shape {list(tensor.shape)}"
    return _listed(tensor)


def _listed(tensor: Tensor) -> str:
    if tensor.ndim == 0:
        value = float(tensor.item())
        return f"{value:.6g}" if value.is_integer() else f"{value:.4g}"
    return "[" + ", ".join(_listed(part) for part in tensor) + "]"
