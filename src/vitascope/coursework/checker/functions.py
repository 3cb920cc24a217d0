"""The parts `multi-head-attention` and `self-attention-2d` as a function with weights as arguments."""

import re
from typing import Any

import torch
from torch import Tensor

from vitascope.coursework.checker.argument_names import (
    call_by_roles,
    get_docs_and_comments,
    get_source,
    guess_argument_roles,
    normalize_identifier,
    split_identifier,
)
from vitascope.coursework.checker.attention_layers import (
    CorrectVariant,
    guess_single_row_mistake,
    list_row_order_mistakes,
)
from vitascope.coursework.checker.dot_product import describe_attention_evidence, select_output
from vitascope.coursework.checker.heads import AXIS_ORDERS
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
    make_tiny_attention_cases,
)
from vitascope.coursework.checker.reference import (
    ATTENTION_MAP_MISTAKES,
    HEAD_MISTAKES,
    MASK_FILL_MISTAKES,
    MASK_MISTAKES,
    SCALE_MISTAKES,
    ReferenceOptions,
    SimulatedMistake,
    multi_head_attention,
)
from vitascope.coursework.checker.weights import get_qkv_row_indices

TRANSPOSED_WEIGHTS_TEXT = "the weights have shape input × output (x @ W)"
INPUT_FIRST_PATTERN = (
    r"\b(d_?)?in(put)?s?\w*\s*(×|x|\*|,|by)\s*(d_?)?out(put)?|x\s*@\s*w\w*(?!\w*\.(t|mt))"  # in docstrings and comments
)


