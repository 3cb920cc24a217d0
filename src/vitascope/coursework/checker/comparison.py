"""Compare the user's code with the reference: every case, float32, the gradient, eval and train mode."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitascope.coursework.checker.part_checker import (
    CallConvention,
    Case,
    NoDropoutMode,
    PartChecker,
    ReferenceInputs,
)
from vitascope.coursework.checker.reference import ReferenceVariant, SimulatedMistake
from vitascope.coursework.checker.report import CheckRow
from vitascope.errors import shorten_error_message

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4}  # relative to the largest value


TensorOrError = Tensor | Exception  # the output, or what the code raised
SettingsKey = tuple[tuple[str, Any], ...]
CacheKey = tuple[Any, ...]  # settings, name of the case, and optionally reference options


@dataclass
class Diagnosis:
    """The call convention, the variant and the mistakes that reproduce the user's results."""

    convention: CallConvention
    variant_options: ReferenceVariant
    assumptions: tuple[str, ...]
    simulated_mistakes: tuple[SimulatedMistake, ...] = ()

    @property
    def options(self) -> ReferenceVariant:
        return dict(self.variant_options) | {
            k: v for mistake in self.simulated_mistakes for k, v in mistake.options.items()
        }


@dataclass
class CachedRunner:
    """Run the user's code and the reference; keep the user's results."""

    checker: PartChecker
    user_results: dict[CacheKey, TensorOrError] = field(default_factory=dict)
    inputs_by_case: dict[str, ReferenceInputs] = field(default_factory=dict)
    agreement_cache: dict[CacheKey, bool] = field(default_factory=dict)
    dropout_mode: NoDropoutMode = field(default_factory=NoDropoutMode)

    def get_or_make_inputs(self, case: Case) -> ReferenceInputs:
        if case.name not in self.inputs_by_case:
            self.inputs_by_case[case.name] = {
                k: v.to(self.checker.dtype) for k, v in self.checker.make_float64_inputs(case).items()
            }
        return self.inputs_by_case[case.name]

    def get_or_run_user_code(self, convention: CallConvention, case: Case) -> TensorOrError:
        key = (make_relevant_settings_key(convention, case), case.name)
        if key not in self.user_results:
            self.user_results[key] = try_user_code(
                self.checker, convention, case, self.get_or_make_inputs(case), self.dropout_mode
            )
        return self.user_results[key]

    def try_reference_variant(
        self, convention: CallConvention, case: Case, variant_or_mistakes: ReferenceVariant
    ) -> TensorOrError:
        try:
            with torch.no_grad():
                return self.checker.run_reference_variant(
                    convention, case, self.get_or_make_inputs(case), variant_or_mistakes
                )
        except (RuntimeError, ValueError, IndexError) as error:
            return error


def make_relevant_settings_key(convention: CallConvention, case: Case) -> SettingsKey:
    """Return the settings that matter in a case: without a mask, the mask format does not."""
    return tuple(
        (name, value)
        for name, value in convention.settings.items()
        if case.mask_kind is not None or name != "mask_format"
    )


