"""Diagnose one part: find the mistakes that reproduce the user's results, and write the report."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from vitascope.coursework.checker.comparison import (
    TOLERANCE,
    CachedRunner,
    Diagnosis,
    check_cases_float32_gradient_and_modes,
    has_random_output,
    make_relevant_settings_key,
    results_match_or_both_fail,
)
from vitascope.coursework.checker.failing_example import (
    find_and_format_smallest_failure,
    find_first_difference,
)
from vitascope.coursework.checker.part_checker import CallConvention, Case, NoDropoutMode, PartChecker
from vitascope.coursework.checker.recognition import get_source_or_empty
from vitascope.coursework.checker.reference import IGNORED_MASK, MASK_OPTION_NAMES, SimulatedMistake
from vitascope.coursework.checker.report import (
    ADDITIVE_MASK_HINT,
    BOOLEAN_MASK_HINT,
    IGNORED_MASK_EVIDENCE,
    IGNORED_MASK_HINT,
    MISTAKES,
    CheckReport,
    CheckRow,
    FirstDifference,
)
from vitascope.errors import shorten_error_message

# Options of rare variants: tried last, and not in combination with two mistakes.
RARE_VARIANT_OPTIONS = {"split", "norms_swapped", "mean_pool", "rare_activation"}
MAX_SEARCH_SECONDS = 30.0  # seconds for the search among pairs of mistakes


class WorkingConventions(NamedTuple):
    """The conventions with which the user's code runs, and the runner that holds its results."""

    runner: CachedRunner
    conventions: list[CallConvention]


def check_and_diagnose_part(checker: PartChecker) -> CheckReport:
    """Check one part and return its report."""
    runner, conventions = find_working_conventions_and_set_dtype(checker)
    if not conventions:
        return make_report_of_always_failing_code(checker, runner)
    cases = [case for case in checker.list_cases() if case.required]
    is_random = has_random_output(checker, conventions[0], cases[0])
    diagnosis = find_simplest_diagnosis(runner, conventions, cases)
    report = CheckReport(checker.part, checker.name, passed=False)
    if is_random:
        report.mistakes.append("dropout-in-eval")
    if diagnosis is None and not (is_random and has_random_output(checker, conventions[0], cases[0], NoDropoutMode())):
        report.mistakes += checker.guess_mistake_ids_without_simulation(conventions[0]) or ["unknown"]
    if diagnosis is not None:
        report.mistakes += [
            mistake.mistake_id for mistake in diagnosis.simulated_mistakes if mistake.mistake_id not in report.mistakes
        ]
    run_checks_and_fill_report(
        report, runner, diagnosis, _make_mistake_free_diagnosis(checker, diagnosis, conventions[0])
    )
    if report.passed and runner.dropout_mode.called_fused_attention and "attention" in checker.part:
        report.notes.append("The code calls PyTorch's fused attention. Sheet E requires you to write out the steps.")
    return report


def _make_mistake_free_diagnosis(
    checker: PartChecker, diagnosis: Diagnosis | None, default_convention: CallConvention
) -> Diagnosis:
    """Return the diagnosis without its mistakes: what the user's code should compute."""
    if diagnosis is None:
        return Diagnosis(default_convention, *checker.list_correct_reference_variants(default_convention)[0])
    return Diagnosis(diagnosis.convention, diagnosis.variant_options, diagnosis.assumptions)


def _make_hint_for_mask_kind(mistake_id: str, mistake_free: Diagnosis) -> str:
    """Return the mistake's hint; for an inverted mask, add what the values of this kind of mask mean.

    Nothing is added if the code documents that True means masked out, or if it takes and returns no mask."""
    hint = MISTAKES[mistake_id].hint
    if mistake_id != "mask-inverted":
        return hint
    allowed, blocked = mistake_free.variant_options.get("values", (None, None))  # of the part causal-mask
    mask_format = mistake_free.convention.settings.get("mask_format")
    if mask_format == "add" or (blocked is not None and blocked < 0):
        return f"{hint} {ADDITIVE_MASK_HINT}"
    return f"{hint} {BOOLEAN_MASK_HINT}" if mask_format in ("allowed", "ones") or allowed == 1 else hint