class AttentionFunctionChecker(PartChecker):
    """`f(x, w_q, w_k, w_v, w_o, heads)` and its like: every weight is an input, drawn by us."""

    part = "multi-head-attention"

    def __init__(self, name: str, user_code: Any, mask_polarity: str | None = None, part: str = part) -> None:
        self.name, self.user_code, self.part = name, user_code, part
        self.argument_roles = self._guess_argument_roles(user_code)
        self.weights = [
            role for role in self.argument_roles.values() if role[0] in "wb" and role[1:] in ("q", "k", "v", "o", "qkv")
        ]
        self.has_heads_argument = "heads" in self.argument_roles.values()
        masks = [argument for argument, role in self.argument_roles.items() if role == "mask"]
        self.mask_formats = list_mask_formats(masks[0], user_code, mask_polarity) if masks else []
        self.default_mask_kind = choose_default_mask_kind(user_code, self.argument_roles)
        words = {
            word
            for argument, role in self.argument_roles.items()
            if role in self.weights
            for word in split_identifier(argument)
        }
        self.uses_torch_weight_names = bool(words & {"weight", "proj", "weights"})

    @staticmethod
    def _guess_argument_roles(function: Any) -> dict[str, str]:
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
        def sizes(width: int, heads: int, batch: int, rows: int, columns: int) -> dict[str, int]:
            heads = heads if self.has_heads_argument else 1
            return {"batch": batch, "width": width, "heads": heads, "rows": rows, "columns": columns}

        cases = [
            Case("three heads, five tokens", sizes(12, 3, 2, 1, 5), self.default_mask_kind),
            Case("one head", sizes(8, 1, 2, 2, 2), self.default_mask_kind),
            Case("other sizes", sizes(15, 5, 3, 1, 7), self.default_mask_kind),
            Case("one token", sizes(12, 3, 2, 1, 1), self.default_mask_kind),
        ]
        if self.mask_formats:
            same = sizes(12, 3, 2, 1, 5)
            cases += [Case("mask", same, "random"), Case(LARGE_MASKED_SCORES, same, "loud")]
        return cases

    def list_tiny_cases(self) -> list[Case]:
        grown = [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 2, 2)]
        return make_tiny_attention_cases(
            [size for size in grown if size[1] == 1 or self.has_heads_argument], self.default_mask_kind
        )

    def make_inputs(self, case: Case) -> NamedTensors:
        s = case.sizes
        shape = (s["batch"], s["rows"] * s["columns"], s["width"])
        shapes: dict[str, tuple[int, ...]] = {role: shape for role in "xqkv" if role in self.argument_roles.values()}
        for role in self.weights:
            rows = s["width"] * (3 if role.endswith("qkv") else 1)
            shapes[role] = (rows, s["width"]) if role[0] == "w" else (rows,)
        given = draw_inputs(case, shapes)
        for role in [] if case.tiny else self.weights:
            given[role] *= s["width"] ** -0.5
        if case.mask_kind == "loud":
            given = {name: x * _make_last_token_scale(x) if name in "xqkv" else x for name, x in given.items()}
        return given

    def list_convention_groups(self) -> list[list[CallConvention]]:
        forms = self.mask_formats or [None]
        talls = [False, True] if "wqkv" in self.weights else [False]
        axes = [["grid"], ["grid-last"]] if self.part == "self-attention-2d" else [["batch", "token"], ["single"]]
        stacked = [False, True] if {"wq", "wk", "wv"} <= set(self.weights) else [False]
        return [
            [
                CallConvention(
                    _describe_assumptions(a, form, tall, heads),
                    {"axes": a, "form": form, "tall": tall, "stacked": heads},
                )
                for a in group
                for form in forms
            ]
            for heads in stacked
            for group in axes
            for tall in talls
        ]

    def as_passed(self, way: CallConvention, case: Case, inputs: NamedTensors) -> NamedTensors:
        axes, heads = way.settings["axes"], case.sizes["heads"]
        return {
            name: _convert_to_user_axes(tensor, axes, case)
            if name in "xqkv"
            else _convert_weight_to_user_shape(name, tensor, way, heads)
            for name, tensor in inputs.items()
        }

    def as_returned(self, way: CallConvention, case: Case, result: Tensor) -> Tensor:
        return _convert_to_user_axes(result, way.settings["axes"], case)

    def run_user_code(self, convention: CallConvention, case: Case, inputs: NamedTensors) -> Tensor:
        axes, heads = convention.settings["axes"], case.sizes["heads"]
        values: dict[str, Any] = dict(self.as_passed(convention, case, inputs))
        tokens = next(values[name] for name in "xqkv" if name in values)
        values |= {"heads": heads, "dropout": 0.0, "training": False, "embeddim": case.sizes["width"]}
        values |= {"dmodel": case.sizes["width"], "dk": case.sizes["width"] // heads}
        allowed = make_allowed_mask(case, case.sizes["columns"], case.sizes["columns"])
        if allowed is None:
            return _convert_from_user_axes(
                select_output(call_by_roles(self.user_code, values, self.argument_roles), tuple(tokens.shape)), axes
            )
        mask, error = MASK_FORMATS[convention.settings["form"]][1](allowed, self.dtype), None
        for tried in list_broadcast_masks(mask, (case.sizes["batch"], heads)):
            try:
                result = call_by_roles(self.user_code, values | {"mask": tried}, self.argument_roles)
                return _convert_from_user_axes(select_output(result, tuple(tokens.shape)), axes)
            except (RuntimeError, ValueError, IndexError, AssertionError) as raised:
                error = error or raised
        raise error or RuntimeError("no mask shape was accepted")

    def run_reference(
        self, convention: CallConvention, case: Case, inputs: NamedTensors, options: ReferenceOptions
    ) -> Tensor:
        first = next(inputs[name] for name in "xqkv" if name in inputs)
        tokens = tuple(inputs.get(name, first) for name in "qkv")
        if convention.settings["axes"] == "single":
            tokens = tuple(x[:1] for x in tokens)
        weight_roles: dict[str, Tensor | None] = {
            role: inputs[role] for role in self.weights if not role.endswith("qkv")
        }
        for role in ("wqkv", "bqkv"):
            if role in inputs:
                cuts = get_qkv_row_indices(options.get("rows", "qkv"), case.sizes["width"], case.sizes["heads"])
                weight_roles |= {role[0] + letter: inputs[role][cut] for letter, cut in zip("qkv", cuts, strict=True)}
        for letter in options.get("flipped", ""):
            if (weight := weight_roles.get("w" + letter)) is not None:
                weight_roles["w" + letter] = weight.T
        allowed = make_allowed_mask(case, first.shape[1], first.shape[1])
        return multi_head_attention(tokens, weight_roles, case.sizes["heads"], allowed, options)  # pyright: ignore[reportArgumentType]

    def list_correct_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        if "wqkv" in self.weights:
            return [({"flipped": "o"}, ()), ({}, ())] if convention.settings["tall"] else [({}, ())]
        told = re.search(INPUT_FIRST_PATTERN, get_docs_and_comments(self.user_code).lower())
        if convention.settings["stacked"] or self.uses_torch_weight_names or not self.weights or not told:
            return [({}, ())]
        return [({"flipped": "qkvo"}, (TRANSPOSED_WEIGHTS_TEXT,))]

    def list_simulated_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
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

    def find_missing_layers(self, convention: CallConvention) -> list[SimulatedMistake]:
        lacking = self.weights and self.has_heads_argument and "wo" not in self.weights
        return [SimulatedMistake("missing-output-projection", {"projected": False})] if lacking else []

    def guess_mistake_ids(self, convention: CallConvention | None) -> list[str]:
        return guess_single_row_mistake(get_source(self.user_code))

    def describe_evidence(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        return (
            describe_attention_evidence(self, convention, user_result, reference_result)
            if "v" in self.argument_roles.values()
            else []
        )


def _make_last_token_scale(x: Tensor) -> Tensor:
    factor = torch.ones(x.shape[1], 1, dtype=x.dtype)
    factor[-1] = 300.0
    return factor


def _describe_assumptions(
    axis_order: str, mask_format: str | None, is_packed_transposed: bool, has_head_axis: bool
) -> tuple[str, ...]:
    words = [AXIS_ORDERS[axis_order]]
    words += [] if mask_format is None else [MASK_FORMATS[mask_format][0]]
    words += ["the packed weight has shape input × output"] if is_packed_transposed else []
    return (*words, *(["the weights have shape head × input × head width"] if has_head_axis else []))


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
    """A weight in the shape that this way hands over."""
    if weight_role == "wqkv" and convention.settings["tall"]:
        return weight.T
    if not convention.settings["stacked"]:
        return weight
    if weight_role[0] == "b":
        return weight if weight_role == "bo" else weight.unflatten(0, (num_heads, 1, -1)).squeeze(1)
    return (
        weight.T.unflatten(0, (num_heads, -1))
        if weight_role == "wo"
        else weight.unflatten(0, (num_heads, -1)).transpose(1, 2)
    )
