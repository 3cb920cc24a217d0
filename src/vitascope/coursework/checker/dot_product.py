"""Check the part `attention`: f(q, k, v[, mask]), compared with F.scaled_dot_product_attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.coursework.checker.masks import MASK_FORMATS, list_expanded_masks, list_plausible_mask_formats
from vitascope.coursework.checker.part_checker import (
    LARGE_MASKED_SCORES,
    CallConvention,
    Case,
    MaskKind,
    MaskPolarity,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
    UserInputs,
    choose_mask_kind_if_required,
    draw_seeded_inputs_for_case,
    format_observation,
    make_allowed_mask_if_masked,
)
from vitascope.coursework.checker.recognition import (
    ArgumentRoles,
    UserCode,
    call_by_roles,
    guess_argument_roles,
    normalize_identifier,
)
from vitascope.coursework.checker.reference import (
    ATTENTION_MAP_MISTAKES,
    MASK_FILL_MISTAKES,
    MASK_MISTAKES,
    SCALE_MISTAKES,
    ReferenceVariant,
    SimulatedMistake,
    attend_with_simulated_mistakes,
)

AXIS_ORDERS = {
    "rows": "q, k and v have shape batch × token × feature",
    "heads": "q, k and v have shape batch × head × token × feature",
    "heads-last": "q, k and v have shape batch × token × head × feature",
    "columns": "q, k and v have shape batch × feature × token",
    "flat": "q, k and v have shape token × feature",
    "flat-columns": "q, k and v have shape feature × token",
}
AXIS_ORDER_GROUPS = [["rows", "columns"], ["heads", "heads-last"], ["flat", "flat-columns"]]
# The reference has token × feature as the last two axes; these permutations give the user's order.
AXIS_PERMUTATIONS = {"columns": (0, 2, 1), "flat-columns": (1, 0), "heads-last": (0, 2, 1, 3)}


class DotProductChecker(PartChecker):
    """Check a function, or a module without weights."""

    part = "attention"

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name = name
        self.user_code: Callable[..., Any] = self._instantiate_if_class(user_code)
        function = self.user_code.forward if isinstance(self.user_code, nn.Module) else self.user_code
        self.user_function = function
        self.argument_roles = fill_missing_qkv_roles(guess_argument_roles(function))
        masks = [argument for argument, role in self.argument_roles.items() if role == "mask"]
        self.mask_formats = list_plausible_mask_formats(masks[0], user_code, mask_polarity) if masks else []
        self.default_mask_kind: MaskKind | None = choose_mask_kind_if_required(function, self.argument_roles)
        self.is_causal = not masks and "causal" in name.lower()

    @staticmethod
    def _instantiate_if_class(user_code: UserCode) -> UserCode:
        if not isinstance(user_code, type):
            return user_code
        from vitascope.coursework.checker.module_factory import build_instance_with_sizes

        return build_instance_with_sizes(
            user_code, {"temperature": 2.0, "width": 4, "dropout": 0.1, "key_width": 4, "heads": 1}
        )

    def get_reference_name(self) -> str:
        return "F.scaled_dot_product_attention"

    def list_cases(self) -> list[Case]:
        sizes = {"batch": 2, "heads": 3, "queries": 5, "keys": 5, "width": 4, "value": 4}
        fixed_width = self._find_fixed_width()
        mask_kind: MaskKind | None = "causal" if self.is_causal else self.default_mask_kind
        cases = [
            Case("five tokens", sizes, mask_kind),
            Case(
                "other sizes",
                sizes | {"batch": 3, "heads": 2, "queries": 7, "keys": 7, "width": 9, "value": 9},
                mask_kind,
            ),
            Case("one token", sizes | {"queries": 1, "keys": 1}, mask_kind),
            Case("more keys than queries", sizes | {"keys": 6}, self.default_mask_kind, False),
            Case("values with a different width", sizes | {"value": 3}, mask_kind, False),
        ]
        if self.mask_formats:
            cases += [Case("mask", sizes, "random"), Case(LARGE_MASKED_SCORES, sizes, "high_scores")]
        return [case for case in cases if fixed_width is None or case.sizes["width"] == fixed_width]

    def list_tiny_example_cases(self) -> list[Case]:
        mask_kind: MaskKind | None = "causal" if self.is_causal else self.default_mask_kind
        plain = [
            Case(
                f"{t} {'token' if t == 1 else 'tokens'} of width {d}", self._make_tiny_sizes(t, d), mask_kind, tiny=True
            )
            for t in (1, 2, 3)
            for d in (1, 2)
        ]
        masked = [Case(f"{t} tokens, causal", self._make_tiny_sizes(t, 1), "causal", tiny=True) for t in (2, 3)]
        fixed_width = self._find_fixed_width()
        return [case for case in [*plain, *(masked if self.mask_formats else [])] if fixed_width in (None, 1)]

    def _make_tiny_sizes(self, num_tokens: int, width: int) -> dict[str, int]:
        return {"batch": 1, "heads": 1, "queries": num_tokens, "keys": num_tokens, "width": width, "value": width}

    def _find_fixed_width(self) -> int | None:
        """Return the width of a module that stores a width or a temperature; None if any width works."""
        return (
            4
            if isinstance(self.user_code, nn.Module)
            and any(normalize_identifier(k) for k in vars(self.user_code) if k[0] != "_" and k != "training")
            else None
        )

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        s = case.sizes
        batch, heads = s["batch"], s["heads"]
        shapes = {
            "q": (batch, heads, s["queries"], s["width"]),
            "k": (batch, heads, s["keys"], s["width"]),
            "v": (batch, heads, s["keys"], s["value"]),
        }
        inputs = draw_seeded_inputs_for_case(case, shapes)
        if case.mask_kind == "high_scores":  # masked keys with scores far above all others
            inputs["q"], inputs["k"] = inputs["q"].abs() + 0.5, inputs["k"] * 0.1
            inputs["k"][..., -1, :] = 400.0
        return inputs

    def list_convention_groups(self) -> list[list[CallConvention]]:
        mask_formats = self.mask_formats or [None]
        return [
            [self._make_convention(axis_order, mask_format) for mask_format in mask_formats for axis_order in group]
            for group in AXIS_ORDER_GROUPS
        ]

    def _make_convention(self, axis_order: str, mask_format: str | None) -> CallConvention:
        assumptions = (
            (AXIS_ORDERS[axis_order],)
            if mask_format is None
            else (AXIS_ORDERS[axis_order], MASK_FORMATS[mask_format].description)
        )
        return CallConvention(assumptions, {"axis_order": axis_order, "mask_format": mask_format})

    def reshape_inputs_for_user_code(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> UserInputs:
        axis_order = convention.settings["axis_order"]
        return {
            name: swap_reference_and_user_axes(self._drop_axes_without_batch_or_heads(axis_order, tensor), axis_order)
            for name, tensor in inputs.items()
        }

    def permute_output_to_user_axes(self, convention: CallConvention, case: Case, result: Tensor) -> Tensor:
        return swap_reference_and_user_axes(result, convention.settings["axis_order"])

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        axis_order, user_inputs = (
            convention.settings["axis_order"],
            self.reshape_inputs_for_user_code(convention, case, inputs),
        )
        extra = {"dropout": 0.0, "training": False, "dk": case.sizes["width"], "width": case.sizes["width"]}
        allowed = make_allowed_mask_if_masked(case, case.sizes["queries"], case.sizes["keys"])
        if isinstance(self.user_code, nn.Module):
            self.user_code.train(self.training)
        expected_shape = (
            *self._drop_axes_without_batch_or_heads(axis_order, inputs["q"]).shape[:-1],
            case.sizes["value"],
        )
        if allowed is None or self.is_causal:
            return swap_reference_and_user_axes(
                select_matching_or_first_tensor(self._call_user_code(user_inputs | extra), expected_shape), axis_order
            )
        mask = MASK_FORMATS[convention.settings["mask_format"]].convert(allowed, self.dtype)
        error: Exception | None = None
        for candidate in list_expanded_masks(mask, expected_shape[:-2]):
            try:
                return swap_reference_and_user_axes(
                    select_matching_or_first_tensor(
                        self._call_user_code({**user_inputs, **extra, "mask": candidate}), expected_shape
                    ),
                    axis_order,
                )
            except (RuntimeError, ValueError, IndexError, AssertionError) as raised:
                error = error or raised
        raise error or RuntimeError("no mask shape was accepted")

    def _call_user_code(self, values_by_role: dict[str, Any]) -> Any:
        function = self.user_code if isinstance(self.user_code, nn.Module) else self.user_function
        if function is self.user_function:
            return call_by_roles(function, values_by_role, self.argument_roles)
        named = {a: values_by_role[r] for a, r in self.argument_roles.items() if r in values_by_role}
        return function(**named)

    def _drop_axes_without_batch_or_heads(self, axis_order: str, tensor: Tensor) -> Tensor:
        """Drop the head axis, and the batch axis, where the user's code does not have them."""
        tensor = tensor if axis_order.startswith("heads") else tensor[:, 0]
        return tensor[0] if axis_order.startswith("flat") else tensor

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        axis_order = convention.settings["axis_order"]
        q, k, v = (self._drop_axes_without_batch_or_heads(axis_order, inputs[name]) for name in "qkv")
        return attend_with_simulated_mistakes(
            q, k, v, make_allowed_mask_if_masked(case, case.sizes["queries"], case.sizes["keys"]), variant_or_mistakes
        )

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        heads = (
            [SimulatedMistake("softmax-over-heads", {"softmax": -3})]
            if convention.settings["axis_order"].startswith("heads")
            else []
        )
        masks = [*MASK_MISTAKES, *MASK_FILL_MISTAKES] if self.mask_formats or self.is_causal else []
        scales = (
            SCALE_MISTAKES
            if heads
            else [mistake for mistake in SCALE_MISTAKES if mistake.mistake_id != "scale-by-width"]
        )
        return [*masks[:1], *scales, *ATTENTION_MAP_MISTAKES, *heads, *masks[1:]]  # an ignored mask is tested first

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        return describe_attention_mistake_symptoms(self, convention, user_result, reference_result)


