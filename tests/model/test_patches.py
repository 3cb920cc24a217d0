"""Patches: exact inverse, reading order, errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitascope import UserError, patchify, unpatchify
from vitascope.model.patches import PatchEmbed

sides = st.integers(1, 5)


@given(batch=sides, channels=sides, rows=sides, columns=sides, height=sides, width=sides)
def test_unpatchify_undoes_patchify(batch, channels, rows, columns, height, width) -> None:
    images = torch.randn(batch, channels, rows * height, columns * width)
    patches = patchify(images, (height, width))
    assert patches.shape == (batch, rows * columns, channels * height * width)
    assert torch.equal(unpatchify(patches, (height, width), (rows, columns)), images)


def test_patches_come_in_reading_order() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert patchify(image, 2)[0].tolist() == expected


def test_embedding_patches_is_the_convolution_it_replaces() -> None:
    embed = PatchEmbed(patch_size=(2, 4), in_chans=3, embed_dim=5).double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(embed(images), embed.proj(images).flatten(2).transpose(1, 2))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: patchify(torch.randn(1, 3, 28, 28), 16), "patch_size=16 does not divide images of 28×28"),
        (lambda: patchify(torch.randn(3, 28, 28), 7), "batch × channel × height × width"),
        (lambda: unpatchify(torch.randn(1, 6, 4), 2), "6 patches do not fill a grid of 2×2"),
        (lambda: unpatchify(torch.randn(1, 4, 5), 2), "multiple of 2×2 pixels"),
        (lambda: unpatchify(torch.randn(1, 0, 4), 2), "multiple of 2×2 pixels"),
        (lambda: patchify(torch.randn(1, 3, 28, 28), 0), "patch_size=0 is too small"),
    ],
)
def test_sizes_that_do_not_divide_are_errors(call, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        call()
