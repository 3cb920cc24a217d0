"""Check that settings are plain data: no references to other values, no YAML markup beyond names and values."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitascope.errors import UserError

MAX_TEXT_LENGTH = 1_000_000  # characters of a recipe file
MAX_DEPTH = 8  # nested sections and lists
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # all but the tab
LONG_NUMBER = re.compile(r"[0-9a-fA-F_]{300}")  # decimal or hexadecimal; larger than any float
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off")  # no text in YAML, unless they are quoted


def check_override_is_plain(override: str) -> None:
    """Reject an override (key=value) that OmegaConf would resolve, or that no setting can have."""
    if problem := _find_text_problem(override):
        shown = CONTROL_CHARACTERS.sub("�", override[:60])
        raise UserError(f"'{shown}' {problem}")


def read_plain_yaml(path: Path) -> str:
    """Read a recipe file. Anything but names, values and lists is an error."""
    if problem := _find_text_problem(path.stem):
        raise UserError(f"The recipe's file name {path.name!r} {problem}")
    if path.stat().st_size > MAX_TEXT_LENGTH:
        raise UserError(f"The recipe {path} is too large: it must be a YAML text file of settings.")
    text = path.read_text(encoding="utf-8-sig")
    for problem, line_number in _find_markup(text):
        raise UserError(f"The recipe {path}, line {line_number}, {problem}")
    return text


def _find_text_problem(text: str) -> str | None:
    if "${" in text:
        return "refers to another value (${…}). A recipe is only data: write the value itself."
    if CONTROL_CHARACTERS.search(text):
        return "has a control character, or one that is not UTF-8. Remove it."
    if LONG_NUMBER.search(text):
        return "has a number of more than 300 digits. Write a smaller one."
    return None


def _find_markup(text: str) -> Iterator[tuple[str, int]]:
    """Yield what a recipe may not contain, with the line. Nothing is built, so that nesting cannot exhaust memory."""
    import yaml

    open_parts: list[set[str] | None] = []  # the keys of each open section so far; None: a list
    next_is_key = False
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        problem = _find_event_problem(event)
        if isinstance(event, yaml.ScalarEvent) and next_is_key and open_parts[-1] is not None:
            problem = problem or _find_key_problem(event, open_parts[-1])
            open_parts[-1].add(event.value)
        elif next_is_key and isinstance(event, yaml.CollectionStartEvent):
            problem = problem or "has a list or a section as a setting's name. Use text."
        if isinstance(event, yaml.CollectionStartEvent):
            open_parts.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            problem = problem or ("is nested too deeply." if len(open_parts) > MAX_DEPTH else None)
            next_is_key = open_parts[-1] is not None
        elif isinstance(event, yaml.CollectionEndEvent):
            open_parts.pop()
            next_is_key = bool(open_parts) and open_parts[-1] is not None
        elif isinstance(event, yaml.ScalarEvent):
            next_is_key = bool(open_parts) and open_parts[-1] is not None and not next_is_key
        if problem:
            yield problem, event.start_mark.line + 1


def _find_event_problem(event: Any) -> str | None:
    tag = getattr(event, "tag", None)
    if getattr(event, "anchor", None):
        return "has an anchor or alias (& or *). Write the values themselves."
    if tag is not None and tag != "!":
        return f"has the tag {tag}. Write a plain value."
    return _find_text_problem(getattr(event, "value", ""))


def _find_key_problem(event: Any, earlier_keys: set[str]) -> str | None:
    if not re.fullmatch(r"[A-Za-z_][\w.]*", event.value, re.ASCII) or event.value.lower() in YAML_WORDS:
        return f"has the name {event.value[:40]!r}, which no setting has."
    return f"has {event.value} a second time. Remove one." if event.value in earlier_keys else None
