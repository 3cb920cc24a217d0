"""Guess the role of a user's argument, layer or function from its name."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

LETTERS = {
    "q": {"q", "query", "queries", "qs", "qq"},
    "k": {"k", "key", "keys", "ks"},
    "v": {"v", "value", "values", "val", "vs"},
    "o": {"o", "out", "output", "unifyheads", "unify", "dense", "final", "merge", "combine", "outproj"},
    "qkv": {"qkv", "in", "kqv", "packed", "inproj"},
}
FILLERS = {"w", "b", "weight", "weights", "bias", "proj", "projection", "linear", "lin", "matrix", "to", "layer", "fc"}
FILLERS |= {"mat", "kernel", "mlp", "embed", "net", "head", "heads", "mix", "c", "param", "transform", "map"}
TOKENS = {"x", "tokens", "input", "inputs", "token", "hidden", "embeddings", "embedding", "seq", "sequence", "src"}
TOKENS |= {
    "embeddings",
    "hiddenstates",
    "h",
    "z",
    "features",
    "inp",
    "patches",
    "img",
    "image",
    "images",
    "grid",
    "fmap",
}
HEADS = {"numheads", "nheads", "heads", "head", "nhead", "h", "numhead", "headcount", "numberofheads", "nh"}
HEADS |= {"numattentionheads", "headnum", "numh"}
MAY = r"(true|1|one|ones|nonzero)[^.\n]{0,25}?(may|can|keep|kept|allowed|allow|visible|attend|see|look|valid)"
BLOCKED = (
    r"(true|1|one|ones)[^.\n]{0,25}?(block|hid|ignor|forbid|mask(ed)? out|pad|cannot|must not|not allowed|not attend)"
)


def words_of(name: str) -> list[str]:
    """`W_Q` -> w, q; `outProj.weight` -> out, proj, weight."""
    return list(_words(name))


@lru_cache(maxsize=4096)
def _words(name: str) -> tuple[str, ...]:
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return tuple(word for word in re.split(r"[^A-Za-z]+", parts.lower()) if word)


def compact(name: str) -> str:
    return "".join(words_of(name))


@lru_cache(maxsize=4096)
def letter_of(name: str) -> str | None:
    """Return q, k, v, o or qkv by the name of a layer or weight, or None if the name is unknown."""
    for part in reversed(name.split(".")):
        words = words_of(part)
        whole = "".join(words)
        stripped = [re.sub(r"^(w|b|to|lin|proj)(?=[qkvo]($|kv$))", "", word) for word in [*words, whole]]
        for word in stripped:
            for letter, names in LETTERS.items():
                if word in names or word in {f"{letter}proj", f"{letter}linear", f"{letter}layer"}:
                    return letter
        if "proj" in words or "projection" in words or whole in ("wproj", "projection", "cproj"):
            return "o"
    return None


def weight_role(name: str) -> str | None:
    """`w_q` -> wq, `in_proj_bias` -> bqkv: an argument that holds weights; None for others."""
    words = words_of(name)
    whole = "".join(words)
    letter = letter_of(name)
    if letter is None:
        return None
    if "bias" in words or words[0] == "b" or re.fullmatch(r"b(q|k|v|o|qkv)", whole):
        return "b" + letter
    plain = {"w", "weight", "weights", "proj", "matrix", "kernel", "projection"} & set(words)
    return "w" + letter if plain or re.fullmatch(r"w(q|k|v|o|qkv|out)", whole) else None


def argument_roles(function: Callable[..., Any], skip: int = 0) -> dict[str, str]:
    """Each argument's name -> x, q, k, v, mask, heads, a weight, or the name itself where nothing is known."""
    roles: dict[str, str] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[skip:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        roles[name] = _argument_role(name)
    return roles


def _argument_role(name: str) -> str:
    whole, words = compact(name), words_of(name)
    weight = weight_role(name)
    if "mask" in whole or whole in ("allowed", "visible", "blocked", "keep", "forbidden"):
        return "padding" if "padding" in words else "mask"
    if weight:
        return weight
    if (len(name) > 1 and whole in HEADS) or whole in HEADS - {"h"} or ("heads" in words and "dim" not in words):
        return "heads"
    for letter in "qkv":
        if whole in LETTERS[letter]:
            return letter
    if whole in TOKENS or any(word in TOKENS - {"h", "input", "hidden"} for word in words):
        return "x"
    if "drop" in whole or whole == "p":
        return "dropout"
    return "training" if whole in ("training", "train", "istraining") else whole


def called_with(function: Callable[..., Any], values: Mapping[str, Any], roles: Mapping[str, str]) -> Any:
    """Call a function by the roles of its arguments; an argument with an unknown role keeps its default."""
    positional, named = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        role = roles.get(name)
        if role is None or role not in values:
            if parameter.default is parameter.empty and role is not None:
                raise TypeError(f"the argument {name!r} has an unknown meaning")
            continue
        if role == "dropout" and parameter.default is not parameter.empty:
            continue  # the user's own choice, which may be a layer
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(values[role])
        else:
            named[name] = values[role]
    return function(*positional, **named)


def polarity_in(text: str) -> str | None:
    """What True means in a mask, according to a docstring or comment: may (attend), or blocked."""
    text = text.lower()
    if re.search(BLOCKED, text):
        return "blocked"
    return "may" if re.search(MAY, text) else None


def source_of(thing: object) -> str:
    """Return the source code, or an empty string if it is not available."""
    try:
        return inspect.getsource(thing)  # pyright: ignore[reportArgumentType]
    except (OSError, TypeError):
        return ""


def first_line_of(thing: object) -> int:
    """Return the line of its file at which the source code begins, counted from 1."""
    try:
        return max(1, inspect.getsourcelines(thing)[1])  # pyright: ignore[reportArgumentType]
    except (OSError, TypeError):
        return 1


def prose_of(thing: object) -> str:
    """Docstring and comments."""
    source = source_of(thing)
    comments = re.findall(r"#(.*)", source)
    strings = re.findall(r'"""(.*?)"""', source, flags=re.DOTALL)
    return "\n".join([inspect.getdoc(thing) or "", *comments, *strings])
