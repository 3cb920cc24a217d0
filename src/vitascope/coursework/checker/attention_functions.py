"""Check `multi-head-attention` and `self-attention-2d` written as a function with weights as arguments."""

import re
from typing import Any

from torch import Tensor

from vitascope.coursework.checker.attention_modules import AXIS_ORDERS
from vitascope.coursework.checker.dot_product import (
    describe_attention_mistake_symptoms,
    select_matching_or_first_tensor,
)
from vitascope.coursework.checker.layers import guess_in_proj_indexing_mistake_ids, list_row_order_mistakes
from vitascope.coursework.checker.masks import MASK_FORMATS, list_expanded_masks, list_plausible_mask_formats
from vitascope.coursework.checker.part_checker import (
    LARGE_MASKED_SCORES,
    CallConvention,
    Case,
    CorrectVariant,
    MaskKind,
    MaskPolarity,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
    TinySizes,
    UserInputs,
    choose_mask_kind_if_required,
    draw_seeded_inputs_for_case,
    make_allowed_mask_if_masked,
    make_tiny_attention_cases,
)
from vitascope.coursework.checker.recognition import (
    ArgumentRoles,
    UserCode,
    call_by_roles,
    get_docs_and_comments,
    get_source_or_empty,
    guess_argument_roles,
    normalize_identifier,
    split_identifier_into_words,
)
from vitascope.coursework.checker.reference import (
    ATTENTION_MAP_MISTAKES,
    HEAD_MISTAKES,
    MASK_FILL_MISTAKES,
    MASK_MISTAKES,
    SCALE_MISTAKES,
    QueryKeyValue,
    ReferenceVariant,
    SimulatedMistake,
    run_reference_multi_head_attention_variant,
)
from vitascope.coursework.checker.weights import get_qkv_row_indices

TRANSPOSED_WEIGHTS_TEXT = "the weights have shape input × output (x @ W)"
INPUT_FIRST_PATTERN = (
    r"\b(d_?)?in(put)?s?\w*\s*(×|x|\*|,|by)\s*(d_?)?out(put)?|x\s*@\s*w\w*(?!\w*\.(t|mt))"  # in docstrings and comments
)


