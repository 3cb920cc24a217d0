"""Define the mask formats, and check the part `causal-mask`: a mask that blocks attention to later tokens."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitascope.coursework.checker.part_checker import (
    CallConvention,
    Case,
    CorrectVariant,
    MaskPolarity,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
)
from vitascope.coursework.checker.recognition import (
    UserCode,
    find_mask_polarity,
    get_docs_and_comments,
    get_source_or_empty,
    normalize_identifier,
)
from vitascope.coursework.checker.reference import ReferenceVariant, SimulatedMistake


class MaskFormat(NamedTuple):
    """A format of the mask argument, and the conversion from a mask that is True where attention is allowed."""

    description: str
    convert: Callable[[Tensor, torch.dtype], Tensor]


class MaskValues(NamedTuple):
    """The values of a correct causal mask where attention is allowed and where it is blocked."""

    polarity: MaskPolarity | None  # None: an additive mask
    allowed_value: float
    blocked_value: float
    description: str


MASK_FORMATS: dict[str, MaskFormat] = {
    "allowed": MaskFormat("in a boolean mask, True means that attention is allowed", lambda allowed, dtype: allowed),
    "add": MaskFormat(
        "the mask is additive: 0 where attention is allowed, -inf elsewhere",
        lambda allowed, dtype: torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf),
    ),
    "blocked": MaskFormat(
        "in a boolean mask, True means masked out, as in nn.MultiheadAttention",
        lambda allowed, dtype: ~allowed,
    ),
    "ones": MaskFormat(
        "in the mask, 1 means that attention is allowed and 0 means masked out",
        lambda allowed, dtype: allowed.to(dtype),
    ),
    "zeros": MaskFormat(
        "in the mask, 1 means masked out and 0 means that attention is allowed",
        lambda allowed, dtype: (~allowed).to(dtype),
    ),
}
ALLOWED_MASK_NAMES = {"allowed", "visible", "keep", "valid", "keepmask", "attendmask", "allowedmask", "visiblemask"}
NEUTRAL_MASK_NAMES = {"mask", "m", "masks", "boolmask"}  # as F.scaled_dot_product_attention's; attn_mask may be either
BLOCKED_MASK_NAMES = {"blocked", "forbidden", "hidden", "blockedmask", "ignore", "ignoremask", "hiddenmask"}


NOT_ADDITIVE_PATTERN = r"1(\.0*)?\s*-\s*\w*mask|~\s*\w*mask|mask\w*\s*==\s*(0|False)|masked_fill"
ADDED_MASK_PATTERN = r"\+=?\s*\w*mask\b|\bmask\s*\+"  # such as scores + attn_mask: probably additive, so tried first
DOCUMENTED_ADDITIVE_PATTERN = r"(?<!not )(?<!not an )\badditive\b|(?<!not )\badded to the (attention )?(scores|logits)"


def list_plausible_mask_formats(
    argument_name: str, user_code: object, causal_mask_polarity: MaskPolarity | None = None
) -> list[str]:
    """Return the mask formats that agree with the argument's name, the comments and the file's causal mask.

    By default, True means that attention is allowed: a `mask` that masks out where it is True is inverted."""
    documentation, source = get_docs_and_comments(user_code), get_source_or_empty(user_code)
    if re.search(DOCUMENTED_ADDITIVE_PATTERN, documentation, re.IGNORECASE):
        return ["add"]
    may_be_additive = not re.search(NOT_ADDITIVE_PATTERN, source)
    name = normalize_identifier(argument_name)
    polarity = (
        "allowed"
        if name in ALLOWED_MASK_NAMES
        else "blocked"
        if name in BLOCKED_MASK_NAMES
        else find_mask_polarity(documentation) or causal_mask_polarity
    )
    polarity = "allowed" if polarity is None and name in NEUTRAL_MASK_NAMES else polarity
    wrong = {"allowed": ("blocked", "zeros"), "blocked": ("allowed", "ones"), None: ()}[polarity]
    formats = [
        mask_format
        for mask_format in MASK_FORMATS
        if mask_format not in wrong and (may_be_additive or mask_format != "add")
    ]
    is_added = may_be_additive and re.search(ADDED_MASK_PATTERN, source)
    return sorted(formats, key=lambda mask_format: mask_format != "add") if is_added else formats


def list_expanded_masks(mask: Tensor, leading_shape: Iterable[int]) -> list[Tensor]:
    """Return the mask as query × key, and with the scores' leading axes: batch (and head)."""
    leading = list(leading_shape)
    expanded = [mask.expand(*leading[:count], *mask.shape) for count in range(1, len(leading) + 1)]
    if len(leading) > 1:
        expanded.insert(1, mask.expand(leading[0], 1, *mask.shape))
    return [mask, *expanded]


