"""Diagnose one part: find the mistakes that reproduce the user's results, show a small example, write the report."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitascope.coursework.checker.argument_names import get_source
from vitascope.coursework.checker.comparison import (
    TOLERANCE,
    CachedRunner,
    Diagnosis,
    has_random_output,
    is_same_result,
    run_all_checks,
    select_relevant_settings,
)
from vitascope.coursework.checker.mistakes import MISTAKES
from vitascope.coursework.checker.part import CallConvention, Case, NoDropoutMode, PartChecker
from vitascope.coursework.checker.reference import IGNORED_MASK, MASK_OPTION_NAMES, SimulatedMistake
from vitascope.coursework.checker.report import CheckReport, CheckRow
from vitascope.errors import shorten_error_message

if TYPE_CHECKING:
    from vitascope.coursework.checker.comparison import CachedRunner, Diagnosis
    from vitascope.coursework.checker.part import Case


RARE_VARIANT_OPTIONS = {
    "split",
    "norms_swapped",
    "mean_pool",
    "rare_bend",
}  # rare variants: tried last, and not in combination with two mistakes
MAX_SEARCH_SECONDS = 30.0  # seconds for the search among pairs of mistakes


def run_checker(checker: PartChecker) -> CheckReport:
    """Check one part and return its report."""
    bench, ways = find_working_conventions(checker)
    if not ways:
        return make_crash_report(checker, bench)
    cases = [case for case in checker.list_cases() if case.required]
    random = has_random_output(checker, ways[0], cases[0])
    finding = find_diagnosis(bench, ways, cases)
    report = CheckReport(checker.part, checker.name, passed=False)
    if random:
        report.mistakes.append("dropout-in-eval")
    if finding is None and not (random and has_random_output(checker, ways[0], cases[0], NoDropoutMode())):
        report.mistakes += checker.guess_mistake_ids(ways[0]) or ["unknown"]
    if finding is not None:
        report.mistakes += [
            switch.mistake_id for switch in finding.simulated_mistakes if switch.mistake_id not in report.mistakes
        ]
    way = finding.convention if finding else ways[0]
    right = (
        Diagnosis(way, finding.variant_options, finding.assumptions)
        if finding
        else Diagnosis(way, *checker.list_correct_variants(way)[0])
    )
    fill_report(report, bench, finding, right)
    if report.passed and bench.dropout_mode.called_fused_attention and "attention" in checker.part:
        report.notes.append("The code calls PyTorch's fused attention. Sheet E requires you to write out the steps.")
    return report


def fill_report(
    report: CheckReport, runner: CachedRunner, diagnosis: Diagnosis | None, mistake_free: Diagnosis
) -> None:
    """Fill in the table, the assumptions and, if there are mistakes, the hints and the example."""
    subject, way = runner.checker, mistake_free.convention
    report.table = run_all_checks(runner, mistake_free, "dropout-in-eval" in report.mistakes)
    needed = {case.name for case in subject.list_cases() if not case.required}
    failing = [row.check for row in report.table if row.passed is False and row.check not in needed]
    if not report.mistakes and failing:
        report.mistakes.append("unknown")
        report.evidence.append(f"The forward pass is correct, but these checks fail: {', '.join(failing)}.")
    report.passed = not report.mistakes
    report.assumptions = [*way.assumptions, *mistake_free.assumptions]
    report.hints = [MISTAKES[name].hint for name in report.mistakes]
    if report.passed:
        return
    if diagnosis is not None and IGNORED_MASK in diagnosis.simulated_mistakes:
        report.evidence.append("The mask has no effect on the output.")
    absent = [switch.mistake_id for switch in subject.find_missing_layers(way)] if diagnosis else []
    if absent:
        layer = absent[0].removeprefix("missing-").replace("-", " ")
        lacking = {"check": "layers", "index": None, "expected": layer, "got": "none"}
        report.table.insert(0, CheckRow("layers", False, " ".join(MISTAKES[name].description for name in absent)))
        report.first_difference = lacking
    else:
        report.first_difference = find_first_difference(runner, mistake_free)
        report.example = format_smallest_failing_example(runner, mistake_free)
    first = next(case for case in subject.list_cases() if case.required)
    theirs, ours = runner.run_user_code(way, first), runner.run_reference(way, first, mistake_free.variant_options)
    if diagnosis is None and isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        report.evidence += subject.describe_evidence(way, theirs, ours)


def find_working_conventions(checker: PartChecker) -> tuple[CachedRunner, list[CallConvention]]:
    """Return the first group of ways that runs; use float32 if float64 fails."""
    bench, later = CachedRunner(checker), None
    for dtype in (torch.float64, torch.float32):
        checker.dtype, bench = dtype, CachedRunner(checker)
        cases = [case for case in checker.list_cases() if case.required]
        for group in checker.list_convention_groups():
            running = [
                way for way in group if any(isinstance(bench.run_user_code(way, case), Tensor) for case in cases)
            ]
            shaped = [way for way in running if _has_expected_shape(bench, way, cases)]
            if shaped:
                return bench, shaped + [way for way in running if way not in shaped]
            later = later or ((bench, running) if running else None)
        if later:
            return later
    return bench, []


def _has_expected_shape(runner: CachedRunner, convention: CallConvention, cases: list[Case]) -> bool:
    for case in cases:
        theirs, ours = (
            runner.run_user_code(convention, case),
            runner.run_reference(convention, case, runner.checker.list_correct_variants(convention)[0][0]),
        )
        if isinstance(theirs, Tensor):
            return isinstance(ours, Tensor) and theirs.shape == ours.shape
    return False


def find_diagnosis(runner: CachedRunner, conventions: list[CallConvention], cases: list[Case]) -> Diagnosis | None:
    """Find the smallest set of mistakes that reproduces the user's results in every case, or None."""
    end = time.monotonic() + MAX_SEARCH_SECONDS
    readings = {way.assumptions: runner.checker.list_correct_variants(way) for way in conventions}
    forms = {way.assumptions: tuple(runner.checker.find_missing_layers(way)) for way in conventions}
    subject, tried = runner.checker, ((0, False), (0, True), (1, False), (2, False), (1, True))
    for count, rare in tried:
        choices = {
            w: [one for one in found if bool(RARE_VARIANT_OPTIONS & one[0].keys()) == rare]
            for w, found in readings.items()
        }
        known = subject.list_simulated_mistakes(conventions[0])
        for switches in _combine_mistakes(
            _limit_variants(known, subject.max_variants_per_mistake) if count == 2 else known, count
        ):
            if time.monotonic() > end:
                return None
            for way in conventions:
                for reading, words in choices[way.assumptions]:
                    finding = Diagnosis(way, reading, words, (*forms[way.assumptions], *switches))
                    if can_reproduce_results(runner, finding, cases):
                        return finding
    return None


