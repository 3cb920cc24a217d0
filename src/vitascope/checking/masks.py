"""The five common mask conventions, and which of them the user's code may follow."""

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vitascope.checking.naming import compact, polarity_in, prose_of, source_of

FORMS: dict[str, tuple[str, Callable[[Tensor, torch.dtype], Tensor]]] = {
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
MEANS_MAY = {"allowed", "visible", "keep", "valid", "keepmask", "attendmask", "allowedmask", "visiblemask"}
UNTOLD = {"mask", "m", "masks", "boolmask"}  # as F.scaled_dot_product_attention's; attn_mask may be either
MEANS_BLOCKED = {"blocked", "forbidden", "hidden", "blockedmask", "ignore", "ignoremask", "hiddenmask"}


NOT_ADDED = r"1(\.0*)?\s*-\s*\w*mask|~\s*\w*mask|mask\w*\s*==\s*(0|False)|masked_fill"


def forms_for(argument: str, thing: object, known: str | None = None) -> list[str]:
    """Return the conventions that agree with the argument's name, the comments and the file's causal mask.

    By default, True means that attention is allowed: a `mask` that masks out where it is True is inverted."""
    prose, added = prose_of(thing), not re.search(NOT_ADDED, source_of(thing))
    name = compact(argument)
    told = "may" if name in MEANS_MAY else "blocked" if name in MEANS_BLOCKED else polarity_in(prose) or known
    told = "may" if told is None and name in UNTOLD else told
    wrong = {"may": ("blocked", "zeros"), "blocked": ("may", "ones"), None: ()}[told]
    return [form for form in FORMS if form not in wrong and (added or form != "add")]


def tried_shapes(mask: Tensor, shape: Iterable[int]) -> list[Tensor]:
    """The mask as query × key, and with the scores' leading axes: batch (and head)."""
    leading = list(shape)
    wider = [mask.expand(*leading[:count], *mask.shape) for count in range(1, len(leading) + 1)]
    if len(leading) > 1:
        wider.insert(1, mask.expand(leading[0], 1, *mask.shape))
    return [mask, *wider]
