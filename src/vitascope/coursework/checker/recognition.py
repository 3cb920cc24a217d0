"""Recognise the part that a user's code implements, and the role of an argument, layer or function, from its name."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

from torch import nn

# The first pattern that matches wins; case and underscores of the name are ignored.
PART_NAME_PATTERNS = [
    (
        "causal-mask",
        r"(causal|subsequent|lookahead|autoregressive|triangular|future).*mask|^(make|create|build|get)?mask$",
    ),
    ("class-token", r"cls|class(ification)?token|prepend"),
    ("sinusoidal-positions", r"sinus|position(?!.*(feed|ff|mlp))|^pe$|posenc|posemb|sincos"),
    ("patchify", r"patch(?!.*transformer)"),
    ("self-attention-2d", r"(att(n|ention)).*2d|2d.*att(n|ention)|gridattention|spatialattention"),
    ("feed-forward", r"feedforward|^ffn?\d*$|mlp|ffn"),
    ("transformer-block", r"block|(encoder|transformer|vit)layer|residualattention"),
    ("vit", r"vit|visiontransformer|imagetransformer"),
    ("multi-head-attention", r"multihead|mha|msa|mhsa|selfatt"),
    ("attention", r"att(n|ention|end)|sdpa|dotproduct"),
    ("vit", r"transformer"),
]
UserCode = Callable[..., Any]  # a function, a class or a module
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
def guess_qkvo_role(layer_or_weight_name: str) -> str | None:
    """Return q, k, v, o or qkv by the name of a layer or weight, or None if the name is unknown."""
    for part in reversed(layer_or_weight_name.split(".")):
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
    letter = guess_qkvo_role(name)
    if letter is None:
        return None
    if "bias" in words or words[0] == "b" or re.fullmatch(r"b(q|k|v|o|qkv)", whole):
        return "b" + letter
    plain = {"w", "weight", "weights", "proj", "matrix", "kernel", "projection"} & set(words)
    return "w" + letter if plain or re.fullmatch(r"w(q|k|v|o|qkv|out)", whole) else None


def guess_argument_roles(function: Callable[..., Any], num_skipped_arguments: int = 0) -> ArgumentRoles:
    """Return the role of each argument: x, q, k, v, mask, heads, a weight, or its name if the role is unknown."""
    roles: dict[str, str] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[num_skipped_arguments:]:
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


def find_mask_polarity(text: str) -> Literal["allowed", "blocked"] | None:
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


def get_first_line_number_or_one(user_code: object) -> int:
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


def recognize_part(name: str, user_code: UserCode) -> str | None:
    """Return the part that the code implements, by its name and arguments, or None."""
    normalized = re.sub(r"[^a-z0-9]", "", name.lower())
    is_class = isinstance(user_code, type | nn.Module)
    part = next((part for part, pattern in PART_NAME_PATTERNS if re.search(pattern, normalized)), None)
    roles = set() if is_class else set(guess_argument_roles(user_code).values())
    if is_class:
        return _correct_class_part_by_signature(part, user_code)
    return _correct_function_part_by_signature(part, user_code, roles)


def _correct_class_part_by_signature(part_by_name: str | None, class_or_module: UserCode) -> str | None:
    cls = class_or_module if isinstance(class_or_module, type) else type(class_or_module)
    if part_by_name == "attention" or (part_by_name == "multi-head-attention"):
        forward = getattr(cls, "forward", cls.__call__)
        roles = set(guess_argument_roles(forward, num_skipped_arguments=1).values())
        takes_qkv = {"q", "k", "v"} <= roles and not _source_may_define_layers(cls)
        return "attention" if takes_qkv else "multi-head-attention"
    if part_by_name == "sinusoidal-positions" and "sin" not in get_source_or_empty(cls).replace("sinusoidal", ""):
        return None  # a learned table
    return part_by_name


def _source_may_define_layers(cls: type) -> bool:
    source = get_source_or_empty(cls)
    return not source or bool(re.search(r"Linear|Parameter|Conv|MultiheadAttention", source))


def _correct_function_part_by_signature(part_by_name: str | None, function: UserCode, role_set: set[str]) -> str | None:
    weights = [name for name in guess_argument_roles(function) if guess_weight_or_bias_role(name)]
    if part_by_name in ("attention", "multi-head-attention"):
        if {"q", "k", "v"} <= role_set and not weights and "heads" not in role_set:
            return "attention"
        if weights or "heads" in role_set:
            return "multi-head-attention"
        return "attention" if len(role_set) >= 3 else None
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if part_by_name == "causal-mask":
        return part_by_name if len(required) == 1 else None
    if part_by_name in ("transformer-block", "vit"):
        return None
    if part_by_name == "class-token":
        return part_by_name if len(required) >= 2 else None
    if part_by_name == "feed-forward":
        return part_by_name if len(required) >= 3 else None
    if part_by_name is None and {"q", "k", "v"} <= role_set and not weights and "heads" not in role_set:
        return "attention"
    if part_by_name is None and len(weights) >= 3 and {"x", "q"} & role_set:
        return "multi-head-attention"
    return part_by_name if required else None


def find_ellipsis_line_or_zero(user_code: UserCode) -> int:
    """Return the line number in the file of the first `...` in place of code; 0 if there is none."""
    code = type(user_code) if isinstance(user_code, nn.Module) else user_code
    try:
        tree = ast.parse(textwrap.dedent(get_source_or_empty(code)))
    except SyntaxError:
        return 0
    dots = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value is Ellipsis]
    indexed = [
        inner.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        for inner in ast.walk(node.slice)
        if isinstance(inner, ast.Constant) and inner.value is Ellipsis
    ]
    for line in indexed:
        dots.remove(line)
    return min(dots) + get_first_line_number_or_one(code) - 1 if dots else 0
