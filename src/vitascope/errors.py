"""Errors for users: what was requested, what is available, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

MIN_SIMILARITY = 0.7  # difflib ratio; below it the nearest name is usually not the one that was meant
MIN_PREFIX_LENGTH = 3  # letters; a shorter beginning fits too many names
# Of json.loads: damaged text, not UTF-8, a number of more than 4300 digits, nested too deeply.
JSON_ERRORS = (ValueError, RecursionError)
# Of PyTorch's CPU allocator: "DefaultCPUAllocator: can't allocate memory", on Windows "not enough memory".
OUT_OF_MEMORY_WORDS = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")
ConfigClass = TypeVar("ConfigClass", bound=type)


class UserError(ValueError):
    """An error that the user can fix. The command line prints it as one line and exits with code 2."""


def suggest_choice(unknown_value: str, choices: Iterable[str], prefix: str = "") -> str:
    """Return 'Did you mean depth?' if a choice is similar, otherwise the list of choices. `prefix` is not compared."""
    choices = sorted(choices)
    similar = get_close_matches(unknown_value, choices, n=1, cutoff=MIN_SIMILARITY)
    if not similar and len(unknown_value) >= MIN_PREFIX_LENGTH:
        similar = [choice for choice in choices if choice.startswith(unknown_value)]
    return (
        f"Did you mean {prefix}{similar[0]}?" if similar else f"Choose one of {', '.join(prefix + c for c in choices)}."
    )


def format_count(count: int, noun: str) -> str:
    """Return '1 image' or '1,200 images'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shorten_error_message(error: BaseException, max_chars: int = 120) -> str:
    """Return the first line of another library's error, shortened, or the error's name if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:max_chars]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory of a GPU or the machine was too small. PyTorch's CPU error has no own type."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


def skip_beartype(config_class: ConfigClass) -> ConfigClass:
    """Mark a dataclass that checks its own fields, so that the tests' type checker skips it."""
    config_class.__init__.__annotations__.clear()
    return config_class
