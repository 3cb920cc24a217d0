"""Check a user's function, class, module or file, and return reports."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from vitascope.coursework.checker.attention_functions import AttentionFunctionChecker
from vitascope.coursework.checker.attention_modules import Attention2dChecker, AttentionModuleChecker
from vitascope.coursework.checker.blocks import TransformerBlockChecker
from vitascope.coursework.checker.diagnose import check_and_diagnose_part
from vitascope.coursework.checker.dot_product import DotProductChecker
from vitascope.coursework.checker.feed_forward import FeedForwardChecker
from vitascope.coursework.checker.image_embedding import ClassTokenChecker
from vitascope.coursework.checker.masks import CausalMaskChecker
from vitascope.coursework.checker.part_checker import MaskPolarity, PartChecker
from vitascope.coursework.checker.patches import PatchifyChecker
from vitascope.coursework.checker.positions import SinusoidalPositionsChecker
from vitascope.coursework.checker.recognition import UserCode, find_ellipsis_line_or_zero, recognize_part
from vitascope.coursework.checker.report import NOTHING_RECOGNIZED, CheckReport, FirstDifference
from vitascope.coursework.checker.vit import ViTChecker
from vitascope.errors import UserError, shorten_error_message, suggest_choice

CheckerFactory = Callable[[str, UserCode, MaskPolarity | None], PartChecker]

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
    "self-attention-2d": lambda name, user_code, mask_polarity: AttentionFunctionChecker(
        name, user_code, mask_polarity, "self-attention-2d"
    ),
}
PARTS = list(MODULE_CHECKERS)
MODULE_ONLY_PARTS = ("transformer-block", "vit")
Definitions = dict[str, UserCode]  # functions and classes of a file by name


class RecognizedParts(NamedTuple):
    """The functions and classes whose part is known, and the names of the others."""

    recognized: Definitions
    unrecognized_names: list[str]


@dataclass
class UnrecognizedNames:
    """Progress message: these functions and classes are not checked."""

    names: list[str]


@dataclass
class CheckStarted:
    """Progress message: the check of this function or class begins."""

    name: str


CheckProgress = UnrecognizedNames | CheckStarted | CheckReport


def create_checker(
    name: str, user_code: UserCode, part: str | None = None, mask_polarity: MaskPolarity | None = None
) -> PartChecker:
    """Create the checker of a part; raise a UserError if the part is unknown."""
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
    factories = MODULE_CHECKERS if isinstance(user_code, type | nn.Module) else FUNCTION_CHECKERS
    return factories[part](name, user_code, mask_polarity)


def collect_own_functions_and_modules(module: ModuleType) -> Definitions:
    """Return the functions and module classes that this file defines, in their order in the file."""
    definitions = {}
    for name, user_code in vars(module).items():
        is_defined_here = getattr(user_code, "__module__", None) == module.__name__
        is_module = isinstance(user_code, type) and issubclass(user_code, nn.Module)
        if not name.startswith("_") and is_defined_here and (inspect.isfunction(user_code) or is_module):
            definitions[name] = user_code
    return definitions


def recognize_definitions(module: ModuleType) -> RecognizedParts:
    """Recognise the part of every function and class of a file."""
    definitions = collect_own_functions_and_modules(module)
    recognized = {name: user_code for name, user_code in definitions.items() if recognize_part(name, user_code)}
    return RecognizedParts(recognized, [name for name in definitions if name not in recognized])


def detect_causal_mask_polarity(definitions: Definitions) -> MaskPolarity | None:
    """Return the meaning of True in the causal mask of the user's file, or None if there is no correct mask."""
    for name, user_code in definitions.items():
        if recognize_part(name, user_code) == "causal-mask" and not find_ellipsis_line_or_zero(user_code):
            return CausalMaskChecker(name, user_code).detect_mask_polarity()
    return None


