"""Attention masks. True means that the query may attend to the key, as in F.scaled_dot_product_attention.

In `nn.MultiheadAttention` True means the opposite: convert its masks with `~mask`. A float mask is added to the
scores: 0 changes nothing, -inf forbids attention.
"""

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.shapes import Mask


def causal_mask(tokens: int, device: torch.device | None = None) -> Mask:
    """(query, key): True on and below the diagonal. A token attends to itself and earlier tokens."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()


def other_mask(tokens: int, device: torch.device | None = None) -> Mask:
    """(query, key): True off the diagonal. A token attends to all other tokens."""
    return ~torch.eye(tokens, dtype=torch.bool, device=device)


def additive(mask: Mask, blocked: float = float("-inf")) -> Tensor:
    """The same mask as numbers to add to the scores: 0 where attention is allowed, `blocked` elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, blocked)


def check_mask(mask: Tensor, scores_shape: torch.Size) -> None:
    """A mask must be boolean or float, and broadcast to the scores it masks."""
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise UserError(
            f"A mask must be boolean (True: may attend) or float (added to the scores); this one is {mask.dtype}."
        )
    sides = zip(reversed(mask.shape), reversed(scores_shape), strict=False)
    if not 2 <= mask.ndim <= len(scores_shape) or any(side not in (1, full) for side, full in sides):
        raise UserError(
            f"A mask of shape {list(mask.shape)} does not fit scores of shape {list(scores_shape)}: its last axes are "
            "query × key. To hide keys per image, give it as mask[:, None, None, :]."
        )


def fill_empty_rows(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a mask in which every query has a key, and the queries that had none: set their output to zero.

    Softmax over an empty set is NaN in the forward and backward pass. Such a query therefore attends to all keys, and
    its output is zeroed afterwards.
    """
    if mask.dtype == torch.bool:
        empty = ~mask.any(dim=-1, keepdim=True)
        return mask | empty, empty
    mask = mask.to(dtype)  # first: what is finite in float32 may be -inf in float16
    empty = ~(mask > torch.finfo(dtype).min).any(dim=-1, keepdim=True)
    return mask.masked_fill(empty, 0.0), empty
