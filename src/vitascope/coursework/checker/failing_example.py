"""Find the first value that differs from the reference, and format a small failing example for the report."""

import math
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from vitascope.coursework.checker.comparison import (
    TOLERANCE,
    CachedRunner,
    Diagnosis,
    results_match_or_both_fail,
)
from vitascope.coursework.checker.masks import MASK_FORMATS
from vitascope.coursework.checker.part_checker import Case, make_allowed_mask_if_masked
from vitascope.coursework.checker.report import FirstDifference
from vitascope.errors import shorten_error_message

MAX_SHOWN_VALUES = 24  # number of tensor values that are shown


def find_first_difference(runner: CachedRunner, mistake_free: Diagnosis) -> FirstDifference | None:
    """Return the first difference in the first required case that fails, or None."""
    for case in runner.checker.list_cases():
        difference = find_first_difference_in_case(runner, mistake_free, case) if case.required else None
        if difference:
            return difference
    return None


def find_first_difference_in_case(runner: CachedRunner, mistake_free: Diagnosis, case: Case) -> FirstDifference | None:
    user_result, reference_result = (
        runner.get_or_run_user_code(mistake_free.convention, case),
        runner.try_reference_variant(mistake_free.convention, case, mistake_free.variant_options),
    )
    difference = FirstDifference(check=case.name, index=None, expected=None, got=None)
    if isinstance(reference_result, Exception):
        return None
    if isinstance(user_result, Exception):
        return {**difference, "error": f"{type(user_result).__name__}: {shorten_error_message(user_result, 200)}"}
    if user_result.shape != reference_result.shape:
        expected, got = f"shape {list(reference_result.shape)}", f"shape {list(user_result.shape)}"
        return {**difference, "expected": expected, "got": got}
    user_result, reference_result = (
        runner.checker.permute_output_to_user_axes(mistake_free.convention, case, result.double())
        for result in (user_result, reference_result)
    )
    wrong = ~torch.isclose(
        user_result, reference_result, rtol=0.0, atol=1e-5 * max(reference_result.abs().max().item(), 1e-3)
    )
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    return {
        **difference,
        "index": list(index),
        "expected": convert_to_json_number(reference_result[index]),
        "got": convert_to_json_number(user_result[index]),
    }


def convert_to_json_number(scalar: Tensor) -> float | str:
    """Return a finite number, or nan and inf as text, because JSON does not support them."""
    value = scalar.item()
    return value if math.isfinite(value) else str(value)


def find_and_format_smallest_failure(
    runner: CachedRunner, mistake_free: Diagnosis, diagnosis: Diagnosis | None = None
) -> list[str]:
    """Return the lines that show the smallest failing case: its inputs, the expected and the actual result."""
    for case in _list_failing_cases(runner, mistake_free, diagnosis)[:1]:
        checker, convention = runner.checker, mistake_free.convention
        user_result, reference_result = (
            runner.get_or_run_user_code(convention, case),
            runner.try_reference_variant(convention, case, mistake_free.variant_options),
        )
        if (
            isinstance(user_result, Tensor)
            and isinstance(reference_result, Tensor)
            and user_result.shape == reference_result.shape
        ):
            user_result, reference_result = (
                checker.permute_output_to_user_axes(convention, case, result)
                for result in (user_result, reference_result)
            )
        user_inputs = checker.reshape_inputs_for_user_code(convention, case, runner.get_or_make_inputs(case))
        lines = [case.name, *(f"{name} = {format_shortened_tensor(tensor)}" for name, tensor in user_inputs.items())]
        lines += _format_mask_and_attention_weights(runner, mistake_free, case)
        weights = checker.get_user_weights_by_name(case)
        if sum(weight.numel() for weight in weights.values()) <= 2 * MAX_SHOWN_VALUES:
            lines += [f"{name} = {format_shortened_tensor(weight)}" for name, weight in weights.items()]
        got = (
            format_shortened_tensor(user_result)
            if isinstance(user_result, Tensor)
            else f"raises {type(user_result).__name__}: {shorten_error_message(user_result)}"
        )
        return [
            *lines,
            f"expected {format_shortened_tensor(reference_result)}" if isinstance(reference_result, Tensor) else "",
            f"got      {got}",
        ]
    return []


