"""Scaled dot-product attention, explicit and with fused kernels, and attention masks.

    maps = softmax(query · keyᵀ / √width)        one row per query, summing to 1 over the keys
    output = maps · value

(Vaswani et al. 2017, equation 1.) All three are tensors of any leading axes; the value width may differ from the
key width, and there may be more keys than queries.

In a boolean mask, True means that the query may attend to the key. In `nn.MultiheadAttention` True means the opposite:
convert its masks with `~mask`. A float mask is added to the scores: 0 changes nothing, -inf forbids attention.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitascope.errors import UserError
from vitascope.shapes import AttentionMask

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

# Largest allowed difference between the explicit and the fused output, relative to its maximum.
MAX_RELATIVE_ERRORS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def prefer_sdpa_backend(backend_name: str) -> AbstractContextManager[object]:
    """Return a context in which PyTorch uses this fused kernel, or another one if it is not available."""
    if backend_name not in BACKENDS:
        return nullcontext()
    return sdpa_kernel(
        [BACKENDS[backend_name], *(other for name, other in BACKENDS.items() if name != backend_name)], True
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """(…, query, width), (…, key, width), (…, key, value width) -> (…, query, value width), explicitly."""
    _check_qkv_shapes(query, key, value)
    return compute_attention_maps(query, key, mask) @ value


def compute_attention_maps(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """(…, query, width), (…, key, width) -> (…, query, key): rows sum to 1, or to 0 where everything is masked."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # scaled first: float16 would overflow
    if mask is None:
        return scores.softmax(dim=-1)
    check_mask_dtype_and_shape(mask, scores.shape)
    mask, empty = unmask_empty_rows(mask, query.dtype)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).masked_fill(empty, 0.0)


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout_rate: float = 0.0,
    all_rows_have_a_key: bool = False,
) -> Tensor:
    """Compute the same as `attend` with PyTorch's fused kernels, which do not store the maps.

    `all_rows_have_a_key`: the mask gives every query at least one key, so that no row needs a check. A mask excludes
    `causal`: combine them before."""
    if mask is not None and causal:
        raise UserError("Give either a mask or causal=True. To combine them, give mask & causal_mask(num_tokens).")
    if mask is None or all_rows_have_a_key:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout_rate, is_causal=causal)
    check_mask_dtype_and_shape(mask, torch.Size([*query.shape[:-1], key.shape[-2]]))
    mask, empty = unmask_empty_rows(mask, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout_rate).masked_fill(empty, 0.0)


def check_maps_reproduce_output(explicit_output: Tensor, fused_output: Tensor, block_index: int) -> None:
    """Raise an error unless maps @ value is what the fused kernel computes."""
    error = (explicit_output - fused_output).abs().max() / fused_output.abs().max().clamp(min=1e-12)
    if not error <= MAX_RELATIVE_ERRORS.get(fused_output.dtype, 1e-4):
        raise UserError(
            f"Block {block_index + 1}: the attention maps do not reproduce the block's output "
            f"(largest difference: {error:.1e} of the output's largest value)."
        )


def _check_qkv_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
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


def causal_mask(num_tokens: int, device: torch.device | None = None) -> AttentionMask:
    """(query, key): True on and below the diagonal. A token attends to itself and earlier tokens."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def off_diagonal_mask(num_tokens: int, device: torch.device | None = None) -> AttentionMask:
    """(query, key): True off the diagonal. A token attends to all other tokens."""
    return ~torch.eye(num_tokens, dtype=torch.bool, device=device)


def to_additive_mask(mask: AttentionMask, blocked_value: float = float("-inf")) -> Tensor:
    """Return the mask as values to add to the scores: 0 where attention is allowed, `blocked_value` elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, blocked_value)


def check_mask_dtype_and_shape(mask: Tensor, scores_shape: torch.Size) -> None:
    """Raise an error unless the mask is boolean or float and can be broadcast to the scores."""
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


class FilledMask(NamedTuple):
    """A mask in which every query has a key, and the queries that had none."""

    mask: Tensor
    is_empty_row: Tensor  # … × query × 1; the output of these queries must be set to zero


def unmask_empty_rows(mask: Tensor, dtype: torch.dtype) -> FilledMask:
    """Let queries without a key attend to all keys, and report them.

    Softmax over an empty set is NaN in the forward and backward pass. Such a query therefore attends to all keys, and
    its output is zeroed afterwards.
    """
    if mask.dtype == torch.bool:
        empty = ~mask.any(dim=-1, keepdim=True)
        return FilledMask(mask | empty, empty)
    mask = mask.to(dtype)  # before the test: a finite float32 value may be -inf in float16
    empty = ~(mask > torch.finfo(dtype).min).any(dim=-1, keepdim=True)
    return FilledMask(mask.masked_fill(empty, 0.0), empty)
