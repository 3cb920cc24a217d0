"""A reader's function, class or module -> a report; all parts of a file -> reports."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vitascope.checking.finding import candidates, part_of, polarity_of, recognised, still_open, subject_for
from vitascope.checking.judging import judge
from vitascope.checking.result import NOTHING, Report
from vitascope.errors import UserError, did_you_mean, first_line


def check(thing: Callable[..., Any] | type | nn.Module, part: str | None = None) -> Report:
    """Is this function, class or module right, and if not, which mistake is it? For notebooks and scripts.

    `part` says what it is where its name does not tell: attention, multi-head-attention, vit, …
    """
    name = getattr(thing, "__name__", None) or type(thing).__name__
    return examined(name, thing, part)


def examined(name: str, thing: Any, part: str | None = None, polarity: str | None = None) -> Report:
    """One report; what cannot even be made is wrong in an unknown way, with the reason."""
    if (line := still_open(thing)) and (known := part or part_of(name, thing)):
        return _unfilled(name, known, line)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        return judge(subject_for(name, thing, part, polarity))
    except UserError:
        raise
    except Exception as error:  # the reader's constructor may raise anything
        return _unmade(name, part or part_of(name, thing) or "unknown", error)
    finally:
        torch.set_num_threads(threads)


def _unmade(name: str, part: str, error: Exception) -> Report:
    words = f"{type(error).__name__}: {first_line(error, 200)}"
    hint = f"Make one yourself, such as layer = {name}(…), and check that: FILE.py:layer, or vitascope.check(layer)."
    return Report(
        part,
        name,
        False,
        ["unknown"],
        [hint],
        {"check": "making it", "index": None, "expected": None, "got": None, "error": words},
        evidence=[f"It could not be made: {words}"],
        verdict="could not be examined",
    )


def _unfilled(name: str, part: str, line: int) -> Report:
    return Report(
        part,
        name,
        False,
        ["unknown"],
        ["Replace every ... with your own code, then check again."],
        {"check": "its text", "index": None, "expected": "code", "got": "...", "error": "not filled in yet"},
        evidence=[f"There is still a ... in it (its line {line})."],
        verdict="not filled in yet",
    )


def chosen(module: ModuleType, name: str | None, part: str | None) -> tuple[dict[str, Any], list[str]]:
    """What to examine in a file, and the names that were passed over."""
    if name is not None:
        if not hasattr(module, name):
            there = list(candidates(module))
            raise UserError(
                f"There is no {name} in it. {did_you_mean(name, there) if there else 'It defines nothing.'}"
            )
        return {name: getattr(module, name)}, []
    known, others = recognised(module)
    if part is not None:
        fitting = {name: thing for name, thing in known.items() if part_of(name, thing) == part}
        everything = candidates(module)
        known = fitting or (everything if len(everything) == 1 else {})
    if not known:
        names = f" It defines {', '.join(others)}: say FILE.py:NAME --part PART." if others else ""
        raise UserError(f"{NOTHING}{names}")
    return known, others


def examine_file(module: ModuleType, name: str | None, part: str | None) -> Iterator[str | Report | list[str]]:
    """The names passed over, then for every part its name and, when done, its report."""
    things, others = chosen(module, name, part)
    yield others
    own = recognised(module)[0]
    yield next((each for each, thing in own.items() if part_of(each, thing) == "causal-mask"), "the file itself")
    polarity = polarity_of(own)
    for each, thing in things.items():
        yield each
        yield examined(each, thing, part, polarity)
