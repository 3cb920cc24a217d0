"""A user's mistake -> one sentence: what was asked, what is there, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

Class = TypeVar("Class", bound=type)


class UserError(ValueError):
    """Something the user can put right; the command line prints it as one line and exits with code 2."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """'Did you mean depth?' where something is near, else the choices themselves."""
    choices = sorted(choices)
    near = get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(choices)}."


def first_line(error: BaseException, most: int = 120) -> str:
    """What another library's error says, short enough for a sentence; its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def speaks_for_itself(config: Class) -> Class:
    """A dataclass that checks its own fields in sentences: the tests' type checker must not speak first."""
    config.__init__.__annotations__.clear()
    return config
