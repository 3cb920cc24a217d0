"""Mask conventions, and the part `causal-mask`: a mask that blocks attention to later tokens."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitascope.coursework.checker.argument_names import (
    get_docs_and_comments,
    get_source,
    normalize_identifier,
    parse_mask_polarity,
)
from vitascope.coursework.checker.attention_layers import CorrectVariant
from vitascope.coursework.checker.part import CallConvention, Case, NamedTensors, PartChecker
from vitascope.coursework.checker.reference import ReferenceOptions, SimulatedMistake

MASK_FORMATS: dict[str, tuple[str, Callable[[Tensor, torch.dtype], Tensor]]] = {
    "may": ("in a boolean mask, True means that attention is allowed", lambda allowed, dtype: allowed),
    "add": (
        "the mask is additive: 0 where attention is allowed, -inf elsewhere",
        lambda allowed, dtype: torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf),
    ),
    "blocked": (
        "in a boolean mask, True means masked out, as in nn.MultiheadAttention",
        lambda allowed, dtype: ~allowed,
    ),
    "ones": (
        "in the mask, 1 means that attention is allowed and 0 means masked out",
        lambda allowed, dtype: allowed.to(dtype),
    ),
    "zeros": (
        "in the mask, 1 means masked out and 0 means that attention is allowed",
        lambda allowed, dtype: (~allowed).to(dtype),
    ),
}
ALLOWED_MASK_NAMES = {"allowed", "visible", "keep", "valid", "keepmask", "attendmask", "allowedmask", "visiblemask"}
NEUTRAL_MASK_NAMES = {"mask", "m", "masks", "boolmask"}  # as F.scaled_dot_product_attention's; attn_mask may be either
BLOCKED_MASK_NAMES = {"blocked", "forbidden", "hidden", "blockedmask", "ignore", "ignoremask", "hiddenmask"}


NOT_ADDITIVE_PATTERN = r"1(\.0*)?\s*-\s*\w*mask|~\s*\w*mask|mask\w*\s*==\s*(0|False)|masked_fill"


def list_mask_formats(argument_name: str, user_code: object, causal_mask_polarity: str | None = None) -> list[str]:
    """Return the conventions that agree with the argument's name, the comments and the file's causal mask.

    By default, True means that attention is allowed: a `mask` that masks out where it is True is inverted."""
    prose, added = get_docs_and_comments(user_code), not re.search(NOT_ADDITIVE_PATTERN, get_source(user_code))
    name = normalize_identifier(argument_name)
    told = (
        "may"
        if name in ALLOWED_MASK_NAMES
        else "blocked"
        if name in BLOCKED_MASK_NAMES
        else parse_mask_polarity(prose) or causal_mask_polarity
    )
    told = "may" if told is None and name in NEUTRAL_MASK_NAMES else told
    wrong = {"may": ("blocked", "zeros"), "blocked": ("may", "ones"), None: ()}[told]
    return [form for form in MASK_FORMATS if form not in wrong and (added or form != "add")]


def list_broadcast_masks(mask: Tensor, leading_shape: Iterable[int]) -> list[Tensor]:
    """The mask as query × key, and with the scores' leading axes: batch (and head)."""
    leading = list(leading_shape)
    wider = [mask.expand(*leading[:count], *mask.shape) for count in range(1, len(leading) + 1)]
    if len(leading) > 1:
        wider.insert(1, mask.expand(leading[0], 1, *mask.shape))
    return [mask, *wider]


MASKED_SCORE_LIMIT = -1000.0  # a masked score must be lowered by at least this amount


