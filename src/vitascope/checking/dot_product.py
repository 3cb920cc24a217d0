"""The part `attention`: f(q, k, v[, mask]), against F.scaled_dot_product_attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.checking.masks import FORMS, forms_for, tried_shapes
from vitascope.checking.naming import argument_roles, called_with, compact
from vitascope.checking.reference import LEAKS, MAPS, MASKS, SCALES, Options, Switch, attend
from vitascope.checking.subject import (
    LARGE_MASKED_SCORES,
    Case,
    Inputs,
    Subject,
    Way,
    allowed_pairs,
    drawn,
    observe,
    plain_mask,
)

AXES = {
    "rows": "q, k and v have shape batch × token × feature",
    "heads": "q, k and v have shape batch × head × token × feature",
    "heads-last": "q, k and v have shape batch × token × head × feature",
    "columns": "q, k and v have shape batch × feature × token",
    "flat": "q, k and v have shape token × feature",
    "flat-columns": "q, k and v have shape feature × token",
}
GROUPS = [["rows", "columns"], ["heads", "heads-last"], ["flat", "flat-columns"]]
# The reference has token × feature as the last two axes; these permutations give the user's order.
ORDERS = {"columns": (0, 2, 1), "flat-columns": (1, 0), "heads-last": (0, 2, 1, 3)}


class DotProduct(Subject):
    """A function, or a module without weights."""

    part = "attention"

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name = name
        self.thing: Callable[..., Any] = self._prepared(thing)
        call = self.thing.forward if isinstance(self.thing, nn.Module) else self.thing
        self.call_of = call
        self.roles = named_roles(argument_roles(call))
        masks = [argument for argument, role in self.roles.items() if role == "mask"]
        self.forms_of_mask = forms_for(masks[0], thing, polarity) if masks else []
        self.plain = plain_mask(call, self.roles)
        self.causal = not masks and "causal" in name.lower()

    @staticmethod
    def _prepared(thing: Any) -> Any:
        if not isinstance(thing, type):
            return thing
        from vitascope.checking.building import build

        return build(thing, {"temperature": 2.0, "width": 4, "dropout": 0.1, "key_width": 4, "heads": 1})

    def native(self) -> str:
        return "F.scaled_dot_product_attention"

    def cases(self) -> list[Case]:
        sizes = {"batch": 2, "heads": 3, "queries": 5, "keys": 5, "width": 4, "value": 4}
        small = self._forced_width()
        own = "causal" if self.causal else self.plain
        cases = [
            Case("five tokens", sizes, own),
            Case("other sizes", sizes | {"batch": 3, "heads": 2, "queries": 7, "keys": 7, "width": 9, "value": 9}, own),
            Case("one token", sizes | {"queries": 1, "keys": 1}, own),
            Case("more keys than queries", sizes | {"keys": 6}, self.plain, False),
            Case("values with a different width", sizes | {"value": 3}, own, False),
        ]
        if self.forms_of_mask:
            cases += [Case("mask", sizes, "random"), Case(LARGE_MASKED_SCORES, sizes, "loud")]
        return [case for case in cases if small is None or case.sizes["width"] == small]

    def tiny_cases(self) -> list[Case]:
        own = "causal" if self.causal else self.plain
        grown = [(t, d) for t in (1, 2, 3) for d in (1, 2)]
        plain = [
            Case(f"{t} {'token' if t == 1 else 'tokens'} of width {d}", self._tiny(t, d), own, tiny=True)
            for t, d in grown
        ]
        masked = [Case(f"{t} tokens, causal", self._tiny(t, 1), "causal", tiny=True) for t in (2, 3)]
        small = self._forced_width()
        return [case for case in [*plain, *(masked if self.forms_of_mask else [])] if small in (None, 1)]

    def _tiny(self, tokens: int, width: int) -> dict[str, int]:
        return {"batch": 1, "heads": 1, "queries": tokens, "keys": tokens, "width": width, "value": width}

    def _forced_width(self) -> int | None:
        """A module that stores a width or a temperature works for that width only."""
        return (
            4
            if isinstance(self.thing, nn.Module)
            and any(compact(k) for k in vars(self.thing) if k[0] != "_" and k != "training")
            else None
        )

    def inputs(self, case: Case) -> Inputs:
        s = case.sizes
        batch, heads = s["batch"], s["heads"]
        shapes = {
            "q": (batch, heads, s["queries"], s["width"]),
            "k": (batch, heads, s["keys"], s["width"]),
            "v": (batch, heads, s["keys"], s["value"]),
        }
        given = drawn(case, shapes)
        if case.mask == "loud":  # masked keys with scores far above all others
            given["q"], given["k"] = given["q"].abs() + 0.5, given["k"] * 0.1
            given["k"][..., -1, :] = 400.0
        return given

    def groups(self) -> list[list[Way]]:
        forms = self.forms_of_mask or [None]
        return [[self._way(axes, form) for form in forms for axes in group] for group in GROUPS]

    def _way(self, axes: str, form: str | None) -> Way:
        words = (AXES[axes],) if form is None else (AXES[axes], FORMS[form][0])
        return Way(words, {"axes": axes, "form": form})

    def as_passed(self, way: Way, case: Case, inputs: Inputs) -> Inputs:
        axes = way.settings["axes"]
        return {name: arranged(self._without(axes, tensor), axes) for name, tensor in inputs.items()}

    def as_returned(self, way: Way, case: Case, result: Tensor) -> Tensor:
        return arranged(result, way.settings["axes"])

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        axes, ready = way.settings["axes"], self.as_passed(way, case, inputs)
        extra = {"dropout": 0.0, "training": False, "dk": case.sizes["width"], "width": case.sizes["width"]}
        allowed = allowed_pairs(case, case.sizes["queries"], case.sizes["keys"])
        if isinstance(self.thing, nn.Module):
            self.thing.train(self.training)
        wanted = (*self._without(axes, inputs["q"]).shape[:-1], case.sizes["value"])
        if allowed is None or self.causal:
            return arranged(picked(self._called(ready | extra), wanted), axes)
        mask = FORMS[way.settings["form"]][1](allowed, self.dtype)
        error: Exception | None = None
        for tried in tried_shapes(mask, wanted[:-2]):
            try:
                return arranged(picked(self._called({**ready, **extra, "mask": tried}), wanted), axes)
            except (RuntimeError, ValueError, IndexError, AssertionError) as raised:
                error = error or raised
        raise error or RuntimeError("no mask shape was accepted")

    def _called(self, values: dict[str, Any]) -> Any:
        run = self.thing if isinstance(self.thing, nn.Module) else self.call_of
        if run is self.call_of:
            return called_with(run, values, self.roles)
        named = {a: values[r] for a, r in self.roles.items() if r in values}
        return run(**named)

    def _without(self, axes: str, tensor: Tensor) -> Tensor:
        """Drop the head axis, and the batch axis, where the user's code does not have them."""
        tensor = tensor if axes.startswith("heads") else tensor[:, 0]
        return tensor[0] if axes.startswith("flat") else tensor

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        axes = way.settings["axes"]
        q, k, v = (self._without(axes, inputs[name]) for name in "qkv")
        return attend(q, k, v, allowed_pairs(case, case.sizes["queries"], case.sizes["keys"]), options)

    def switches(self, way: Way) -> list[Switch]:
        heads = [Switch("softmax-over-heads", {"softmax": -3})] if way.settings["axes"].startswith("heads") else []
        masks = [*MASKS, *LEAKS] if self.forms_of_mask or self.causal else []
        scales = SCALES if heads else [switch for switch in SCALES if switch.id != "scale-by-width"]
        return [*masks[:1], *scales, *MAPS, *heads, *masks[1:]]  # first the mask that changes nothing

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        return attention_evidence(self, way, theirs, ours)