def fill_missing_qkv_roles(argument_roles: ArgumentRoles) -> ArgumentRoles:
    """Take the first three arguments as q, k and v where their names do not match."""
    if {"q", "k", "v"} <= set(argument_roles.values()):
        return argument_roles
    free = [
        name
        for name, role in argument_roles.items()
        if role not in ("q", "k", "v", "mask", "dropout", "training", "heads")
    ]
    missing = [letter for letter in "qkv" if letter not in argument_roles.values()]
    return argument_roles | dict(zip(free, missing, strict=False))


def swap_reference_and_user_axes(tensor: Tensor, axis_order: str) -> Tensor:
    """Convert between the reference's axis order and the user's; every permutation is its own inverse."""
    order = AXIS_PERMUTATIONS.get(axis_order)
    return tensor if order is None or tensor.ndim != len(order) else tensor.permute(order)


def select_matching_or_first_tensor(result: Any, expected_shape: tuple[int, ...]) -> Tensor:
    """Of several results, e.g. (output, weights), return the first with the expected shape, else the first."""
    if isinstance(result, Tensor):
        return result
    parts = list(result.values()) if isinstance(result, dict) else result
    tensors = [part for part in parts if isinstance(part, Tensor)] if isinstance(parts, list | tuple) else []
    if not tensors:
        raise TypeError(f"it returned {type(result).__name__}, not a tensor")
    return next((tensor for tensor in tensors if tuple(tensor.shape) == expected_shape), tensors[0])


def describe_attention_mistake_symptoms(
    checker: PartChecker, convention: CallConvention, user_result: Tensor, reference_result: Tensor
) -> list[str]:
    """Describe properties of an attention whose mistake is unknown."""
    lines = []
    if user_result.shape != reference_result.shape:
        lines.append(f"The output has shape {list(user_result.shape)} instead of {list(reference_result.shape)}.")
    if not user_result.isfinite().all():
        lines.append("The output contains NaN or infinite values.")
    case = next(case for case in checker.list_cases() if case.required)
    inputs = {name: tensor.to(checker.dtype) for name, tensor in checker.make_float64_inputs(case).items()}
    if "v" in inputs:
        ones = checker.run_user_code_and_restore_axes(convention, case, inputs | {"v": torch.ones_like(inputs["v"])})
        sum_to_one = torch.allclose(ones, torch.ones_like(ones), atol=1e-4)
        lines.append(format_observation(sum_to_one, "the rows of the attention weights sum to 1"))
        doubled = checker.run_user_code_and_restore_axes(convention, case, inputs | {"v": 2 * inputs["v"]})
        is_linear = torch.allclose(doubled, 2 * user_result)
        lines.append(format_observation(is_linear, "doubling the values doubles the output"))
    return lines
