"""The parts `multi-head-attention` and `self-attention-2d` as a function with weights as arguments."""

import re
from typing import Any

import torch
from torch import Tensor

from vitascope.checking.attention_layers import Reading, single_rows, wrong_rows
from vitascope.checking.dot_product import attention_evidence, picked
from vitascope.checking.heads import AXES
from vitascope.checking.masks import FORMS, forms_for, tried_shapes
from vitascope.checking.naming import argument_roles, called_with, compact, prose_of, source_of, words_of
from vitascope.checking.reference import HEADS, LEAKS, MAPS, MASKS, SCALES, Options, Switch, multi_head
from vitascope.checking.subject import (
    LARGE_MASKED_SCORES,
    Case,
    Inputs,
    Subject,
    Way,
    allowed_pairs,
    drawn,
    plain_mask,
    tiny_attention,
)
from vitascope.checking.weights import row_numbers

FLIPPED = "the weights have shape input × output (x @ W)"
INPUT_FIRST = (
    r"\b(d_?)?in(put)?s?\w*\s*(×|x|\*|,|by)\s*(d_?)?out(put)?|x\s*@\s*w\w*(?!\w*\.(t|mt))"  # in docstrings and comments
)


class AttentionFunction(Subject):
    """`f(x, w_q, w_k, w_v, w_o, heads)` and its like: every weight is an input, drawn by us."""

    part = "multi-head-attention"

    def __init__(self, name: str, thing: Any, polarity: str | None = None, part: str = part) -> None:
        self.name, self.thing, self.part = name, thing, part
        self.roles = self._roles(thing)
        self.weights = [
            role for role in self.roles.values() if role[0] in "wb" and role[1:] in ("q", "k", "v", "o", "qkv")
        ]
        self.heads_given = "heads" in self.roles.values()
        masks = [argument for argument, role in self.roles.items() if role == "mask"]
        self.forms_of_mask = forms_for(masks[0], thing, polarity) if masks else []
        self.plain = plain_mask(thing, self.roles)
        words = {word for argument, role in self.roles.items() if role in self.weights for word in words_of(argument)}
        self.strict = bool(words & {"weight", "proj", "weights"})

    @staticmethod
    def _roles(thing: Any) -> dict[str, str]:
        roles = argument_roles(thing)
        if not {"x", "q"} & set(roles.values()) and roles:
            roles[next(iter(roles))] = "x"
        if "heads" not in roles.values() and any(role.startswith("w") for role in roles.values()):
            roles |= {name: "heads" for name in roles if compact(name) == "h" and roles[name] not in ("q", "k", "v")}
        return roles

    def native(self) -> str:
        return "nn.MultiheadAttention"

    def cases(self) -> list[Case]:
        def sizes(width: int, heads: int, batch: int, rows: int, columns: int) -> dict[str, int]:
            heads = heads if self.heads_given else 1
            return {"batch": batch, "width": width, "heads": heads, "rows": rows, "columns": columns}

        cases = [
            Case("three heads, five tokens", sizes(12, 3, 2, 1, 5), self.plain),
            Case("one head", sizes(8, 1, 2, 2, 2), self.plain),
            Case("other sizes", sizes(15, 5, 3, 1, 7), self.plain),
            Case("one token", sizes(12, 3, 2, 1, 1), self.plain),
        ]
        if self.forms_of_mask:
            same = sizes(12, 3, 2, 1, 5)
            cases += [Case("mask", same, "random"), Case(LARGE_MASKED_SCORES, same, "loud")]
        return cases

    def tiny_cases(self) -> list[Case]:
        grown = [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 2, 2)]
        return tiny_attention([size for size in grown if size[1] == 1 or self.heads_given], self.plain)

    def inputs(self, case: Case) -> Inputs:
        s = case.sizes
        shape = (s["batch"], s["rows"] * s["columns"], s["width"])
        shapes: dict[str, tuple[int, ...]] = {role: shape for role in "xqkv" if role in self.roles.values()}
        for role in self.weights:
            rows = s["width"] * (3 if role.endswith("qkv") else 1)
            shapes[role] = (rows, s["width"]) if role[0] == "w" else (rows,)
        given = drawn(case, shapes)
        for role in [] if case.tiny else self.weights:
            given[role] *= s["width"] ** -0.5
        if case.mask == "loud":
            given = {name: x * _louder(x) if name in "xqkv" else x for name, x in given.items()}
        return given

    def groups(self) -> list[list[Way]]:
        forms = self.forms_of_mask or [None]
        talls = [False, True] if "wqkv" in self.weights else [False]
        axes = [["grid"], ["grid-last"]] if self.part == "self-attention-2d" else [["batch", "token"], ["single"]]
        stacked = [False, True] if {"wq", "wk", "wv"} <= set(self.weights) else [False]
        return [
            [
                Way(_words(a, form, tall, heads), {"axes": a, "form": form, "tall": tall, "stacked": heads})
                for a in group
                for form in forms
            ]
            for heads in stacked
            for group in axes
            for tall in talls
        ]

    def as_passed(self, way: Way, case: Case, inputs: Inputs) -> Inputs:
        axes, heads = way.settings["axes"], case.sizes["heads"]
        return {
            name: _turned(tensor, axes, case) if name in "xqkv" else _as_given(name, tensor, way, heads)
            for name, tensor in inputs.items()
        }

    def as_returned(self, way: Way, case: Case, result: Tensor) -> Tensor:
        return _turned(result, way.settings["axes"], case)

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        axes, heads = way.settings["axes"], case.sizes["heads"]
        values: dict[str, Any] = dict(self.as_passed(way, case, inputs))
        tokens = next(values[name] for name in "xqkv" if name in values)
        values |= {"heads": heads, "dropout": 0.0, "training": False, "embeddim": case.sizes["width"]}
        values |= {"dmodel": case.sizes["width"], "dk": case.sizes["width"] // heads}
        allowed = allowed_pairs(case, case.sizes["columns"], case.sizes["columns"])
        if allowed is None:
            return _back(picked(called_with(self.thing, values, self.roles), tuple(tokens.shape)), axes)
        mask, error = FORMS[way.settings["form"]][1](allowed, self.dtype), None
        for tried in tried_shapes(mask, (case.sizes["batch"], heads)):
            try:
                result = called_with(self.thing, values | {"mask": tried}, self.roles)
                return _back(picked(result, tuple(tokens.shape)), axes)
            except (RuntimeError, ValueError, IndexError, AssertionError) as raised:
                error = error or raised
        raise error or RuntimeError("no mask shape was accepted")

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        first = next(inputs[name] for name in "xqkv" if name in inputs)
        tokens = tuple(inputs.get(name, first) for name in "qkv")
        if way.settings["axes"] == "single":
            tokens = tuple(x[:1] for x in tokens)
        weights: dict[str, Tensor | None] = {role: inputs[role] for role in self.weights if not role.endswith("qkv")}
        for role in ("wqkv", "bqkv"):
            if role in inputs:
                cuts = row_numbers(options.get("rows", "qkv"), case.sizes["width"], case.sizes["heads"])
                weights |= {role[0] + letter: inputs[role][cut] for letter, cut in zip("qkv", cuts, strict=True)}
        for letter in options.get("flipped", ""):
            if (weight := weights.get("w" + letter)) is not None:
                weights["w" + letter] = weight.T
        allowed = allowed_pairs(case, first.shape[1], first.shape[1])
        return multi_head(tokens, weights, case.sizes["heads"], allowed, options)  # pyright: ignore[reportArgumentType]

    def readings(self, way: Way) -> list[Reading]:
        if "wqkv" in self.weights:
            return [({"flipped": "o"}, ()), ({}, ())] if way.settings["tall"] else [({}, ())]
        told = re.search(INPUT_FIRST, prose_of(self.thing).lower())
        if way.settings["stacked"] or self.strict or not self.weights or not told:
            return [({}, ())]
        return [({"flipped": "qkvo"}, (FLIPPED,))]

    def switches(self, way: Way) -> list[Switch]:
        rows = []
        if "wqkv" in self.weights:
            rows = [Switch("query-key-swapped", {"rows": "kqv"}), *wrong_rows(["qkv"])]
        masks = [*MASKS, *LEAKS] if self.forms_of_mask else []
        absent = {"missing-output-projection"} if "wo" not in self.weights else set()
        absent |= set() if self.weights else {"weight-not-transposed"}
        joined = [Switch("heads-joined-wrongly", {"split": "inside-out"})]
        return [s for s in [*SCALES, *MAPS, *HEADS, *joined, *rows, *masks] if s.id not in absent]

    def forms(self, way: Way) -> list[Switch]:
        lacking = self.weights and self.heads_given and "wo" not in self.weights
        return [Switch("missing-output-projection", {"projected": False})] if lacking else []

    def guessed(self, way: Way | None) -> list[str]:
        return single_rows(source_of(self.thing))

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        return attention_evidence(self, way, theirs, ours) if "v" in self.roles.values() else []


def _louder(x: Tensor) -> Tensor:
    factor = torch.ones(x.shape[1], 1, dtype=x.dtype)
    factor[-1] = 300.0
    return factor


def _words(axes: str, form: str | None, tall: bool, stacked: bool) -> tuple[str, ...]:
    words = [AXES[axes]]
    words += [] if form is None else [FORMS[form][0]]
    words += ["the packed weight has shape input × output"] if tall else []
    return (*words, *(["the weights have shape head × input × head width"] if stacked else []))


def _turned(x: Tensor, axes: str, case: Case) -> Tensor:
    if axes.startswith("grid"):
        grid = x.unflatten(1, (case.sizes["rows"], case.sizes["columns"]))
        return grid.permute(0, 3, 1, 2) if axes == "grid" else grid
    return {"batch": x, "token": x.transpose(0, 1), "single": x[0]}[axes]


def _back(x: Tensor, axes: str) -> Tensor:
    if axes.startswith("grid") and x.ndim == 4:
        return x.permute(0, 2, 3, 1).flatten(1, 2) if axes == "grid" else x.flatten(1, 2)
    if axes == "token" and x.ndim == 3:
        return x.transpose(0, 1)
    return x[None] if axes == "single" else x


def _as_given(role: str, weight: Tensor, way: Way, heads: int) -> Tensor:
    """A weight in the shape that this way hands over."""
    if role == "wqkv" and way.settings["tall"]:
        return weight.T
    if not way.settings["stacked"]:
        return weight
    if role[0] == "b":
        return weight if role == "bo" else weight.unflatten(0, (heads, 1, -1)).squeeze(1)
    return weight.T.unflatten(0, (heads, -1)) if role == "wo" else weight.unflatten(0, (heads, -1)).transpose(1, 2)
