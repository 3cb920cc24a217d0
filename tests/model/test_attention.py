"""SelfAttention: attention maps, symmetries, masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vitascope import SelfAttention, SelfAttention2d, SingleHeadAttention, UserError, causal_mask
from vitascope.model.positions import make_rotary_table
from vitascope.model.scaled_dot_product import compute_attention_maps

settings = st.fixed_dictionaries(
    {
        "qkv_bias": st.booleans(),
        "qk_norm": st.booleans(),
        "output_projection": st.booleans(),
        "causal": st.booleans(),
        "norm": st.sampled_from(["layernorm", "rmsnorm"]),
    }
)


def make_attention(width: int = 16, heads: int = 2, **settings) -> SelfAttention:
    layer = SelfAttention(width, heads, **settings).double().eval()
    for parameter in layer.parameters():  # biases and norms away from zeros and ones
        nn.init.normal_(parameter, std=0.5)
    return layer


@given(settings=settings, heads=st.sampled_from([1, 2, 4]), tokens=st.integers(1, 9), masked=st.booleans())
def test_mixing_by_the_maps_equals_the_fused_kernel(settings, heads, tokens, masked) -> None:
    module = make_attention(16, heads, **settings)
    x = torch.randn(2, tokens, 16, dtype=torch.float64)
    mask = torch.rand(2, tokens, tokens) > 0.4 if masked else None
    for table in (None, make_rotary_table((1, tokens), 16 // heads, 100.0).double()):
        maps = module.maps(x, mask, table)
        torch.testing.assert_close(module.mix(maps, x), module(x, mask, table), atol=1e-8, rtol=0)


def test_rotary_positions_rotate_queries_and_keys_and_not_values() -> None:
    """Only relative positions matter: shifting the entire grid changes nothing."""
    module, x = make_attention(), torch.randn(1, 4, 16, dtype=torch.float64)
    table = make_rotary_table((3, 3), 8, 100.0).double()
    rotation, moved = table[:, [0, 1, 3, 4]], table[:, [4, 5, 7, 8]]
    torch.testing.assert_close(module(x, rotation=rotation), module(x, rotation=moved), atol=1e-6, rtol=0)
    assert (module(x, rotation=rotation) - module(x)).abs().max() > 1e-3


@pytest.mark.parametrize("rate", ["attn_drop_rate", "proj_drop_rate"])
def test_each_dropout_of_attention_acts_by_itself(rate) -> None:
    module, x = make_attention(**{rate: 0.5}).train(), torch.randn(1, 6, 16, dtype=torch.float64)
    assert not torch.equal(module(x), module(x))


@given(settings=settings, tokens=st.integers(1, 9))
def test_rows_of_maps_sum_to_one(settings, tokens) -> None:
    maps = make_attention(**settings).maps(torch.randn(2, tokens, 16, dtype=torch.float64))
    assert maps.shape == (2, 2, tokens, tokens)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, tokens, dtype=torch.float64))


@given(tokens=st.integers(2, 9), seed=st.integers(0, 9))
def test_shuffling_tokens_shuffles_the_output_the_same_way(tokens, seed) -> None:
    module, x = make_attention(), torch.randn(2, tokens, 16, dtype=torch.float64)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], atol=1e-8, rtol=0)


@given(tokens=st.integers(2, 9), cut=st.integers(1, 8), own_mask=st.booleans())
def test_a_causal_output_ignores_later_tokens(tokens, cut, own_mask) -> None:
    cut = min(cut, tokens - 1)
    module, mask = (make_attention(), causal_mask(tokens)) if own_mask else (make_attention(causal=True), None)
    x = torch.randn(1, tokens, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, cut:] += 1
    before, after = module(x, mask), module(changed, mask)
    torch.testing.assert_close(before[:, :cut], after[:, :cut], atol=1e-12, rtol=0)
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("additive_mask", [False, True])
def test_a_causal_module_keeps_its_callers_mask(additive_mask) -> None:
    module, x = make_attention(causal=True), torch.randn(1, 5, 16, dtype=torch.float64)
    visible = torch.tensor([True, False, True, True, True])[None, None, None]
    mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf")).double() if additive_mask else visible
    maps = module.maps(x, mask)
    assert (maps[..., 1] == 0).all() and (maps.triu(1) == 0).all()
    torch.testing.assert_close(module.mix(maps, x), module(x, mask))


def test_a_mask_per_image_and_one_per_head_are_accepted() -> None:
    module, x = make_attention(), torch.randn(2, 3, 16, dtype=torch.float64)
    per_image = torch.rand(2, 3, 3) > 0.5
    torch.testing.assert_close(module(x, per_image), module(x, per_image[:, None].expand(-1, 2, -1, -1)))


@pytest.mark.parametrize(
    ("mask_dtype", "dtype", "blocked"),
    [
        (torch.float32, torch.float16, -1e9),
        (torch.float64, torch.float32, -1e300),
        (torch.float32, torch.float16, -1e5),
    ],
)
def test_both_paths_agree_on_what_a_number_format_blocks(mask_dtype, dtype, blocked) -> None:
    module = SelfAttention(16, 2).to(dtype).eval()
    mask = torch.zeros(3, 3, dtype=mask_dtype)
    mask[1] = blocked
    x = torch.randn(1, 3, 16, dtype=dtype)
    torch.testing.assert_close(module.mix(module.maps(x, mask), x), module(x, mask), atol=2e-3, rtol=0)


def test_large_scores_do_not_overflow_in_float16() -> None:
    query = torch.full((1, 2, 64), 40.0, dtype=torch.float16)  # the unscaled product is 102,400
    assert compute_attention_maps(query, query).isfinite().all()


def test_attention_dropout_acts_in_training_only() -> None:
    module, x = make_attention(attn_drop_rate=0.5), torch.randn(1, 6, 16, dtype=torch.float64)
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def test_sheet_c_projections_have_names() -> None:
    module, x = SelfAttention(768, 12), torch.randn(1, 5, 768)
    query, key, value = module.compute_queries_keys_values(x)
    assert query.shape == (1, 12, 5, 64)
    weights = (module.W_Q, module.W_K, module.W_V)
    for heads, weight, bias in zip((query, key, value), weights, module.qkv.bias.chunk(3), strict=True):
        assert weight.shape == (768, 768)
        torch.testing.assert_close((x @ weight.T + bias).view(1, 5, 12, 64).transpose(1, 2), heads)


def test_sheet_c_single_head_has_a_value_width_of_its_own() -> None:
    module = SingleHeadAttention(256, key_width=64, value_width=256)
    assert module.query.weight.T.shape == module.key.weight.T.shape == (256, 64)
    assert module.value.weight.T.shape == (256, 256)
    assert module(torch.randn(2, 5, 256)).shape == (2, 5, 256)


def test_sheet_a_takes_three_inputs_and_self_attention_is_the_case_of_one() -> None:
    module, x = SingleHeadAttention(8), torch.randn(2, 5, 8)
    torch.testing.assert_close(module(x), module(x, x, x))
    assert module(x, torch.randn(2, 7, 8), torch.randn(2, 7, 8)).shape == (2, 5, 8)
    torch.testing.assert_close(module.maps(x).sum(-1), torch.ones(2, 5))
    packed = SelfAttention(8, output_projection=False)
    packed.qkv.weight.data = torch.cat([module.query.weight, module.key.weight, module.value.weight])
    packed.qkv.bias.data = torch.cat([module.query.bias, module.key.bias, module.value.bias])
    torch.testing.assert_close(packed(x), module(x))


@given(heads=st.sampled_from([1, 2, 4]), height=st.integers(1, 4), width=st.integers(1, 4))
def test_attention_over_a_grid_is_attention_over_its_cells(heads, height, width) -> None:
    module = SelfAttention2d(16, heads).eval()
    grid = torch.randn(2, 16, height, width)
    reference = nn.MultiheadAttention(16, heads, batch_first=True).eval()
    reference.in_proj_weight.data, reference.in_proj_bias.data = module.attn.qkv.weight.data, module.attn.qkv.bias.data
    reference.out_proj.load_state_dict(module.attn.proj.state_dict())
    cells = grid.flatten(2).transpose(1, 2)
    expected, maps = reference(cells, cells, cells, average_attn_weights=False)
    torch.testing.assert_close(module(grid), expected.transpose(1, 2).reshape(grid.shape), atol=1e-5, rtol=0)
    torch.testing.assert_close(module.maps(grid), maps, atol=1e-5, rtol=0)
    torch.testing.assert_close(module.mix(module.maps(grid), grid), module(grid), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: SelfAttention(10, 3), "num_heads=3 does not divide embed_dim=10"),
        (lambda: SelfAttention(8, 2)(torch.randn(3, 8)), "batch × token × feature"),
        (lambda: SelfAttention(8, 2)(torch.randn(2, 3, 9)), "9 features, the layer was built for embed_dim=8"),
        (lambda: SelfAttention(8, 2).maps(torch.randn(2, 3, 9)), "9 features, the layer was built for embed_dim=8"),
        (lambda: SelfAttention(8, 2)(torch.randn(2, 3, 8), torch.ones(2, 3) > 0), "does not fit"),
        (lambda: SelfAttention(8, 2)(torch.randn(2, 3, 8), torch.ones(3) > 0), "does not fit"),
        (
            lambda: SelfAttention(8, 2, causal=True)(torch.randn(2, 3, 8), torch.ones(3, 3).long()),
            "A mask must be bool",
        ),
        (lambda: SelfAttention(8, 0), "num_heads=0 must be at least 1"),
        (lambda: SelfAttention(8, 2, qk_norm=True, norm="layer"), "norm='layer' is unknown. Did you mean layernorm"),
        (lambda: SelfAttention(8, 2)(torch.zeros(2, 3, 8).long()), "the layer needs floats"),
        (lambda: SingleHeadAttention(8, key_width=0), "Widths must be at least 1"),
        (lambda: SingleHeadAttention(8)(torch.randn(2, 3, 9)), "9 features"),
        (lambda: SelfAttention2d(8, 2)(torch.randn(2, 4, 3, 3)), "batch × 8 channels"),
    ],
)
def test_wrong_input_is_an_error_with_a_clear_message(call, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        call()
