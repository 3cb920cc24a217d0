"""Guess the role of a user's argument, layer or function from its name."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

ArgumentRoles = dict[str, str]  # name of an argument -> its role, e.g. q, mask, heads or wq
QKV_ROLE_NAMES = {
    "q": {"q", "query", "queries", "qs", "qq"},
    "k": {"k", "key", "keys", "ks"},
    "v": {"v", "value", "values", "val", "vs"},
    "o": {"o", "out", "output", "unifyheads", "unify", "dense", "final", "merge", "combine", "outproj"},
    "qkv": {"qkv", "in", "kqv", "packed", "inproj"},
}
TOKEN_ARGUMENT_NAMES = {
    "x",
    "tokens",
    "input",
    "inputs",
    "token",
    "hidden",
    "embeddings",
    "embedding",
    "seq",
    "sequence",
    "src",
}
TOKEN_ARGUMENT_NAMES |= {
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
NUM_HEADS_NAMES = {"numheads", "nheads", "heads", "head", "nhead", "h", "numhead", "headcount", "numberofheads", "nh"}
NUM_HEADS_NAMES |= {"numattentionheads", "headnum", "numh"}
ALLOWED_PATTERN = (
    r"(true|1|one|ones|nonzero)[^.\n]{0,25}?(may|can|keep|kept|allowed|allow|visible|attend|see|look|valid)"
)
BLOCKED_PATTERN = (
    r"(true|1|one|ones)[^.\n]{0,25}?(block|hid|ignor|forbid|mask(ed)? out|pad|cannot|must not|not allowed|not attend)"
)


def split_identifier_into_words(name: str) -> list[str]:
    """Split a name into lowercase words: `W_Q` -> w, q; `outProj.weight` -> out, proj, weight."""
    return list(_split_identifier_cached(name))


@lru_cache(maxsize=4096)
def _split_identifier_cached(name: str) -> tuple[str, ...]:
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return tuple(word for word in re.split(r"[^A-Za-z]+", parts.lower()) if word)


def normalize_identifier(name: str) -> str:
    """Return the name in lowercase letters only: `num_heads` -> numheads."""
    return "".join(split_identifier_into_words(name))


@lru_cache(maxsize=4096)
def guess_qkv_role(name: str) -> str | None:
    """Return q, k, v, o or qkv by the name of a layer or weight, or None if the name is unknown."""
    for part in reversed(name.split(".")):
        words = split_identifier_into_words(part)
        whole = "".join(words)
        stripped = [re.sub(r"^(w|b|to|lin|proj)(?=[qkvo]($|kv$))", "", word) for word in [*words, whole]]
        for word in stripped:
            for letter, names in QKV_ROLE_NAMES.items():
                if word in names or word in {f"{letter}proj", f"{letter}linear", f"{letter}layer"}:
                    return letter
        if "proj" in words or "projection" in words or whole in ("wproj", "projection", "cproj"):
            return "o"
    return None


def guess_weight_or_bias_role(name: str) -> str | None:
    """Return the role of a weight or bias argument (`w_q` -> wq, `in_proj_bias` -> bqkv), or None."""
    words = split_identifier_into_words(name)
    whole = "".join(words)
    letter = guess_qkv_role(name)
    if letter is None:
        return None
    if "bias" in words or words[0] == "b" or re.fullmatch(r"b(q|k|v|o|qkv)", whole):
        return "b" + letter
    plain = {"w", "weight", "weights", "proj", "matrix", "kernel", "projection"} & set(words)
    return "w" + letter if plain or re.fullmatch(r"w(q|k|v|o|qkv|out)", whole) else None


def guess_argument_roles(function: Callable[..., Any], num_skipped: int = 0) -> ArgumentRoles:
    """Return the role of each argument: x, q, k, v, mask, heads, a weight, or its name if the role is unknown."""
    roles: dict[str, str] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[num_skipped:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        roles[name] = _guess_argument_role(name)
    return roles


def _guess_argument_role(name: str) -> str:
    whole, words = normalize_identifier(name), split_identifier_into_words(name)
    weight = guess_weight_or_bias_role(name)
    if "mask" in whole or whole in ("allowed", "visible", "blocked", "keep", "forbidden"):
        return "padding" if "padding" in words else "mask"
    if weight:
        return weight
    if (
        (len(name) > 1 and whole in NUM_HEADS_NAMES)
        or whole in NUM_HEADS_NAMES - {"h"}
        or ("heads" in words and "dim" not in words)
    ):
        return "heads"
    for letter in "qkv":
        if whole in QKV_ROLE_NAMES[letter]:
            return letter
    if whole in TOKEN_ARGUMENT_NAMES or any(word in TOKEN_ARGUMENT_NAMES - {"h", "input", "hidden"} for word in words):
        return "x"
    if "drop" in whole or whole == "p":
        return "dropout"
    return "training" if whole in ("training", "train", "istraining") else whole


def call_by_roles(
    function: Callable[..., Any], values_by_role: Mapping[str, Any], argument_roles: ArgumentRoles
) -> Any:
    """Call a function by the roles of its arguments; an argument with an unknown role keeps its default."""
    positional, named = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        role = argument_roles.get(name)
        if role is None or role not in values_by_role:
            if parameter.default is parameter.empty and role is not None:
                raise TypeError(f"the argument {name!r} has an unknown meaning")
            continue
        if role == "dropout" and parameter.default is not parameter.empty:
            continue  # keep the user's default, which may be a layer
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(values_by_role[role])
        else:
            named[name] = values_by_role[role]
    return function(*positional, **named)


def parse_mask_polarity(text: str) -> Literal["allowed", "blocked"] | None:
    """Return the meaning of True in a mask according to a docstring or comment, or None."""
    text = text.lower()
    if re.search(BLOCKED_PATTERN, text):
        return "blocked"
    return "allowed" if re.search(ALLOWED_PATTERN, text) else None


def get_source_or_empty(user_code: object) -> str:
    """Return the source code, or an empty string if it is not available."""
    try:
        return inspect.getsource(user_code)  # pyright: ignore[reportArgumentType]
    except (OSError, TypeError):
        return ""


def get_first_line_or_one(user_code: object) -> int:
    """Return the line of its file at which the source code begins, counted from 1."""
    try:
        return max(1, inspect.getsourcelines(user_code)[1])  # pyright: ignore[reportArgumentType]
    except (OSError, TypeError):
        return 1


def get_docs_and_comments(user_code: object) -> str:
    """Return the docstrings and comments of the source code as one text."""
    source = get_source_or_empty(user_code)
    comments = re.findall(r"#(.*)", source)
    strings = re.findall(r'"""(.*?)"""', source, flags=re.DOTALL)
    return "\n".join([inspect.getdoc(user_code) or "", *comments, *strings])