class AttentionFunctionChecker(PartChecker):
    """Check a function such as `f(x, w_q, w_k, w_v, w_o, heads)`; the checker draws the weights as inputs."""

    part = "multi-head-attention"

    def __init__(
        self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None, part: str = part
    ) -> None:
        self.name, self.user_code, self.part = name, user_code, part
        self.argument_roles = self._guess_argument_roles(user_code)
        self.weights = [
            role for role in self.argument_roles.values() if role[0] in "wb" and role[1:] in ("q", "k", "v", "o", "qkv")
        ]
        self.has_heads_argument = "heads" in self.argument_roles.values()
        masks = [argument for argument, role in self.argument_roles.items() if role == "mask"]
        self.mask_formats = list_plausible_mask_formats(masks[0], user_code, mask_polarity) if masks else []
        self.default_mask_kind: MaskKind | None = choose_mask_kind_if_required(user_code, self.argument_roles)
        name_words = {
            word
            for argument, role in self.argument_roles.items()
            if role in self.weights
            for word in split_identifier_into_words(argument)
        }
        self.uses_torch_weight_names = bool(name_words & {"weight", "proj", "weights"})

    @staticmethod
    def _guess_argument_roles(function: UserCode) -> ArgumentRoles:
        roles = guess_argument_roles(function)
        if not {"x", "q"} & set(roles.values()) and roles:
            roles[next(iter(roles))] = "x"
        if "heads" not in roles.values() and any(role.startswith("w") for role in roles.values()):
            roles |= {
                name: "heads"
                for name in roles
                if normalize_identifier(name) == "h" and roles[name] not in ("q", "k", "v")
            }
        return roles

    def get_reference_name(self) -> str:
        return "nn.MultiheadAttention"

    def list_cases(self) -> list[Case]:
        def make_sizes(width: int, heads: int, batch: int, rows: int, columns: int) -> dict[str, int]:
            heads = heads if self.has_heads_argument else 1
            return {"batch": batch, "width": width, "heads": heads, "rows": rows, "columns": columns}

        cases = [
            Case("three heads, five tokens", make_sizes(12, 3, 2, 1, 5), self.default_mask_kind),
            Case("one head", make_sizes(8, 1, 2, 2, 2), self.default_mask_kind),
            Case("other sizes", make_sizes(15, 5, 3, 1, 7), self.default_mask_kind),
            Case("one token", make_sizes(12, 3, 2, 1, 1), self.default_mask_kind),
        ]
        if self.mask_formats:
            masked = make_sizes(12, 3, 2, 1, 5)
            cases += [Case("mask", masked, "random"), Case(LARGE_MASKED_SCORES, masked, "high_scores")]
        return cases

    def list_tiny_example_cases(self) -> list[Case]:
        sizes = [TinySizes(*size) for size in ((1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 2, 2))]
        return make_tiny_attention_cases(
            [size for size in sizes if size.num_heads == 1 or self.has_heads_argument], self.default_mask_kind
        )

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        s = case.sizes
        shape = (s["batch"], s["rows"] * s["columns"], s["width"])
        shapes: dict[str, tuple[int, ...]] = {role: shape for role in "xqkv" if role in self.argument_roles.values()}
        for role in self.weights:
            rows = s["width"] * (3 if role.endswith("qkv") else 1)
            shapes[role] = (rows, s["width"]) if role[0] == "w" else (rows,)
        inputs = draw_seeded_inputs_for_case(case, shapes)
        for role in [] if case.tiny else self.weights:
            inputs[role] *= s["width"] ** -0.5
        if case.mask_kind == "high_scores":  # the masked last token is 300 times larger
            for role in inputs.keys() & set("xqkv"):
                inputs[role][:, -1] *= 300.0
        return inputs

    def list_convention_groups(self) -> list[list[CallConvention]]:
        mask_formats = self.mask_formats or [None]
        packed_options = [False, True] if "wqkv" in self.weights else [False]
        axis_order_groups = (
            [["grid"], ["grid-last"]] if self.part == "self-attention-2d" else [["batch", "token"], ["single"]]
        )
        per_head_options = [False, True] if {"wq", "wk", "wv"} <= set(self.weights) else [False]
        return [
            [
                _make_convention(axis_order, mask_format, packed_transposed, per_head)
                for axis_order in group
                for mask_format in mask_formats
            ]
            for per_head in per_head_options
            for group in axis_order_groups
            for packed_transposed in packed_options
        ]

    def reshape_inputs_for_user_code(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> UserInputs:
        axis_order, heads = convention.settings["axis_order"], case.sizes["heads"]
        return {
            name: _convert_to_user_axes(tensor, axis_order, case)
            if name in "xqkv"
            else _convert_weight_to_user_shape(name, tensor, convention, heads)
            for name, tensor in inputs.items()
        }

    def permute_output_to_user_axes(self, convention: CallConvention, case: Case, result: Tensor) -> Tensor:
        return _convert_to_user_axes(result, convention.settings["axis_order"], case)

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        axis_order, heads = convention.settings["axis_order"], case.sizes["heads"]
        values: dict[str, Any] = dict(self.reshape_inputs_for_user_code(convention, case, inputs))
        tokens = next(values[name] for name in "xqkv" if name in values)
        values |= {"heads": heads, "dropout": 0.0, "training": False, "embeddim": case.sizes["width"]}
        values |= {"dmodel": case.sizes["width"], "dk": case.sizes["width"] // heads}
        allowed = make_allowed_mask_if_masked(case, case.sizes["columns"], case.sizes["columns"])
        if allowed is None:
            return _convert_from_user_axes(
                select_matching_or_first_tensor(
                    call_by_roles(self.user_code, values, self.argument_roles), tuple(tokens.shape)
                ),
                axis_order,
            )
        mask, error = MASK_FORMATS[convention.settings["mask_format"]].convert(allowed, self.dtype), None
        for candidate in list_expanded_masks(mask, (case.sizes["batch"], heads)):
            try:
                result = call_by_roles(self.user_code, values | {"mask": candidate}, self.argument_roles)
                return _convert_from_user_axes(select_matching_or_first_tensor(result, tuple(tokens.shape)), axis_order)
            except (RuntimeError, ValueError, IndexError, AssertionError) as raised:
                error = error or raised
        raise error or RuntimeError("no mask shape was accepted")

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        first = next(inputs[name] for name in "xqkv" if name in inputs)
        max_images = 1 if convention.settings["axis_order"] == "single" else None
        tokens = [inputs.get(name, first)[:max_images] for name in "qkv"]
        weights: dict[str, Tensor | None] = {role: inputs[role] for role in self.weights if not role.endswith("qkv")}
        row_order = variant_or_mistakes.get("rows", "qkv")
        for role in ("wqkv", "bqkv"):
            if role in inputs:
                row_indices = get_qkv_row_indices(row_order, case.sizes["width"], case.sizes["heads"])
                weights |= {
                    role[0] + letter: inputs[role][rows] for letter, rows in zip("qkv", row_indices, strict=True)
                }
        for letter in variant_or_mistakes.get("transposed", ""):
            if (weight := weights.get("w" + letter)) is not None:
                weights["w" + letter] = weight.T
        allowed = make_allowed_mask_if_masked(case, first.shape[1], first.shape[1])
        return run_reference_multi_head_attention_variant(
            QueryKeyValue(*tokens), weights, case.sizes["heads"], allowed, variant_or_mistakes
        )

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        default = CorrectVariant({}, ())
        if "wqkv" in self.weights:
            is_transposed = convention.settings["packed_transposed"]
            return [CorrectVariant({"transposed": "o"}, ()), default] if is_transposed else [default]
        is_documented = re.search(INPUT_FIRST_PATTERN, get_docs_and_comments(self.user_code).lower())
        if convention.settings["per_head"] or self.uses_torch_weight_names or not self.weights or not is_documented:
            return [default]
        return [CorrectVariant({"transposed": "qkvo"}, (TRANSPOSED_WEIGHTS_TEXT,))]

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        rows = []
        if "wqkv" in self.weights:
            rows = [SimulatedMistake("query-key-swapped", {"rows": "kqv"}), *list_row_order_mistakes(["qkv"])]
        masks = [*MASK_MISTAKES, *MASK_FILL_MISTAKES] if self.mask_formats else []
        absent = {"missing-output-projection"} if "wo" not in self.weights else set()
        absent |= set() if self.weights else {"weight-not-transposed"}
        joined = [SimulatedMistake("heads-joined-wrongly", {"split": "inside-out"})]
        return [
            s
            for s in [*SCALE_MISTAKES, *ATTENTION_MAP_MISTAKES, *HEAD_MISTAKES, *joined, *rows, *masks]
            if s.mistake_id not in absent
        ]

    def find_missing_layer_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        is_missing = self.weights and self.has_heads_argument and "wo" not in self.weights
        return [SimulatedMistake("missing-output-projection", {"projected": False})] if is_missing else []

    def guess_mistake_ids_without_simulation(self, convention: CallConvention | None) -> list[str]:
        return guess_in_proj_indexing_mistake_ids(get_source_or_empty(self.user_code))

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        return (
            describe_attention_mistake_symptoms(self, convention, user_result, reference_result)
            if "v" in self.argument_roles.values()
            else []
        )


def _make_convention(
    axis_order: str, mask_format: str | None, packed_transposed: bool, per_head: bool
) -> CallConvention:
    settings = {"axis_order": axis_order, "mask_format": mask_format}
    assumptions = [AXIS_ORDERS[axis_order]]
    assumptions += [] if mask_format is None else [MASK_FORMATS[mask_format].description]
    assumptions += ["the packed weight has shape input × output"] if packed_transposed else []
    assumptions += ["the weights have shape head × input × head width"] if per_head else []
    return CallConvention(tuple(assumptions), settings | {"packed_transposed": packed_transposed, "per_head": per_head})


def _convert_to_user_axes(x: Tensor, axis_order: str, case: Case) -> Tensor:
    if axis_order.startswith("grid"):
        grid = x.unflatten(1, (case.sizes["rows"], case.sizes["columns"]))
        return grid.permute(0, 3, 1, 2) if axis_order == "grid" else grid
    return {"batch": x, "token": x.transpose(0, 1), "single": x[0]}[axis_order]


def _convert_from_user_axes(x: Tensor, axis_order: str) -> Tensor:
    if axis_order.startswith("grid") and x.ndim == 4:
        return x.permute(0, 2, 3, 1).flatten(1, 2) if axis_order == "grid" else x.flatten(1, 2)
    if axis_order == "token" and x.ndim == 3:
        return x.transpose(0, 1)
    return x[None] if axis_order == "single" else x


def _convert_weight_to_user_shape(
    weight_role: str, weight: Tensor, convention: CallConvention, num_heads: int
) -> Tensor:
    """Return the weight in the shape in which the user's code receives it."""
    if weight_role == "wqkv" and convention.settings["packed_transposed"]:
        return weight.T
    if not convention.settings["per_head"]:
        return weight
    if weight_role[0] == "b":
        return weight if weight_role == "bo" else weight.unflatten(0, (num_heads, 1, -1)).squeeze(1)
    if weight_role == "wo":
        return weight.T.unflatten(0, (num_heads, -1))
    return weight.unflatten(0, (num_heads, -1)).transpose(1, 2)