def _limit_variants(
    simulated_mistakes: list[SimulatedMistake], max_variants_per_mistake: int | None
) -> list[SimulatedMistake]:
    """At most so many variants of every mistake."""
    seen: Counter[str] = Counter()
    kept = []
    for switch in simulated_mistakes:
        seen[switch.mistake_id] += 1
        if max_variants_per_mistake is None or seen[switch.mistake_id] <= max_variants_per_mistake:
            kept.append(switch)
    return kept


def _combine_mistakes(
    simulated_mistakes: list[SimulatedMistake], num_mistakes: int
) -> Iterator[tuple[SimulatedMistake, ...]]:
    for chosen in combinations(simulated_mistakes, num_mistakes):
        if num_mistakes < 2 or (
            chosen[0].mistake_id != chosen[1].mistake_id and not chosen[0].options.keys() & chosen[1].options.keys()
        ):
            yield chosen


def can_reproduce_results(runner: CachedRunner, diagnosis: Diagnosis, cases: list[Case]) -> bool:
    tolerance, options, compared = TOLERANCE[runner.checker.dtype], diagnosis.options, False
    for case in cases:
        theirs = runner.run_user_code(diagnosis.convention, case)
        unmasked = case.mask_kind is None and not options.get("causal")  # without a mask, mask mistakes have no effect
        told = frozenset((k, v) for k, v in options.items() if not (unmasked and k in MASK_OPTION_NAMES))
        key = (select_relevant_settings(diagnosis.convention, case), case.name, told)
        if key not in runner.agreement_cache:
            runner.agreement_cache[key] = is_same_result(
                theirs, runner.run_reference(diagnosis.convention, case, options), tolerance
            )
        if not runner.agreement_cache[key]:
            return False
        compared = compared or isinstance(theirs, Tensor)
    return compared


