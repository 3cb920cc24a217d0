"""Recognise which part a user's function or class implements, by its name and arguments."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from vitascope.checking.blocks import TransformerBlock
from vitascope.checking.causal import CausalMask
from vitascope.checking.class_token import ClassToken
from vitascope.checking.dot_product import DotProduct
from vitascope.checking.feed_forward import FeedForward
from vitascope.checking.functions import AttentionFunction
from vitascope.checking.heads import AttentionModule, AttentionOverGrid
from vitascope.checking.naming import argument_roles, first_line_of, source_of, weight_role
from vitascope.checking.patches import Patchify
from vitascope.checking.positions import Sinusoidal
from vitascope.checking.subject import Subject
from vitascope.checking.whole import ViT
from vitascope.errors import UserError, did_you_mean

Maker = Callable[[str, Any, str | None], Subject]

MODULES: dict[str, Maker] = {
    "attention": DotProduct,
    "multi-head-attention": AttentionModule,
    "self-attention-2d": AttentionOverGrid,
    "causal-mask": CausalMask,
    "patchify": Patchify,
    "sinusoidal-positions": Sinusoidal,
    "feed-forward": FeedForward,
    "transformer-block": TransformerBlock,
    "class-token": ClassToken,
    "vit": ViT,
}
FUNCTIONS: dict[str, Maker] = MODULES | {
    "multi-head-attention": AttentionFunction,
    "self-attention-2d": lambda name, thing, told: AttentionFunction(name, thing, told, "self-attention-2d"),
}
PARTS = list(MODULES)
# The first that fits a name wins; a name is read without case and underscores.
PATTERNS = [
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


def part_of(name: str, thing: Any) -> str | None:
    """The part's name, or None where nothing fits."""
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    is_class = isinstance(thing, type | nn.Module)
    part = next((part for part, pattern in PATTERNS if re.search(pattern, word)), None)
    roles = set() if is_class else set(argument_roles(thing).values())
    if is_class:
        return _of_class(part, thing)
    return _of_function(part, thing, roles)


def _of_class(part: str | None, thing: Any) -> str | None:
    kind = thing if isinstance(thing, type) else type(thing)
    if part == "attention" or (part == "multi-head-attention"):
        roles = list(argument_roles(kind.forward, skip=1).values())
        given = {"q", "k", "v"} <= set(roles) and not _has_layers(kind)
        return "attention" if given else "multi-head-attention"
    if part == "sinusoidal-positions" and "sin" not in source_of(kind).replace("sinusoidal", ""):
        return None  # a learned table
    return part


def _has_layers(kind: type) -> bool:
    text = source_of(kind)
    return not text or bool(re.search(r"Linear|Parameter|Conv|MultiheadAttention", text))


def _of_function(part: str | None, thing: Any, roles: set[str]) -> str | None:
    weights = [name for name in argument_roles(thing) if weight_role(name)]
    if part in ("attention", "multi-head-attention"):
        if {"q", "k", "v"} <= roles and not weights and "heads" not in roles:
            return "attention"
        if weights or "heads" in roles:
            return "multi-head-attention"
        return "attention" if len(roles) >= 3 else None
    required = [p for p in inspect.signature(thing).parameters.values() if p.default is p.empty]
    if part == "causal-mask":
        return part if len(required) == 1 else None
    if part in ("transformer-block", "vit"):
        return None
    if part == "class-token":
        return part if len(required) >= 2 else None
    if part == "feed-forward":
        return part if len(required) >= 3 else None
    if part is None and {"q", "k", "v"} <= roles and not weights and "heads" not in roles:
        return "attention"
    if part is None and len(weights) >= 3 and {"x", "q"} & roles:
        return "multi-head-attention"
    return part if required else None


def subject_for(name: str, thing: Any, part: str | None = None, polarity: str | None = None) -> Subject:
    """Return the subject to check; raise a UserError if the part is unknown."""
    if part is not None and part not in PARTS:
        raise UserError(f"There is no part {part}. {did_you_mean(part, PARTS)}")
    if not callable(thing):
        raise UserError(f"{name} is not a function, class or module.")
    part = part or part_of(name, thing)
    if part is None and isinstance(thing, nn.Module):
        part = part_of(type(thing).__name__, thing)
    if part is None:
        raise UserError(
            f"{name} was not recognised. Give its part with --part (in Python: part=). Parts: {', '.join(PARTS)}."
        )
    makers = MODULES if isinstance(thing, type | nn.Module) else FUNCTIONS
    return makers[part](name, thing, polarity)


def candidates(module: ModuleType) -> dict[str, Any]:
    """Functions and classes that this file defines, in its order; modules that it made, too."""
    found = {}
    for name, thing in vars(module).items():
        own = getattr(thing, "__module__", None) == module.__name__
        is_module = isinstance(thing, type) and issubclass(thing, nn.Module)
        if not name.startswith("_") and own and (inspect.isfunction(thing) or is_module):
            found[name] = thing
    return found


def recognised(module: ModuleType) -> tuple[dict[str, Any], list[str]]:
    """Return the functions and classes whose part is known, and the names of the others."""
    all_of_them = candidates(module)
    known = {name: thing for name, thing in all_of_them.items() if part_of(name, thing)}
    return known, [name for name in all_of_them if name not in known]


def polarity_of(things: dict[str, Any]) -> str | None:
    """What True means in the user's own causal mask: may, blocked, or None if there is no correct mask."""
    for name, thing in things.items():
        if part_of(name, thing) == "causal-mask" and not still_open(thing):
            return CausalMask(name, thing).polarity()
    return None


def still_open(thing: Any) -> int:
    """The line in its file, counted from 1, of the first `...` that stands for code; 0 if there is none."""
    code = type(thing) if isinstance(thing, nn.Module) else thing
    try:
        tree = ast.parse(textwrap.dedent(source_of(code)))
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
    return min(dots) + first_line_of(code) - 1 if dots else 0