def _format_mask_and_attention_weights(runner: CachedRunner, mistake_free: Diagnosis, case: Case) -> list[str]:
    """Return the mask that the code receives in this case, and the attention weights, which values v = I reveal."""
    convention, inputs = mistake_free.convention, runner.get_or_make_inputs(case)
    tokens = inputs["x"].shape[1] if "x" in inputs else case.sizes.get("columns", 0)
    num_queries, num_keys = (case.sizes.get(name, tokens) for name in ("queries", "keys"))
    allowed, mask_format = (
        make_allowed_mask_if_masked(case, num_queries, num_keys),
        convention.settings.get("mask_format"),
    )
    if allowed is None or mask_format is None:
        return []
    lines = [f"mask = {format_shortened_tensor(MASK_FORMATS[mask_format].convert(allowed, torch.float64))}"]
    if "v" not in inputs:
        return lines
    identity = torch.eye(num_keys, dtype=runner.checker.dtype).expand(*inputs["v"].shape[:-2], -1, -1)
    inputs = inputs | {"v": identity}
    with suppress(Exception):  # the user's code may accept only values of the queries' width
        expected = runner.checker.run_reference_variant(convention, case, inputs, mistake_free.variant_options)
        got = runner.checker.run_user_code_and_restore_axes(convention, case, inputs)
        lines.append(f"weights expected {format_shortened_tensor(expected)}")
        lines.append(f"weights got      {format_shortened_tensor(got)}")
    return lines


def _list_failing_cases(runner: CachedRunner, mistake_free: Diagnosis, diagnosis: Diagnosis | None) -> list[Case]:
    """Return the cases that fail, smallest first; if possible, only those in which every mistake has an effect."""
    by_size = sorted(runner.checker.list_cases(), key=lambda case: sum(case.sizes.values()))
    failing = [
        case
        for case in [*runner.checker.list_tiny_example_cases(), *by_size]
        if find_first_difference_in_case(runner, mistake_free, case)
    ]
    showing_all = [
        case for case in failing if diagnosis is not None and _case_shows_every_mistake(runner, diagnosis, case)
    ]
    return showing_all or failing


def _case_shows_every_mistake(runner: CachedRunner, diagnosis: Diagnosis, case: Case) -> bool:
    """Return whether the result changes if any one of the mistakes is corrected. Width 1 hides a missing scale."""
    wrong_result = runner.try_reference_variant(diagnosis.convention, case, diagnosis.options)
    for mistake in diagnosis.simulated_mistakes:
        others = tuple(other for other in diagnosis.simulated_mistakes if other is not mistake)
        options = replace(diagnosis, simulated_mistakes=others).options
        result = runner.try_reference_variant(diagnosis.convention, case, options)
        if results_match_or_both_fail(wrong_result, result, TOLERANCE[runner.checker.dtype]):
            return False
    return True


def format_shortened_tensor(tensor: Tensor) -> str:
    """Format a tensor as nested lists, fractions with four digits; a long tensor is shortened."""
    if tensor.numel() > MAX_SHOWN_VALUES:
        return f"{_format_nested_list(tensor.flatten()[:8])[:-1]}, …] of shape {list(tensor.shape)}"
    return _format_nested_list(tensor)


def _format_nested_list(tensor: Tensor) -> str:
    if tensor.ndim == 0:
        value = float(tensor.item())
        return f"{value:.6g}" if value.is_integer() else f"{value:.4g}"
    return "[" + ", ".join(_format_nested_list(part) for part in tensor) + "]"