def try_user_code(
    checker: PartChecker,
    convention: CallConvention,
    case: Case,
    inputs: ReferenceInputs,
    dropout_mode: NoDropoutMode | None,
) -> TensorOrError:
    """Run the user's code on copies of the inputs; return the result or the exception."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            copies = {name: tensor.clone() for name, tensor in inputs.items()}
            if dropout_mode is None:
                return checker.run_user_code_and_restore_axes(convention, case, copies)
            with dropout_mode:
                return checker.run_user_code_and_restore_axes(convention, case, copies)
    except (Exception, SystemExit) as error:
        return error if isinstance(error, Exception) else RuntimeError(f"the code exited the program: {error!r}")


def results_match_or_both_fail(user_result: TensorOrError, reference_result: TensorOrError, tolerance: float) -> bool:
    """Return whether all values are close; two exceptions count as the same result."""
    if isinstance(user_result, Exception) or isinstance(reference_result, Exception):
        return isinstance(user_result, Exception) and isinstance(reference_result, Exception)
    if user_result.shape != reference_result.shape:
        return False
    user_result, reference_result = user_result.double(), reference_result.double()
    size = reference_result.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if reference_result.numel() else 0.0
    return torch.allclose(user_result, reference_result, rtol=0.0, atol=tolerance * max(size, 1e-3), equal_nan=True)


def has_random_output(
    checker: PartChecker, convention: CallConvention, case: Case, dropout_mode: NoDropoutMode | None = None
) -> bool:
    """Return whether repeated calls in eval mode give different results for the same input."""
    inputs = {name: tensor.to(checker.dtype) for name, tensor in checker.make_float64_inputs(case).items()}
    results = [try_user_code(checker, convention, case, inputs, dropout_mode) for _ in range(3)]
    return not all(results_match_or_both_fail(results[0], other, 1e-9) for other in results[1:])


SKIPPED_NOTE = "not checked, because the forward pass is wrong"
NUM_TRAIN_MODE_DRAWS = 40  # repetitions in train mode


def check_cases_float32_gradient_and_modes(
    runner: CachedRunner, mistake_free: Diagnosis, is_random_in_eval_mode: bool
) -> list[CheckRow]:
    """Check every case, float32, the gradient, eval and train mode."""
    checker, convention = runner.checker, mistake_free.convention
    rows = []
    for case in checker.list_cases():
        user_result = runner.get_or_run_user_code(convention, case)
        is_correct = isinstance(user_result, Tensor) and results_match_or_both_fail(
            user_result,
            runner.try_reference_variant(convention, case, mistake_free.variant_options),
            TOLERANCE[checker.dtype],
        )
        note = (
            ""
            if isinstance(user_result, Tensor)
            else f"raises {type(user_result).__name__}: {shorten_error_message(user_result, 70)}"
        )
        optional = "" if case.required else "(optional)" if is_correct else "(optional, does not count)"
        rows.append(CheckRow(case.name, is_correct, f"{note} {optional}".strip()))
    rows.append(
        CheckRow(
            f"{str(checker.dtype).removeprefix('torch.')}, compared with {checker.get_reference_name()}", rows[0].passed
        )
    )
    if checker.dtype == torch.float64:
        rows.append(_check_float32(checker, mistake_free))
    rows.append(_check_gradient(checker, mistake_free, rows[0].passed is True))
    rows.append(CheckRow("eval mode: same result on every call", not is_random_in_eval_mode))
    rows.append(_check_train_mode(checker, mistake_free, rows[0].passed is True))
    return [row for row in rows if row.check]


def _check_float32(checker: PartChecker, mistake_free: Diagnosis) -> CheckRow:
    case = next(case for case in checker.list_cases() if case.required)
    checker.dtype = torch.float32
    try:
        runner = CachedRunner(checker)
        user_result = runner.get_or_run_user_code(mistake_free.convention, case)
        is_correct = isinstance(user_result, Tensor) and results_match_or_both_fail(
            user_result,
            runner.try_reference_variant(mistake_free.convention, case, mistake_free.variant_options),
            TOLERANCE[torch.float32],
        )
        note = f"raises {shorten_error_message(user_result, 70)}" if isinstance(user_result, Exception) else ""
        return CheckRow("float32", is_correct, note)
    finally:
        checker.dtype = torch.float64


def _check_train_mode(checker: PartChecker, mistake_free: Diagnosis, is_forward_correct: bool) -> CheckRow:
    case = next(case for case in checker.list_cases() if case.required)
    checker.training = True
    try:
        if not is_forward_correct:
            return CheckRow("train mode", None, SKIPPED_NOTE)
        reference_result = CachedRunner(checker).try_reference_variant(
            mistake_free.convention, case, mistake_free.variant_options
        )
        user_results = [
            CachedRunner(checker).get_or_run_user_code(mistake_free.convention, case)
            for _ in range(NUM_TRAIN_MODE_DRAWS)
        ]
        if any(
            results_match_or_both_fail(user_result, reference_result, TOLERANCE[checker.dtype])
            for user_result in user_results
        ):
            return CheckRow("train mode, dropout disabled", True)
        is_random = not all(  # e.g. stochastic depth
            results_match_or_both_fail(user_results[0], other, 1e-9) for other in user_results[1:]
        )
        return (
            CheckRow("train mode", None, "not compared, because the result is random")
            if is_random
            else CheckRow("train mode", False)
        )
    finally:
        checker.training = False


def _check_gradient(checker: PartChecker, mistake_free: Diagnosis, is_forward_correct: bool) -> CheckRow:
    """Compare the gradients of a weighted sum of the outputs with respect to the inputs and the weights."""
    case = next(case for case in checker.list_cases() if case.required)
    leaves = {
        name: tensor.to(checker.dtype).requires_grad_() for name, tensor in checker.make_float64_inputs(case).items()
    }
    leaves = {name: tensor for name, tensor in leaves.items() if tensor.is_floating_point()}
    if not is_forward_correct or not leaves:
        return CheckRow("gradient", None, SKIPPED_NOTE) if leaves else CheckRow("", None)
    weights = [p for p in checker.get_user_parameters(mistake_free.convention, case) if p.requires_grad]
    with warnings.catch_warnings(), NoDropoutMode(), torch.enable_grad():
        warnings.simplefilter("ignore")
        outputs = [
            checker.run_user_code_and_restore_axes(mistake_free.convention, case, leaves),
            checker.run_reference_variant(mistake_free.convention, case, leaves, mistake_free.variant_options),
        ]
        sums = [(out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum() for out in outputs]
    if not sums[0].requires_grad:
        return CheckRow("gradient", False, "There is no gradient. Does the code use detach(), .data or no_grad?")
    tensors = [*leaves.values(), *weights]
    user_gradients, reference_gradients = (torch.autograd.grad(total, tensors, allow_unused=True) for total in sums)
    zero = torch.zeros((), dtype=checker.dtype)
    agreements = [
        results_match_or_both_fail(
            zero.expand_as(leaf) if user_gradient is None else user_gradient,
            zero.expand_as(leaf) if reference_gradient is None else reference_gradient,
            10 * TOLERANCE[checker.dtype],
        )
        for user_gradient, reference_gradient, leaf in zip(user_gradients, reference_gradients, tensors, strict=True)
    ]
    return CheckRow(
        "gradient", all(agreements), "" if all(agreements) else "Does the code use detach(), .data or no_grad?"
    )
