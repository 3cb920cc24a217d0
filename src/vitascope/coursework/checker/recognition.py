"""Recognise which part a function or class implements, and whether its code is filled in."""

import ast
import inspect
import re
import textwrap

from torch import nn

from vitascope.coursework.checker.argument_names import (
    get_first_line_or_one,
    get_source_or_empty,
    guess_argument_roles,
    guess_weight_or_bias_role,
)
from vitascope.coursework.checker.part_checker import UserCode

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


def recognize_part(name: str, user_code: UserCode) -> str | None:
    """Return the part that the code implements, by its name and arguments, or None."""
    normalized = re.sub(r"[^a-z0-9]", "", name.lower())
    is_class = isinstance(user_code, type | nn.Module)
    part = next((part for part, pattern in PART_NAME_PATTERNS if re.search(pattern, normalized)), None)
    roles = set() if is_class else set(guess_argument_roles(user_code).values())
    if is_class:
        return _refine_class_part(part, user_code)
    return _refine_function_part(part, user_code, roles)


def _refine_class_part(part_by_name: str | None, class_or_module: UserCode) -> str | None:
    cls = class_or_module if isinstance(class_or_module, type) else type(class_or_module)
    if part_by_name == "attention" or (part_by_name == "multi-head-attention"):
        forward = getattr(cls, "forward", cls.__call__)
        roles = set(guess_argument_roles(forward, num_skipped=1).values())
        takes_qkv = {"q", "k", "v"} <= roles and not _source_may_define_layers(cls)
        return "attention" if takes_qkv else "multi-head-attention"
    if part_by_name == "sinusoidal-positions" and "sin" not in get_source_or_empty(cls).replace("sinusoidal", ""):
        return None  # a learned table
    return part_by_name


def _source_may_define_layers(cls: type) -> bool:
    source = get_source_or_empty(cls)
    return not source or bool(re.search(r"Linear|Parameter|Conv|MultiheadAttention", source))


def _refine_function_part(part_by_name: str | None, function: UserCode, role_set: set[str]) -> str | None:
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
    return min(dots) + get_first_line_or_one(code) - 1 if dots else 0
