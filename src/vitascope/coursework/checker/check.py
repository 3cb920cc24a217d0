"""Check a user's function, class, module or file: recognise which part each one implements, and return reports."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vitascope.coursework.checker.argument_names import (
    get_first_line_number,
    get_source,
    guess_argument_roles,
    guess_weight_role,
)
from vitascope.coursework.checker.blocks import TransformerBlockChecker
from vitascope.coursework.checker.diagnose import run_checker
from vitascope.coursework.checker.dot_product import DotProductChecker
from vitascope.coursework.checker.embedding import ClassTokenChecker
from vitascope.coursework.checker.feed_forward import FeedForwardChecker
from vitascope.coursework.checker.functions import AttentionFunctionChecker
from vitascope.coursework.checker.heads import Attention2dChecker, AttentionModuleChecker
from vitascope.coursework.checker.masks import CausalMaskChecker
from vitascope.coursework.checker.part import PartChecker
from vitascope.coursework.checker.patches import PatchifyChecker
from vitascope.coursework.checker.positions import SinusoidalPositionsChecker
from vitascope.coursework.checker.report import NOTHING_RECOGNIZED, CheckReport
from vitascope.coursework.checker.vit import ViTChecker
from vitascope.errors import UserError, shorten_error_message, suggest_choice

CheckerFactory = Callable[[str, Any, str | None], PartChecker]

MODULE_CHECKERS: dict[str, CheckerFactory] = {
    "attention": DotProductChecker,
    "multi-head-attention": AttentionModuleChecker,
    "self-attention-2d": Attention2dChecker,
    "causal-mask": CausalMaskChecker,
    "patchify": PatchifyChecker,
    "sinusoidal-positions": SinusoidalPositionsChecker,
    "feed-forward": FeedForwardChecker,
    "transformer-block": TransformerBlockChecker,
    "class-token": ClassTokenChecker,
    "vit": ViTChecker,
}
FUNCTION_CHECKERS: dict[str, CheckerFactory] = MODULE_CHECKERS | {
    "multi-head-attention": AttentionFunctionChecker,
    "self-attention-2d": lambda name, thing, told: AttentionFunctionChecker(name, thing, told, "self-attention-2d"),
}
PARTS = list(MODULE_CHECKERS)
# The first that fits a name wins; a name is read without case and underscores.
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


def recognize_part(name: str, user_code: Any) -> str | None:
    """The part's name, or None where nothing fits."""
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    is_class = isinstance(user_code, type | nn.Module)
    part = next((part for part, pattern in PART_NAME_PATTERNS if re.search(pattern, word)), None)
    roles = set() if is_class else set(guess_argument_roles(user_code).values())
    if is_class:
        return _recognize_class_part(part, user_code)
    return _recognize_function_part(part, user_code, roles)


def _recognize_class_part(part_by_name: str | None, class_or_module: Any) -> str | None:
    kind = class_or_module if isinstance(class_or_module, type) else type(class_or_module)
    if part_by_name == "attention" or (part_by_name == "multi-head-attention"):
        roles = list(guess_argument_roles(kind.forward, num_skipped=1).values())
        given = {"q", "k", "v"} <= set(roles) and not _has_layers(kind)
        return "attention" if given else "multi-head-attention"
    if part_by_name == "sinusoidal-positions" and "sin" not in get_source(kind).replace("sinusoidal", ""):
        return None  # a learned table
    return part_by_name


def _has_layers(cls: type) -> bool:
    text = get_source(cls)
    return not text or bool(re.search(r"Linear|Parameter|Conv|MultiheadAttention", text))


def _recognize_function_part(part_by_name: str | None, function: Any, role_set: set[str]) -> str | None:
    weights = [name for name in guess_argument_roles(function) if guess_weight_role(name)]
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


def create_checker(name: str, user_code: Any, part: str | None = None, mask_polarity: str | None = None) -> PartChecker:
    """Return the subject to check; raise a UserError if the part is unknown."""
    if part is not None and part not in PARTS:
        raise UserError(f"There is no part {part}. {suggest_choice(part, PARTS)}")
    if not callable(user_code):
        raise UserError(f"{name} is not a function, class or module.")
    part = part or recognize_part(name, user_code)
    if part is None and isinstance(user_code, nn.Module):
        part = recognize_part(type(user_code).__name__, user_code)
    if part is None:
        raise UserError(
            f"{name} was not recognised. Give its part with --part (in Python: part=). Parts: {', '.join(PARTS)}."
        )
    makers = MODULE_CHECKERS if isinstance(user_code, type | nn.Module) else FUNCTION_CHECKERS
    return makers[part](name, user_code, mask_polarity)