MASKED_SCORE_LIMIT = -1000.0  # a masked score must be lowered by at least this amount


class CausalMaskChecker(PartChecker):
    """Check a function f(num_tokens)."""

    part = "causal-mask"

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name = name
        self.user_code = user_code() if isinstance(user_code, type) and issubclass(user_code, nn.Module) else user_code
        self.documented_polarity = find_mask_polarity(get_docs_and_comments(user_code))

    def get_reference_name(self) -> str:
        return "torch.tril"

    def list_cases(self) -> list[Case]:
        one = Case("one token", {"tokens": 1}, "causal", required=False)
        return [*(Case(f"{n} tokens", {"tokens": n}, "causal") for n in (5, 2, 7)), one]

    def list_tiny_example_cases(self) -> list[Case]:
        return [Case("two tokens", {"tokens": 2}, "causal", tiny=True)]

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        return {}

    def list_convention_groups(self) -> list[list[CallConvention]]:
        return [[CallConvention((), {"argument": "num_tokens"})], [CallConvention((), {"argument": "tokens"})]]

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        n = case.sizes["tokens"]
        argument = n if convention.settings["argument"] == "num_tokens" else torch.zeros(2, n, 4)
        out = self.user_code(argument)
        out = out if isinstance(out, Tensor) else torch.as_tensor(out)
        while out.ndim > 2:
            out = out[0]
        return out.double()

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        n = case.sizes["tokens"]
        allowed = torch.ones(n, n, dtype=torch.bool).tril()
        if variant_or_mistakes.get("mask_change"):
            allowed = allowed.T if variant_or_mistakes["mask_change"] == "transposed" else ~allowed
        allowed_value, blocked_value = variant_or_mistakes["values"]
        mask = torch.full((n, n), float(allowed_value), dtype=torch.float64)
        return mask.masked_fill(~allowed, float(variant_or_mistakes.get("fill", blocked_value)))

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        values = self._run_user_code_and_list_mask_values(convention)
        lowest = min(values) if values else -torch.inf
        additive_value = lowest if lowest <= MASKED_SCORE_LIMIT else -torch.inf
        additive = MaskValues(None, 0, additive_value, "the mask is additive: it is added to the scores")
        candidates = [
            MaskValues("allowed", 1, 0, "True (or 1) means that attention is allowed"),
            MaskValues("blocked", 0, 1, "True (or 1) means masked out"),
            additive,
        ]
        if values and lowest < 0:  # only an additive mask has negative values
            candidates = [additive]
        return [
            CorrectVariant({"values": (mask.allowed_value, mask.blocked_value)}, (mask.description,))
            for mask in candidates
            if mask.polarity in (None, self.documented_polarity or mask.polarity)
        ]

    def _run_user_code_and_list_mask_values(self, convention: CallConvention) -> list[float]:
        try:
            return self.run_user_code_and_restore_axes(convention, self.list_cases()[0], {}).flatten().unique().tolist()
        except Exception:
            return []

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        leaks = [
            value
            for value in self._run_user_code_and_list_mask_values(convention)
            if MASKED_SCORE_LIMIT < value < 0 or (value > 0 and value != 1)
        ]
        return [
            SimulatedMistake("mask-transposed", {"mask_change": "transposed"}),
            SimulatedMistake("mask-inverted", {"mask_change": "not"}),
            *(SimulatedMistake("mask-too-small", {"fill": value}) for value in leaks),
        ]

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        if user_result.shape != reference_result.shape:
            return [f"The mask has shape {list(user_result.shape)} instead of {list(reference_result.shape)}."]
        values = ", ".join(f"{value:g}" for value in user_result.flatten().unique().tolist()[:6])
        return [f"The mask contains the values {values}. Its first row is {user_result[0].tolist()}."]

    def detect_mask_polarity(self) -> MaskPolarity | None:
        """Return the meaning of True in the user's mask, or None if it is unknown."""
        for convention in (group[0] for group in self.list_convention_groups()):
            try:
                out = self.run_user_code_and_restore_axes(convention, self.list_cases()[0], {})
            except Exception:
                continue
            triangle = torch.ones_like(out).tril()
            if torch.equal(out, triangle):
                return "allowed"
            if torch.equal(out, 1 - triangle):
                return "blocked"
        return None
