"""Check a user's function, class or module, or all parts of a file, and return reports."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vitascope.checking.finding import candidates, part_of, polarity_of, recognised, still_open, subject_for
from vitascope.checking.judging import judge
from vitascope.checking.result import NOTHING, Report
from vitascope.errors import UserError, first_line


def check(thing: Callable[..., Any] | type | nn.Module, part: str | None = None) -> Report:
    """Check a function, class or module against PyTorch and name its mistakes. For notebooks and scripts.

    `part` is the transformer part that it implements: attention, multi-head-attention, vit, …
    Default: the part is recognised by its name and arguments.
    """
    name = getattr(thing, "__name__", None) or type(thing).__name__
    return examined(name, thing, part)


def examined(name: str, thing: Any, part: str | None = None, polarity: str | None = None) -> Report:
    """Return one report. If the check cannot be prepared, the mistake is `unknown` and the report gives the reason."""
    if (line := still_open(thing)) and (known := part or part_of(name, thing)):
        return _unfilled(name, known, line)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        return judge(subject_for(name, thing, part, polarity))
    except UserError:
        raise
    except Exception as error:  # the user's constructor may raise anything
        return _unmade(name, part or part_of(name, thing) or "unknown", error)
    finally:
        torch.set_num_threads(threads)


def _unmade(name: str, part: str, error: Exception) -> Report:
    words = f"{type(error).__name__}: {first_line(error, 200)}"
    hint = f"Create an instance yourself: layer = {name}(…). Then check FILE.py:layer, or call vitascope.check(layer)."
    return Report(
        part,
        name,
        False,
        ["unknown"],
        [hint],
        {"check": "preparation", "index": None, "expected": None, "got": None, "error": words},
        evidence=[f"Preparing the check failed. {words}"],
        verdict="could not be checked",
    )


def _unfilled(name: str, part: str, line: int) -> Report:
    return Report(
        part,
        name,
        False,
        ["unknown"],
        ["Replace every ... with your own code. Then check again."],
        {"check": "source code", "index": None, "expected": "code", "got": "...", "error": "not filled in yet"},
        evidence=[f"Line {line} still contains ..."],
        verdict="not filled in yet",
    )


def chosen(module: ModuleType, name: str | None, part: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return what to check in a file, and the names of what is left out: with `part`, only if nothing is checked."""
    if name is not None:
        if not hasattr(module, name):
            there = ", ".join(candidates(module)) or "no function or class"
            raise UserError(f"It does not define {name}. It defines: {there}.")
        return {name: getattr(module, name)}, []
    known, others = recognised(module)
    if part is not None:
        fitting = {name: thing for name, thing in known.items() if part_of(name, thing) == part}
        everything = candidates(module)
        known = fitting or (everything if len(everything) == 1 else {})
        others = [] if known else list(everything)
    return known, others


def examine_file(module: ModuleType, name: str | None, part: str | None) -> Iterator[str | Report | list[str]]:
    """Yield the names that were not recognised, then for every part its name and its report."""
    things, others = chosen(module, name, part)
    yield others
    if not things:
        raise UserError(f"{NOTHING} It defines: {', '.join(others)}." if others else NOTHING)
    own = recognised(module)[0]
    yield next((each for each, thing in own.items() if part_of(each, thing) == "causal-mask"), "Loading the file")
    polarity = polarity_of(own)
    for each, thing in things.items():
        yield each
        yield examined(each, thing, part, polarity)