def collect_definitions(module: ModuleType) -> dict[str, Any]:
    """Functions and classes that this file defines, in its order; modules that it made, too."""
    found = {}
    for name, thing in vars(module).items():
        own = getattr(thing, "__module__", None) == module.__name__
        is_module = isinstance(thing, type) and issubclass(thing, nn.Module)
        if not name.startswith("_") and own and (inspect.isfunction(thing) or is_module):
            found[name] = thing
    return found


def recognize_parts(module: ModuleType) -> tuple[dict[str, Any], list[str]]:
    """Return the functions and classes whose part is known, and the names of the others."""
    all_of_them = collect_definitions(module)
    known = {name: thing for name, thing in all_of_them.items() if recognize_part(name, thing)}
    return known, [name for name in all_of_them if name not in known]


def find_mask_polarity(definitions: dict[str, Any]) -> str | None:
    """What True means in the user's own causal mask: may, blocked, or None if there is no correct mask."""
    for name, thing in definitions.items():
        if recognize_part(name, thing) == "causal-mask" and not find_unfilled_line(thing):
            return CausalMaskChecker(name, thing).detect_mask_polarity()
    return None


def find_unfilled_line(user_code: Any) -> int:
    """The line in its file, counted from 1, of the first `...` that stands for code; 0 if there is none."""
    code = type(user_code) if isinstance(user_code, nn.Module) else user_code
    try:
        tree = ast.parse(textwrap.dedent(get_source(code)))
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
    return min(dots) + get_first_line_number(code) - 1 if dots else 0


def check(user_code: Callable[..., Any] | type | nn.Module, part: str | None = None) -> CheckReport:
    """Check a function, class or module against PyTorch and name its mistakes. For notebooks and scripts.

    `part` is the transformer part that it implements: attention, multi-head-attention, vit, …
    Default: the part is recognised by its name and arguments.
    """
    name = getattr(user_code, "__name__", None) or type(user_code).__name__
    return check_object(name, user_code, part)


def check_object(name: str, user_code: Any, part: str | None = None, mask_polarity: str | None = None) -> CheckReport:
    """Return one report. If the check cannot be prepared, the mistake is `unknown` and the report gives the reason."""
    if (line := find_unfilled_line(user_code)) and (known := part or recognize_part(name, user_code)):
        return _make_unfilled_report(name, known, line)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        return run_checker(create_checker(name, user_code, part, mask_polarity))
    except UserError:
        raise
    except Exception as error:  # the user's constructor may raise anything
        return _make_setup_error_report(name, part or recognize_part(name, user_code) or "unknown", error)
    finally:
        torch.set_num_threads(threads)


def _make_setup_error_report(name: str, part: str, error: Exception) -> CheckReport:
    words = f"{type(error).__name__}: {shorten_error_message(error, 200)}"
    hint = f"Create an instance yourself: layer = {name}(…). Then check FILE.py:layer, or call vitascope.check(layer)."
    return CheckReport(
        part,
        name,
        False,
        ["unknown"],
        [hint],
        {"check": "preparation", "index": None, "expected": None, "got": None, "error": words},
        evidence=[f"Preparing the check failed. {words}"],
        verdict="could not be checked",
    )


def _make_unfilled_report(name: str, part: str, line_number: int) -> CheckReport:
    return CheckReport(
        part,
        name,
        False,
        ["unknown"],
        ["Replace every ... with your own code. Then check again."],
        {"check": "source code", "index": None, "expected": "code", "got": "...", "error": "not filled in yet"},
        evidence=[f"Line {line_number} still contains ..."],
        verdict="not filled in yet",
    )


def select_objects_to_check(module: ModuleType, name: str | None, part: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return what to check in a file, and the names of what is left out: with `part`, only if nothing is checked."""
    if name is not None:
        if not hasattr(module, name):
            there = ", ".join(collect_definitions(module)) or "no function or class"
            raise UserError(f"It does not define {name}. It defines: {there}.")
        return {name: getattr(module, name)}, []
    known, others = recognize_parts(module)
    if part is not None:
        fitting = {name: thing for name, thing in known.items() if recognize_part(name, thing) == part}
        everything = collect_definitions(module)
        known = fitting or (everything if len(everything) == 1 else {})
        others = [] if known else list(everything)
    return known, others


def check_module_parts(
    module: ModuleType, name: str | None, part: str | None
) -> Iterator[str | CheckReport | list[str]]:
    """Yield the names that were not recognised, then for every part its name and its report."""
    things, others = select_objects_to_check(module, name, part)
    yield others
    if not things:
        raise UserError(f"{NOTHING_RECOGNIZED} It defines: {', '.join(others)}." if others else NOTHING_RECOGNIZED)
    own = recognize_parts(module)[0]
    yield next(
        (each for each, thing in own.items() if recognize_part(each, thing) == "causal-mask"), "Loading the file"
    )
    polarity = find_mask_polarity(own)
    for each, thing in things.items():
        yield each
        yield check_object(each, thing, part, polarity)
