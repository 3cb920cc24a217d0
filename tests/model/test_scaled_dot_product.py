"""Attention as a function: invariants, reference values, errors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from vitascope import UserError, attend, causal_mask
from vitascope.model.scaled_dot_product import attend_fused, compute_attention_maps, to_additive_mask

counts = st.integers(1, 7)


def test_two_tokens_by_hand() -> None:
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    value = torch.tensor([[1.0], [0.0]])
    weight = math.exp(1 / math.sqrt(2)) / (math.exp(1 / math.sqrt(2)) + 1)
    torch.testing.assert_close(attend(query, query, value), torch.tensor([[weight], [1 - weight]]))


@given(batch=counts, queries=counts, keys=counts, width=counts, value_width=counts)
def test_it_equals_pytorchs_kernel_for_any_widths(batch, queries, keys, width, value_width) -> None:
    query = torch.randn(batch, 2, queries, width, dtype=torch.float64)
    key = torch.randn(batch, 2, keys, width, dtype=torch.float64)
    value = torch.randn(batch, 2, keys, value_width, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(query, key, value)
    assert (attend(query, key, value) - expected).abs().max() < 1e-8
    assert (attend_fused(query, key, value) - expected).abs().max() < 1e-8


@given(queries=counts, keys=counts, kind=st.sampled_from(["boolean", "additive"]), data=st.data())
def test_masked_attention_equals_pytorchs_and_empty_rows_give_zeros(queries, keys, kind, data) -> None:
    rows = data.draw(
        st.lists(st.lists(st.booleans(), min_size=keys, max_size=keys), min_size=queries, max_size=queries)
    )
    mask = torch.tensor(rows)
    given_mask = mask if kind == "boolean" else to_additive_mask(mask).double()
    query, key, value = (torch.randn(1, 2, count, 4, dtype=torch.float64) for count in (queries, keys, keys))
    explicit, fused = attend(query, key, value, given_mask), attend_fused(query, key, value, given_mask)
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    full = mask.any(-1)
    assert torch.equal(
        compute_attention_maps(query, key, given_mask).sum(-1).round(decimals=12), full.double().expand(1, 2, -1)
    )
    for result in (explicit, fused):
        assert (result[:, :, ~full] == 0).all()
        torch.testing.assert_close(result[:, :, full], expected[:, :, full], atol=1e-8, rtol=0)


def test_a_mask_and_causal_attention_are_not_combined_silently() -> None:
    tokens = torch.randn(1, 1, 3, 4)
    mask = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(UserError, match=r"mask & causal_mask"):
        attend_fused(tokens, tokens, tokens, mask, causal=True)
    both = attend_fused(tokens, tokens, tokens, mask & causal_mask(3))
    torch.testing.assert_close(both, attend_fused(tokens, tokens, tokens, causal=True))


@pytest.mark.parametrize("function", [attend, attend_fused])
@pytest.mark.parametrize("blocked", [float("-inf"), torch.finfo(torch.float32).min, None])
def test_a_fully_masked_row_has_no_nan_in_its_gradient(function, blocked) -> None:
    inputs = [torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3)]
    mask = causal_mask(3)
    mask[1] = False
    output = function(*inputs, mask if blocked is None else to_additive_mask(mask, blocked))
    output.sum().backward()
    assert (output[0, 0, 1] == 0).all()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)


def test_sheet_b_with_tokens_as_columns() -> None:
    """768 × 6, columns are tokens: V · softmax(KᵀQ / √d), softmax over keys; the map is 6×6, the output 768×6."""
    query, key, value = torch.randn(3, 768, 6, dtype=torch.float64)
    by_columns = value @ ((key.T @ query) / math.sqrt(768)).softmax(dim=0)
    assert compute_attention_maps(query.T, key.T).shape == (6, 6)
    torch.testing.assert_close(attend(query.T, key.T, value.T).T, by_columns)


def test_the_own_position_does_not_always_get_the_highest_weight() -> None:
    maps = compute_attention_maps(torch.randn(16, 4), torch.randn(16, 4))
    assert (maps.argmax(-1) != torch.arange(16)).any()


@pytest.mark.parametrize(
    ("shapes", "mask", "sentence"),
    [
        (((3, 4), (3, 5), (3, 4)), None, "Queries have 4 features but keys have 5"),
        (((3, 4), (3, 4), (2, 4)), None, "There are 3 keys but 2 values"),
        (((4,), (3, 4), (3, 4)), None, "at least two axes"),
        (((2, 3, 4), (5, 3, 4), (5, 3, 4)), None, "leading axes"),
        (((3, 4), (3, 4), (3, 4)), torch.ones(2, 2, dtype=torch.bool), "does not fit scores of shape"),
        (((3, 4), (3, 4), (3, 4)), torch.ones(3, 3, dtype=torch.long), "A mask must be boolean"),
    ],
)
def test_wrong_shapes_are_errors_with_a_clear_message(shapes, mask, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        attend(*(torch.randn(shape) for shape in shapes), mask)