def run_checks_and_fill_report(
    report: CheckReport, runner: CachedRunner, diagnosis: Diagnosis | None, mistake_free: Diagnosis
) -> None:
    """Fill in the table, the assumptions and, if there are mistakes, the hints and the example."""
    checker, convention = runner.checker, mistake_free.convention
    report.table = check_cases_float32_gradient_and_modes(runner, mistake_free, "dropout-in-eval" in report.mistakes)
    optional_checks = {case.name for case in checker.list_cases() if not case.required}
    failing = [row.check for row in report.table if row.passed is False and row.check not in optional_checks]
    if not report.mistakes and failing:
        report.mistakes.append("unknown")
        report.evidence.append(f"The forward pass is correct, but these checks fail: {', '.join(failing)}.")
    report.passed = not report.mistakes
    report.assumptions = [*convention.assumptions, *mistake_free.assumptions]
    report.hints = [_make_hint_for_mask_kind(name, mistake_free) for name in report.mistakes]
    if report.passed:
        return
    if diagnosis is not None and IGNORED_MASK in diagnosis.simulated_mistakes:
        report.evidence.append(IGNORED_MASK_EVIDENCE)
        report.hints = [IGNORED_MASK_HINT if hint == MISTAKES["unknown"].hint else hint for hint in report.hints]
    missing_ids = (
        [mistake.mistake_id for mistake in checker.find_missing_layer_mistakes(convention)] if diagnosis else []
    )
    if missing_ids:
        layer = missing_ids[0].removeprefix("missing-").replace("-", " ")
        report.table.insert(0, CheckRow("layers", False, " ".join(MISTAKES[name].description for name in missing_ids)))
        report.first_difference = FirstDifference(check="layers", index=None, expected=layer, got="none")
    else:
        report.first_difference = find_first_difference(runner, mistake_free)
        report.example = find_and_format_smallest_failure(runner, mistake_free, diagnosis)
    first = next(case for case in checker.list_cases() if case.required)
    user_result, reference_result = (
        runner.get_or_run_user_code(convention, first),
        runner.try_reference_variant(convention, first, mistake_free.variant_options),
    )
    if diagnosis is None and isinstance(user_result, Tensor) and isinstance(reference_result, Tensor):
        report.evidence += checker.describe_symptoms(convention, user_result, reference_result)


def find_working_conventions_and_set_dtype(checker: PartChecker) -> WorkingConventions:
    """Return the first group of conventions that runs; use float32 if float64 fails."""
    runner, fallback = CachedRunner(checker), None
    for dtype in (torch.float64, torch.float32):
        checker.dtype, runner = dtype, CachedRunner(checker)
        cases = [case for case in checker.list_cases() if case.required]
        for group in checker.list_convention_groups():
            running = [
                convention
                for convention in group
                if any(isinstance(runner.get_or_run_user_code(convention, case), Tensor) for case in cases)
            ]
            shaped = [
                convention for convention in running if _first_result_has_expected_shape(runner, convention, cases)
            ]
            if shaped:
                others = [convention for convention in running if convention not in shaped]
                return WorkingConventions(runner, shaped + others)
            fallback = fallback or (WorkingConventions(runner, running) if running else None)
        if fallback:
            return fallback
    return WorkingConventions(runner, [])


def _first_result_has_expected_shape(runner: CachedRunner, convention: CallConvention, cases: list[Case]) -> bool:
    for case in cases:
        user_result, reference_result = (
            runner.get_or_run_user_code(convention, case),
            runner.try_reference_variant(
                convention, case, runner.checker.list_correct_reference_variants(convention)[0].options
            ),
        )
        if isinstance(user_result, Tensor):
            return isinstance(reference_result, Tensor) and user_result.shape == reference_result.shape
    return False


