"""Scaled dot-product attention, written out and with fused kernels.

    maps = softmax(query · keyᵀ / √width)        one row per query, summing to 1 over the keys
    output = maps · value

(Vaswani et al. 2017, equation 1.) All three are tensors of any leading axes; the value width may differ from the
key width, and there may be more keys than queries.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitascope.errors import UserError
from vitascope.model.masks import check_mask, fill_empty_rows

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def preferring(kernel: str) -> AbstractContextManager[object]:
    """Context in which PyTorch prefers this fused kernel, and uses another one where it is not available."""
    if kernel not in BACKENDS:
        return nullcontext()
    return sdpa_kernel([BACKENDS[kernel], *(other for name, other in BACKENDS.items() if name != kernel)], True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """(…, query, width), (…, key, width), (…, key, value width) -> (…, query, value width), written out."""
    _check(query, key, value)
    return attention_maps(query, key, mask) @ value


def attention_maps(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """(…, query, width), (…, key, width) -> (…, query, key): rows sum to 1, or to 0 where everything is masked."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # scaled first: float16 would overflow
    if mask is None:
        return scores.softmax(dim=-1)
    check_mask(mask, scores.shape)
    mask, empty = fill_empty_rows(mask, query.dtype)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).masked_fill(empty, 0.0)


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    sure: bool = False,
) -> Tensor:
    """The same as `attend`, by PyTorch's fused kernels: the maps never reach memory.

    `sure`: every query has at least one unmasked key, so empty rows need no check."""
    if mask is None or sure:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, is_causal=causal)
    check_mask(mask, torch.Size([*query.shape[:-1], key.shape[-2]]))
    mask, empty = fill_empty_rows(mask, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout).masked_fill(empty, 0.0)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = [list(tensor.shape) for tensor in (query, key, value)]
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise UserError("Queries, keys and values need at least two axes: token × feature.")
    if query.shape[-1] != key.shape[-1]:
        raise UserError(f"Queries have {query.shape[-1]} features but keys have {key.shape[-1]}. Make them equal.")
    if key.shape[-2] != value.shape[-2]:
        raise UserError(f"There are {key.shape[-2]} keys but {value.shape[-2]} values. Give one value per key.")
    try:
        torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except RuntimeError as error:
        raise UserError(f"The leading axes of queries, keys and values cannot be broadcast: {shapes}.") from error