def named_roles(roles: dict[str, str]) -> dict[str, str]:
    """Take the first three arguments as q, k and v where their names do not match."""
    if {"q", "k", "v"} <= set(roles.values()):
        return roles
    free = [name for name, role in roles.items() if role not in ("q", "k", "v", "mask", "dropout", "training", "heads")]
    missing = [letter for letter in "qkv" if letter not in roles.values()]
    return roles | dict(zip(free, missing, strict=False))


def arranged(tensor: Tensor, axes: str) -> Tensor:
    """Convert between our axis order and the user's; every order here is its own inverse."""
    order = ORDERS.get(axes)
    return tensor if order is None or tensor.ndim != len(order) else tensor.permute(order)


def picked(result: Any, shape: tuple[int, ...]) -> Tensor:
    """Of several results, e.g. (output, weights), return the first with the expected shape, else the first."""
    if isinstance(result, Tensor):
        return result
    parts = list(result.values()) if isinstance(result, dict) else result
    tensors = [part for part in parts if isinstance(part, Tensor)] if isinstance(parts, list | tuple) else []
    if not tensors:
        raise TypeError(f"it returned {type(result).__name__}, not a tensor")
    return next((tensor for tensor in tensors if tuple(tensor.shape) == shape), tensors[0])


def attention_evidence(subject: Subject, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
    """Describe properties of an attention whose mistake is unknown."""
    lines = []
    if theirs.shape != ours.shape:
        lines.append(f"The output has shape {list(theirs.shape)} instead of {list(ours.shape)}.")
    if not theirs.isfinite().all():
        lines.append("The output contains NaN or infinite values.")
    case = next(case for case in subject.cases() if case.required)
    inputs = {name: tensor.to(subject.dtype) for name, tensor in subject.inputs(case).items()}
    if "v" in inputs:
        ones = subject.theirs(way, case, inputs | {"v": torch.ones_like(inputs["v"])})
        sums = torch.allclose(ones, torch.ones_like(ones), atol=1e-4)
        not_one = "The rows of the attention map do not sum to 1"
        lines.append(observe(sums, "Each row of the attention map sums to 1", not_one))
        double = subject.theirs(way, case, inputs | {"v": 2 * inputs["v"]})
        doubles = torch.allclose(double, 2 * theirs)
        not_double = "Doubling the values does not double the output"
        lines.append(observe(doubles, "Doubling the values doubles the output", not_double))
    return lines