def find_simplest_diagnosis(
    runner: CachedRunner, conventions: list[CallConvention], cases: list[Case]
) -> Diagnosis | None:
    """Find the smallest set of mistakes that reproduces the user's results in every case, or None."""
    checker, deadline = runner.checker, time.monotonic() + MAX_SEARCH_SECONDS
    variants = {
        convention.assumptions: checker.list_correct_reference_variants(convention) for convention in conventions
    }
    missing = {convention.assumptions: checker.find_missing_layer_mistakes(convention) for convention in conventions}
    simulated_mistakes = checker.list_mistakes_to_simulate(conventions[0])
    limited_mistakes = _limit_variants_per_mistake(simulated_mistakes, checker.max_variants_per_mistake)
    for num_mistakes, is_rare in ((0, False), (0, True), (1, False), (2, False), (1, True)):
        candidates = limited_mistakes if num_mistakes == 2 else simulated_mistakes
        chosen_variants = {
            key: [variant for variant in listed if bool(RARE_VARIANT_OPTIONS & variant.options.keys()) == is_rare]
            for key, listed in variants.items()
        }
        for mistakes in _iterate_compatible_mistake_sets(candidates, num_mistakes):
            if time.monotonic() > deadline:
                return None
            for convention in conventions:
                for options, assumptions in chosen_variants[convention.assumptions]:
                    all_mistakes = (*missing[convention.assumptions], *mistakes)
                    diagnosis = Diagnosis(convention, options, assumptions, all_mistakes)
                    if diagnosis_reproduces_user_results(runner, diagnosis, cases):
                        return diagnosis
    return None


def _limit_variants_per_mistake(
    simulated_mistakes: list[SimulatedMistake], max_variants_per_mistake: int | None
) -> list[SimulatedMistake]:
    """Return at most `max_variants_per_mistake` variants of every mistake."""
    num_variants: Counter[str] = Counter()
    selected = []
    for mistake in simulated_mistakes:
        num_variants[mistake.mistake_id] += 1
        if max_variants_per_mistake is None or num_variants[mistake.mistake_id] <= max_variants_per_mistake:
            selected.append(mistake)
    return selected


def _iterate_compatible_mistake_sets(
    simulated_mistakes: list[SimulatedMistake], num_mistakes: int
) -> Iterator[tuple[SimulatedMistake, ...]]:
    for combination in combinations(simulated_mistakes, num_mistakes):
        if num_mistakes < 2 or (
            combination[0].mistake_id != combination[1].mistake_id
            and not combination[0].options.keys() & combination[1].options.keys()
        ):
            yield combination


def diagnosis_reproduces_user_results(runner: CachedRunner, diagnosis: Diagnosis, cases: list[Case]) -> bool:
    """Return whether the reference with the diagnosed mistakes gives the user's results in every case."""
    tolerance, options, compared = TOLERANCE[runner.checker.dtype], diagnosis.options, False
    for case in cases:
        user_result = runner.get_or_run_user_code(diagnosis.convention, case)
        unmasked = case.mask_kind is None and not options.get("causal")  # without a mask, mask mistakes have no effect
        relevant_options = frozenset((k, v) for k, v in options.items() if not (unmasked and k in MASK_OPTION_NAMES))
        key = (make_relevant_settings_key(diagnosis.convention, case), case.name, relevant_options)
        if key not in runner.agreement_cache:
            runner.agreement_cache[key] = results_match_or_both_fail(
                user_result, runner.try_reference_variant(diagnosis.convention, case, options), tolerance
            )
        if not runner.agreement_cache[key]:
            return False
        compared = compared or isinstance(user_result, Tensor)
    return compared


def make_report_of_always_failing_code(checker: PartChecker, runner: CachedRunner) -> CheckReport:
    """Report code that raised an error for every input."""
    case = next(case for case in checker.list_cases() if case.required)
    errors = [result for result in runner.user_results.values() if isinstance(result, Exception)]
    error_text = f"{type(errors[0]).__name__}: {shorten_error_message(errors[0], 200)}" if errors else "nothing"
    mistake_ids = checker.guess_mistake_ids_without_simulation(None) or ["unknown"]
    returned_none = "it returned NoneType" in error_text
    explanation = (
        "It returned None. Is a `return` statement missing?"
        if returned_none
        else f"It raised an error for every input. {error_text}"
    )
    report = CheckReport(checker.part, checker.name, False, mistake_ids, evidence=[explanation])
    if re.search(r"\b(np|numpy)\.", get_source_or_empty(getattr(checker, "user_code", None))):
        report.evidence.append(
            "The code uses NumPy, but its inputs are PyTorch tensors. Use PyTorch functions instead."
        )
    report.verdict = "could not be checked" if mistake_ids == ["unknown"] and not returned_none else ""
    report.hints = [MISTAKES[name].hint for name in mistake_ids if name != "unknown"] or [
        "Call the code yourself with small random tensors and print the shape after each step. If this works, "
        "the arguments were probably not recognised. In that case, use the argument names from docs/check.md."
    ]
    report.first_difference = FirstDifference(check=case.name, index=None, expected=None, got=None, error=error_text)
    return report