def check(user_code: UserCode, part: str | None = None) -> CheckReport:
    """Check a function, class or module against PyTorch and name its mistakes. For notebooks and scripts.

    `part` is the transformer part that it implements: attention, multi-head-attention, vit, …
    Default: the part is recognised by its name and arguments.
    """
    name = getattr(user_code, "__name__", None) or type(user_code).__name__
    return check_object_or_report_error(name, user_code, part)


def check_object_or_report_error(
    name: str, user_code: UserCode, part: str | None = None, mask_polarity: MaskPolarity | None = None
) -> CheckReport:
    """Return one report. If the check cannot be prepared, the mistake is `unknown` and the report gives the reason."""
    if (line := find_ellipsis_line_or_zero(user_code)) and (recognized := part or recognize_part(name, user_code)):
        return _make_unfilled_report(name, recognized, line)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        return check_and_diagnose_part(create_checker(name, user_code, part, mask_polarity))
    except UserError:
        raise
    except Exception as error:  # the user's constructor may raise anything
        return _make_setup_error_report(name, user_code, part or recognize_part(name, user_code) or "unknown", error)
    finally:
        torch.set_num_threads(threads)


def _make_setup_error_report(name: str, user_code: UserCode, part: str, error: Exception) -> CheckReport:
    error_text = f"{type(error).__name__}: {shorten_error_message(error, 200)}"
    hint = f"Create an instance yourself: layer = {name}(…). Then check FILE.py:layer, or call vitascope.check(layer)."
    if part in MODULE_ONLY_PARTS and not isinstance(user_code, type | nn.Module):
        hint = f"{name} is a function; the part {part} needs a class or an nn.Module."
    return CheckReport(
        part,
        name,
        False,
        ["unknown"],
        [hint],
        FirstDifference(check="preparation", index=None, expected=None, got=None, error=error_text),
        evidence=[f"Preparing the check failed. {error_text}"],
        verdict="could not be checked",
    )


def _make_unfilled_report(name: str, part: str, line_number: int) -> CheckReport:
    return CheckReport(
        part,
        name,
        False,
        ["unknown"],
        ["Replace every `...` with your own code. Then check again."],
        FirstDifference(check="source code", index=None, expected="code", got="...", error="not filled in yet"),
        evidence=[f"Line {line_number} still contains `...`."],
        verdict="not filled in yet",
    )


def select_objects_to_check(module: ModuleType, name: str | None, part: str | None) -> RecognizedParts:
    """Select what to check in a file. With `part`, names are unrecognised only if nothing can be checked."""
    if name is not None:
        if not hasattr(module, name):
            names = ", ".join(collect_own_functions_and_modules(module)) or "no function or class"
            raise UserError(f"It does not define {name}. It defines: {names}.")
        return RecognizedParts({name: getattr(module, name)}, [])
    recognized, others = recognize_definitions(module)
    if part is not None:
        fitting = {name: user_code for name, user_code in recognized.items() if recognize_part(name, user_code) == part}
        definitions = collect_own_functions_and_modules(module)
        recognized = fitting or (definitions if len(definitions) == 1 else {})
        others = [] if recognized else list(definitions)
    return RecognizedParts(recognized, others)


def check_parts_yielding_progress_and_reports(
    module: ModuleType, name: str | None, part: str | None
) -> Iterator[CheckProgress]:
    """Yield the names that were not recognised, then for every part its name and its report."""
    selected, others = select_objects_to_check(module, name, part)
    yield UnrecognizedNames(others)
    if not selected:
        raise UserError(f"{NOTHING_RECOGNIZED} It defines: {', '.join(others)}." if others else NOTHING_RECOGNIZED)
    recognized = recognize_definitions(module).recognized
    masks = (name for name, user_code in recognized.items() if recognize_part(name, user_code) == "causal-mask")
    yield CheckStarted(next(masks, "Loading the file"))
    mask_polarity = detect_causal_mask_polarity(recognized)
    for object_name, user_code in selected.items():
        yield CheckStarted(object_name)
        yield check_object_or_report_error(object_name, user_code, part, mask_polarity)
