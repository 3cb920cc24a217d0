"""The part `attention`: f(q, k, v[, mask]), against F.scaled_dot_product_attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.coursework.checker.argument_names import call_by_roles, guess_argument_roles, normalize_identifier
from vitascope.coursework.checker.masks import MASK_FORMATS, list_broadcast_masks, list_mask_formats
from vitascope.coursework.checker.part import (
    LARGE_MASKED_SCORES,
    CallConvention,
    Case,
    NamedTensors,
    PartChecker,
    choose_default_mask_kind,
    draw_inputs,
    make_allowed_mask,
    observe,
)
from vitascope.coursework.checker.reference import (
    ATTENTION_MAP_MISTAKES,
    MASK_FILL_MISTAKES,
    MASK_MISTAKES,
    SCALE_MISTAKES,
    ReferenceOptions,
    SimulatedMistake,
    attend_with_options,
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
    """A function, or a module without weights."""

    part = "attention"

    def __init__(self, name: str, user_code: Any, mask_polarity: str | None = None) -> None:
        self.name = name
        self.user_code: Callable[..., Any] = self._instantiate_class(user_code)
        call = self.user_code.forward if isinstance(self.user_code, nn.Module) else self.user_code
        self.user_function = call
        self.argument_roles = infer_qkv_roles(guess_argument_roles(call))
        masks = [argument for argument, role in self.argument_roles.items() if role == "mask"]
        self.mask_formats = list_mask_formats(masks[0], user_code, mask_polarity) if masks else []
        self.default_mask_kind = choose_default_mask_kind(call, self.argument_roles)
        self.is_causal = not masks and "causal" in name.lower()

    @staticmethod
    def _instantiate_class(user_code: Any) -> Any:
        if not isinstance(user_code, type):
            return user_code
        from vitascope.coursework.checker.instances import build_instance

        return build_instance(user_code, {"temperature": 2.0, "width": 4, "dropout": 0.1, "key_width": 4, "heads": 1})

    def get_reference_name(self) -> str:
        return "F.scaled_dot_product_attention"

    def list_cases(self) -> list[Case]:
        sizes = {"batch": 2, "heads": 3, "queries": 5, "keys": 5, "width": 4, "value": 4}
        small = self._find_fixed_width()
        own = "causal" if self.is_causal else self.default_mask_kind
        cases = [
            Case("five tokens", sizes, own),
            Case("other sizes", sizes | {"batch": 3, "heads": 2, "queries": 7, "keys": 7, "width": 9, "value": 9}, own),
            Case("one token", sizes | {"queries": 1, "keys": 1}, own),
            Case("more keys than queries", sizes | {"keys": 6}, self.default_mask_kind, False),
            Case("values with a different width", sizes | {"value": 3}, own, False),
        ]
        if self.mask_formats:
            cases += [Case("mask", sizes, "random"), Case(LARGE_MASKED_SCORES, sizes, "loud")]
        return [case for case in cases if small is None or case.sizes["width"] == small]

    def list_tiny_cases(self) -> list[Case]:
        own = "causal" if self.is_causal else self.default_mask_kind
        grown = [(t, d) for t in (1, 2, 3) for d in (1, 2)]
        plain = [
            Case(f"{t} {'token' if t == 1 else 'tokens'} of width {d}", self._make_tiny_sizes(t, d), own, tiny=True)
            for t, d in grown
        ]
        masked = [Case(f"{t} tokens, causal", self._make_tiny_sizes(t, 1), "causal", tiny=True) for t in (2, 3)]
        small = self._find_fixed_width()
        return [case for case in [*plain, *(masked if self.mask_formats else [])] if small in (None, 1)]

    def _make_tiny_sizes(self, num_tokens: int, width: int) -> dict[str, int]:
        return {"batch": 1, "heads": 1, "queries": num_tokens, "keys": num_tokens, "width": width, "value": width}

    def _find_fixed_width(self) -> int | None:
        """A module that stores a width or a temperature works for that width only."""
        return (
            4
            if isinstance(self.user_code, nn.Module)
            and any(normalize_identifier(k) for k in vars(self.user_code) if k[0] != "_" and k != "training")
            else None
        )

    def make_inputs(self, case: Case) -> NamedTensors:
        s = case.sizes
        batch, heads = s["batch"], s["heads"]
        shapes = {
            "q": (batch, heads, s["queries"], s["width"]),
            "k": (batch, heads, s["keys"], s["width"]),
            "v": (batch, heads, s["keys"], s["value"]),
        }
        given = draw_inputs(case, shapes)
        if case.mask_kind == "loud":  # masked keys with scores far above all others
            given["q"], given["k"] = given["q"].abs() + 0.5, given["k"] * 0.1
            given["k"][..., -1, :] = 400.0
        return given

    def list_convention_groups(self) -> list[list[CallConvention]]:
        forms = self.mask_formats or [None]
        return [[self._make_convention(axes, form) for form in forms for axes in group] for group in AXIS_ORDER_GROUPS]

    def _make_convention(self, axis_order: str, mask_format: str | None) -> CallConvention:
        words = (
            (AXIS_ORDERS[axis_order],)
            if mask_format is None
            else (AXIS_ORDERS[axis_order], MASK_FORMATS[mask_format][0])
        )
        return CallConvention(words, {"axes": axis_order, "form": mask_format})

    def as_passed(self, way: CallConvention, case: Case, inputs: NamedTensors) -> NamedTensors:
        axes = way.settings["axes"]
        return {name: permute_axes(self._drop_missing_axes(axes, tensor), axes) for name, tensor in inputs.items()}

    def as_returned(self, way: CallConvention, case: Case, result: Tensor) -> Tensor:
        return permute_axes(result, way.settings["axes"])

    def run_user_code(self, convention: CallConvention, case: Case, inputs: NamedTensors) -> Tensor:
        axes, ready = convention.settings["axes"], self.as_passed(convention, case, inputs)
        extra = {"dropout": 0.0, "training": False, "dk": case.sizes["width"], "width": case.sizes["width"]}
        allowed = make_allowed_mask(case, case.sizes["queries"], case.sizes["keys"])
        if isinstance(self.user_code, nn.Module):
            self.user_code.train(self.training)
        wanted = (*self._drop_missing_axes(axes, inputs["q"]).shape[:-1], case.sizes["value"])
        if allowed is None or self.is_causal:
            return permute_axes(select_output(self._call_user_code(ready | extra), wanted), axes)
        mask = MASK_FORMATS[convention.settings["form"]][1](allowed, self.dtype)
        error: Exception | None = None
        for tried in list_broadcast_masks(mask, wanted[:-2]):
            try:
                return permute_axes(
                    select_output(self._call_user_code({**ready, **extra, "mask": tried}), wanted), axes
                )
            except (RuntimeError, ValueError, IndexError, AssertionError) as raised:
                error = error or raised
        raise error or RuntimeError("no mask shape was accepted")

    def _call_user_code(self, values_by_role: dict[str, Any]) -> Any:
        run = self.user_code if isinstance(self.user_code, nn.Module) else self.user_function
        if run is self.user_function:
            return call_by_roles(run, values_by_role, self.argument_roles)
        named = {a: values_by_role[r] for a, r in self.argument_roles.items() if r in values_by_role}
        return run(**named)

    def _drop_missing_axes(self, axis_order: str, tensor: Tensor) -> Tensor:
        """Drop the head axis, and the batch axis, where the user's code does not have them."""
        tensor = tensor if axis_order.startswith("heads") else tensor[:, 0]
        return tensor[0] if axis_order.startswith("flat") else tensor

    def run_reference(
        self, convention: CallConvention, case: Case, inputs: NamedTensors, options: ReferenceOptions
    ) -> Tensor:
        axes = convention.settings["axes"]
        q, k, v = (self._drop_missing_axes(axes, inputs[name]) for name in "qkv")
        return attend_with_options(q, k, v, make_allowed_mask(case, case.sizes["queries"], case.sizes["keys"]), options)

    def list_simulated_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        heads = (
            [SimulatedMistake("softmax-over-heads", {"softmax": -3})]
            if convention.settings["axes"].startswith("heads")
            else []
        )
        masks = [*MASK_MISTAKES, *MASK_FILL_MISTAKES] if self.mask_formats or self.is_causal else []
        scales = (
            SCALE_MISTAKES if heads else [switch for switch in SCALE_MISTAKES if switch.mistake_id != "scale-by-width"]
        )
        return [*masks[:1], *scales, *ATTENTION_MAP_MISTAKES, *heads, *masks[1:]]  # first the mask that changes nothing

    def describe_evidence(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        return describe_attention_evidence(self, convention, user_result, reference_result)


def infer_qkv_roles(argument_roles: dict[str, str]) -> dict[str, str]:
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


def permute_axes(tensor: Tensor, axis_order: str) -> Tensor:
    """Convert between our axis order and the user's; every order here is its own inverse."""
    order = AXIS_PERMUTATIONS.get(axis_order)
    return tensor if order is None or tensor.ndim != len(order) else tensor.permute(order)


def select_output(result: Any, expected_shape: tuple[int, ...]) -> Tensor:
    """Of several results, e.g. (output, weights), return the first with the expected shape, else the first."""
    if isinstance(result, Tensor):
        return result
    parts = list(result.values()) if isinstance(result, dict) else result
    tensors = [part for part in parts if isinstance(part, Tensor)] if isinstance(parts, list | tuple) else []
    if not tensors:
        raise TypeError(f"it returned {type(result).__name__}, not a tensor")
    return next((tensor for tensor in tensors if tuple(tensor.shape) == expected_shape), tensors[0])


def describe_attention_evidence(
    checker: PartChecker, convention: CallConvention, user_result: Tensor, reference_result: Tensor
) -> list[str]:
    """Describe properties of an attention whose mistake is unknown."""
    lines = []
    if user_result.shape != reference_result.shape:
        lines.append(f"The output has shape {list(user_result.shape)} instead of {list(reference_result.shape)}.")
    if not user_result.isfinite().all():
        lines.append("The output contains NaN or infinite values.")
    case = next(case for case in checker.list_cases() if case.required)
    inputs = {name: tensor.to(checker.dtype) for name, tensor in checker.make_inputs(case).items()}
    if "v" in inputs:
        ones = checker.run_user_code(convention, case, inputs | {"v": torch.ones_like(inputs["v"])})
        sums = torch.allclose(ones, torch.ones_like(ones), atol=1e-4)
        not_one = "The rows of the attention map do not sum to 1"
        lines.append(observe(sums, "Each row of the attention map sums to 1", not_one))
        double = checker.run_user_code(convention, case, inputs | {"v": 2 * inputs["v"]})
        doubles = torch.allclose(double, 2 * user_result)
        not_double = "Doubling the values does not double the output"
        lines.append(observe(doubles, "Doubling the values doubles the output", not_double))
    return lines