class CausalMaskChecker(PartChecker):
    """f(number of tokens)."""

    part = "causal-mask"

    def __init__(self, name: str, user_code: Any, mask_polarity: str | None = None) -> None:
        self.name = name
        self.user_code = user_code() if isinstance(user_code, type) and issubclass(user_code, nn.Module) else user_code
        self.documented_polarity = parse_mask_polarity(get_docs_and_comments(user_code))

    def get_reference_name(self) -> str:
        return "torch.tril"

    def list_cases(self) -> list[Case]:
        one = Case("one token", {"tokens": 1}, "causal", required=False)
        return [*(Case(f"{n} tokens", {"tokens": n}, "causal") for n in (5, 2, 7)), one]

    def list_tiny_cases(self) -> list[Case]:
        return [Case("two tokens", {"tokens": 2}, "causal", tiny=True)]

    def make_inputs(self, case: Case) -> NamedTensors:
        return {}

    def list_convention_groups(self) -> list[list[CallConvention]]:
        return [[CallConvention((), {"given": "number"})], [CallConvention((), {"given": "tensor"})]]

    def run_user_code(self, convention: CallConvention, case: Case, inputs: NamedTensors) -> Tensor:
        n = case.sizes["tokens"]
        given = n if convention.settings["given"] == "number" else torch.zeros(2, n, 4)
        out = self.user_code(given)
        out = out if isinstance(out, Tensor) else torch.as_tensor(out)
        while out.ndim > 2:
            out = out[0]
        return out.double()

    def run_reference(
        self, convention: CallConvention, case: Case, inputs: NamedTensors, options: ReferenceOptions
    ) -> Tensor:
        n = case.sizes["tokens"]
        may = torch.ones(n, n, dtype=torch.bool).tril()
        if options.get("turned"):
            may = may.T if options["turned"] == "transposed" else ~may
        low, high = options["values"]
        return torch.full((n, n), float(low), dtype=torch.float64).masked_fill(~may, float(options.get("fill", high)))

    def list_correct_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        found = self._list_mask_values(convention)
        lowest = min(found) if found else -torch.inf
        forms: list[tuple[str | None, float, float, str]] = [
            ("may", 1, 0, "True (or 1) means that attention is allowed"),
            ("blocked", 0, 1, "True (or 1) means masked out"),
            (
                None,
                0,
                lowest if lowest <= MASKED_SCORE_LIMIT else -torch.inf,
                "the mask is additive: it is added to the scores",
            ),
        ]
        if found and lowest < 0:  # only an additive mask has negative values
            forms = forms[2:]
        fitting = [form for form in forms if form[0] in (None, self.documented_polarity or form[0])]
        return [({"values": (low, high)}, (words,)) for _, low, high, words in fitting]

    def _list_mask_values(self, convention: CallConvention) -> list[float]:
        try:
            return self.run_user_code(convention, self.list_cases()[0], {}).flatten().unique().tolist()
        except Exception:
            return []

    def list_simulated_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        leaks = [
            value
            for value in self._list_mask_values(convention)
            if MASKED_SCORE_LIMIT < value < 0 or (value > 0 and value != 1)
        ]
        return [
            *(SimulatedMistake("mask-inverted", {"turned": how}) for how in ("transposed", "not")),
            *(SimulatedMistake("mask-too-small", {"fill": value}) for value in leaks),
        ]

    def describe_evidence(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        if user_result.shape != reference_result.shape:
            return [f"The mask has shape {list(user_result.shape)} instead of {list(reference_result.shape)}."]
        values = ", ".join(f"{value:g}" for value in user_result.flatten().unique().tolist()[:6])
        return [f"The mask contains the values {values}. Its first row is {user_result[0].tolist()}."]

    def detect_mask_polarity(self) -> str | None:
        """What True means in the user's mask: may (attention is allowed), blocked, or None if unknown."""
        for way in (group[0] for group in self.list_convention_groups()):
            try:
                out = self.run_user_code(way, self.list_cases()[0], {})
            except Exception:
                continue
            triangle = torch.ones_like(out).tril()
            if torch.equal(out, triangle):
                return "may"
            if torch.equal(out, 1 - triangle):
                return "blocked"
        return None