def make_crash_report(checker: PartChecker, runner: CachedRunner) -> CheckReport:
    """Report code that raised an error for every input."""
    case = next(case for case in checker.list_cases() if case.required)
    errors = [result for result in runner.user_results.values() if isinstance(result, Exception)]
    words = f"{type(errors[0]).__name__}: {shorten_error_message(errors[0], 200)}" if errors else "nothing"
    named = checker.guess_mistake_ids(None) or ["unknown"]
    nothing = "it returned NoneType" in words
    told = (
        "It returned None. Is a `return` statement missing?"
        if nothing
        else f"It raised an error for every input. {words}"
    )
    report = CheckReport(checker.part, checker.name, False, named, evidence=[told])
    if re.search(r"\b(np|numpy)\.", get_source(getattr(checker, "user_code", None))):
        report.evidence.append(
            "The code uses NumPy, but its inputs are PyTorch tensors. Use PyTorch functions instead."
        )
    report.verdict = "could not be checked" if named == ["unknown"] and not nothing else ""
    report.hints = [MISTAKES[name].hint for name in named if name != "unknown"] or [
        "Call the code yourself with small random tensors and print the shape after each step. If this works, "
        "the arguments were probably not recognised. In that case, use the argument names from docs/check.md."
    ]
    report.first_difference = {"check": case.name, "index": None, "expected": None, "got": None, "error": words}
    return report


MAX_SHOWN_VALUES = 24  # numbers of a tensor that are shown


def find_first_difference(runner: "CachedRunner", mistake_free: "Diagnosis") -> dict[str, Any] | None:
    """The first required case that fails, and in it the first number."""
    for case in runner.checker.list_cases():
        found = find_case_difference(runner, mistake_free, case) if case.required else None
        if found:
            return found
    return None


def find_case_difference(runner: "CachedRunner", mistake_free: "Diagnosis", case: "Case") -> dict[str, Any] | None:
    theirs, ours = (
        runner.run_user_code(mistake_free.convention, case),
        runner.run_reference(mistake_free.convention, case, mistake_free.variant_options),
    )
    found: dict[str, Any] = {"check": case.name, "index": None, "expected": None, "got": None}
    if isinstance(ours, Exception):
        return None
    if isinstance(theirs, Exception):
        return found | {"error": f"{type(theirs).__name__}: {shorten_error_message(theirs, 200)}"}
    if theirs.shape != ours.shape:
        return found | {"expected": f"shape {list(ours.shape)}", "got": f"shape {list(theirs.shape)}"}
    theirs, ours = (
        runner.checker.as_returned(mistake_free.convention, case, found.double()) for found in (theirs, ours)
    )
    wrong = ~torch.isclose(theirs, ours, rtol=0.0, atol=1e-5 * max(ours.abs().max().item(), 1e-3))
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    return found | {
        "index": list(index),
        "expected": convert_to_json_number(ours[index]),
        "got": convert_to_json_number(theirs[index]),
    }


def convert_to_json_number(scalar: Tensor) -> float | str:
    """Return a finite number, or nan and inf as text, because JSON does not support them."""
    value = scalar.item()
    return value if math.isfinite(value) else str(value)


def format_smallest_failing_example(runner: "CachedRunner", mistake_free: "Diagnosis") -> list[str]:
    """The smallest case that fails, with its input and both results."""
    whole = sorted(runner.checker.list_cases(), key=lambda case: sum(case.sizes.values()))
    for case in [*runner.checker.list_tiny_cases(), *whole]:
        if not find_case_difference(runner, mistake_free, case):
            continue
        subject, way = runner.checker, mistake_free.convention
        theirs, ours = runner.run_user_code(way, case), runner.run_reference(way, case, mistake_free.variant_options)
        if isinstance(theirs, Tensor) and isinstance(ours, Tensor) and theirs.shape == ours.shape:
            theirs, ours = (subject.as_returned(way, case, found) for found in (theirs, ours))
        passed = subject.as_passed(way, case, runner.get_inputs(case))
        lines = [case.name, *(f"{name} = {format_tensor(tensor)}" for name, tensor in passed.items())]
        weights = subject.get_example_weights(case)
        if sum(weight.numel() for weight in weights.values()) <= 2 * MAX_SHOWN_VALUES:
            lines += [f"{name} = {format_tensor(weight)}" for name, weight in weights.items()]
        got = (
            format_tensor(theirs)
            if isinstance(theirs, Tensor)
            else f"raises {type(theirs).__name__}: {shorten_error_message(theirs)}"
        )
        return [*lines, f"expected {format_tensor(ours)}" if isinstance(ours, Tensor) else "", f"got      {got}"]
    return []


def format_tensor(tensor: Tensor) -> str:
    """Format a tensor as nested lists, fractions with four digits; a long tensor is shortened."""
    if tensor.numel() > MAX_SHOWN_VALUES:
        return f"{_format_nested_list(tensor.flatten()[:8])[:-1]}, …] of shape {list(tensor.shape)}"
    return _format_nested_list(tensor)


def _format_nested_list(tensor: Tensor) -> str:
    if tensor.ndim == 0:
        value = float(tensor.item())
        return f"{value:.6g}" if value.is_integer() else f"{value:.4g}"
    return "[" + ", ".join(_format_nested_list(part) for part in tensor) + "]"
