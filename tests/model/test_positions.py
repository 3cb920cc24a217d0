"""Positions: reference values by hand and from timm, relative rotations, resampling."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import RotaryEmbedding, apply_rot_embed

from vitascope import UserError
from vitascope.model.positions import (
    apply_rotary_positions,
    make_rotary_table,
    make_sincos2d_table,
    make_sinusoidal_table,
    resample_position_table,
)


def test_sinusoidal_positions_follow_the_formula() -> None:
    table = make_sinusoidal_table(100, 16)
    for position, pair in ((0, 0), (1, 0), (7, 3), (99, 7)):
        angle = position / 10000 ** (2 * pair / 16)
        assert table[position, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-12)
        assert table[position, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


@given(length=st.integers(1, 50), more=st.integers(0, 50))
def test_sinusoidal_positions_extend_to_longer_sequences(length, more) -> None:
    assert torch.equal(make_sinusoidal_table(length + more, 8)[:length], make_sinusoidal_table(length, 8))


def test_2d_sincos_positions_by_hand() -> None:
    table = make_sincos2d_table((2, 2), 8)
    sine, cosine = math.sin(1), math.cos(1)
    across = torch.tensor([sine, math.sin(0.01), cosine, math.cos(0.01), 0, 0, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(table[1], across)
    torch.testing.assert_close(table[2], across.roll(4))


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), quarter=st.integers(1, 8))
def test_2d_sincos_rows_are_distinct_and_of_one_length(rows, columns, quarter) -> None:
    table = make_sincos2d_table((rows, columns), 4 * quarter)
    torch.testing.assert_close(table.square().sum(1), torch.full((rows * columns,), 2.0 * quarter).double())
    assert len(table.unique(dim=0)) == rows * columns


def test_a_rotation_keeps_dot_products_by_relative_position() -> None:
    table = make_rotary_table((5, 5), 4, base=100.0).double()
    one = torch.tensor([1.0, 0, 1, 0]).double().expand(1, 1, 25, 4)
    rotated = apply_rotary_positions(one, table)[0, 0].view(5, 5, 4)
    for (row, column), (other_row, other_column) in (((0, 0), (1, 2)), ((3, 1), (4, 3))):
        product = (rotated[row, column] * rotated[other_row, other_column]).sum().item()
        assert product == pytest.approx(math.cos(1) + math.cos(2), abs=1e-6)  # 0.124155
    torch.testing.assert_close(rotated.norm(dim=-1), one[0, 0].norm(dim=-1).view(5, 5))


@pytest.mark.parametrize("grid", [(8, 8), (2, 5)])
def test_rotary_positions_are_timms(grid) -> None:
    timm_result = RotaryEmbedding(16, in_pixels=False, feat_shape=grid, temperature=100.0)
    heads = torch.randn(2, 3, grid[0] * grid[1], 16)
    sine, cosine = timm_result.get_embed()
    expected = apply_rot_embed(heads, sine, cosine)
    torch.testing.assert_close(
        apply_rotary_positions(heads, make_rotary_table(grid, 16, 100.0)), expected, atol=1e-5, rtol=0
    )


def test_prefix_tokens_are_not_rotated() -> None:
    heads = torch.randn(1, 2, 6, 8)
    rotated = apply_rotary_positions(heads, make_rotary_table((2, 2), 8, 100.0, num_prefix_tokens=2))
    torch.testing.assert_close(rotated[:, :, :2], heads[:, :, :2])
    assert not torch.allclose(rotated[:, :, 4:], heads[:, :, 4:])


@pytest.mark.parametrize(("old", "new", "prefix"), [((4, 4), (7, 5), 1), ((3, 6), (6, 3), 0), ((8, 8), (4, 4), 5)])
def test_resampling_a_table_is_timms(old, new, prefix) -> None:
    table = torch.randn(1, prefix + old[0] * old[1], 12)
    timm_result = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=prefix)
    torch.testing.assert_close(resample_position_table(table, old, new, prefix), timm_result)
    assert torch.equal(resample_position_table(table, old, old, prefix), table)


def test_a_table_that_does_not_fit_its_grid_is_an_error() -> None:
    with pytest.raises(UserError, match="has shape"):
        resample_position_table(torch.randn(1, 17, 8), (4, 4), (2, 2))
    with pytest.raises(UserError, match="must be even"):
        make_sinusoidal_table(4, 3)
    with pytest.raises(UserError, match="must be a multiple of 4"):
        make_sincos2d_table((2, 2), 6)
