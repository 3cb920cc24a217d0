"""Shifted patches, LSA, convolutional tokenizer, mimetic and conv-like initialisation, compared with the papers."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model.combinations import TINY
from vitascope import ModelConfig, UserError, VisionTransformer, explain
from vitascope.model import initialize
from vitascope.model.anatomy import count_parameters
from vitascope.model.attention import SelfAttention
from vitascope.model.patches import ShiftedPatchEmbed, concat_shifted_copies, patchify
from vitascope.recipe.train import TrainConfig
from vitascope.training.optim.build import make_optimizers


def test_shifted_images_as_worked_out_by_hand() -> None:
    """x = 0 … 15 as 4×4, patches of 2: shifts by 1 pixel."""
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    whole, above_left, above_right, below_left, below_right = concat_shifted_copies(image, 2)[0]
    assert whole.equal(image[0, 0])
    assert above_left.tolist() == [[0, 0, 0, 0], [0, 0, 1, 2], [0, 4, 5, 6], [0, 8, 9, 10]]
    assert above_right.tolist() == [[0, 0, 0, 0], [1, 2, 3, 0], [5, 6, 7, 0], [9, 10, 11, 0]]
    assert below_left.tolist() == [[0, 4, 5, 6], [0, 8, 9, 10], [0, 12, 13, 14], [0, 0, 0, 0]]
    assert below_right.tolist() == [[5, 6, 7, 0], [9, 10, 11, 0], [13, 14, 15, 0], [0, 0, 0, 0]]
    token = (
        patchify(concat_shifted_copies(image, 2), 2)[0, 0].reshape(5, 4).T.flatten()
    )  # the authors' order: channel fastest
    assert token.tolist() == [0, 0, 0, 0, 5, 1, 0, 0, 4, 6, 4, 0, 1, 0, 9, 5, 0, 2, 8, 10]


def test_patches_of_one_pixel_have_nothing_to_shift_by() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert concat_shifted_copies(image, 1).equal(image.repeat(1, 5, 1, 1))


@pytest.mark.parametrize("patch", [(4, 4), (7, 7), (2, 6)])
def test_shifted_patch_tokens_against_the_equations_pixel_by_pixel(patch) -> None:
    torch.manual_seed(0)
    rows, columns = patch
    embed = ShiftedPatchEmbed(patch_size=patch, in_chans=2, embed_dim=5).double()
    torch.nn.init.normal_(embed.norm.weight)
    torch.nn.init.normal_(embed.norm.bias)
    image = torch.randn(1, 2, 2 * rows, 3 * columns, dtype=torch.float64)

    def pixel(channel: int, row: int, column: int) -> float:
        inside = 0 <= row < image.shape[2] and 0 <= column < image.shape[3]
        return float(image[0, channel, row, column]) if inside else 0.0

    directions = [(0, 0), (-1, -1), (-1, 1), (1, -1), (1, 1)]
    filters, bias = embed.proj.weight.detach().numpy(), embed.proj.bias.detach().numpy()
    for row in range(2):
        for column in range(3):
            pixels = np.array(
                [
                    pixel(channel, row * rows + y + down * (rows // 2), column * columns + x + right * (columns // 2))
                    for down, right in directions
                    for channel in range(2)
                    for y in range(rows)
                    for x in range(columns)
                ]
            )
            pixels = (pixels - pixels.mean()) / np.sqrt(pixels.var() + embed.norm.eps)
            pixels = pixels * embed.norm.weight.detach().numpy() + embed.norm.bias.detach().numpy()
            expected = filters.reshape(5, -1) @ pixels + bias
            assert np.allclose(embed(image)[0, row * 3 + column].detach().numpy(), expected, atol=1e-12)


def test_with_lsa_two_tokens_attend_to_each_other() -> None:
    maps = SelfAttention(8, 2, local=True).maps(torch.randn(3, 2, 8))
    assert maps.equal(torch.tensor([[0.0, 1.0], [1.0, 0.0]]).expand(3, 2, 2, 2))


def test_with_lsa_a_single_token_gets_only_the_bias() -> None:
    layer, tokens = SelfAttention(8, 2, local=True), torch.randn(3, 1, 8)
    torch.testing.assert_close(layer(tokens), layer.proj.bias.expand(3, 1, 8))
    with pytest.raises(UserError, match="Choose one of them"):
        SelfAttention(8, 2, local=True, causal=True)


def test_locality_attention_against_the_equations() -> None:
    torch.manual_seed(0)
    layer = SelfAttention(6, 2, local=True, qkv_bias=False).double()
    assert (
        layer.scale is not None and layer.scale.shape == (2,) and layer.scale.tolist() == pytest.approx([3**-0.5] * 2)
    )
    layer.scale.data = torch.tensor([0.3, 1.7], dtype=torch.float64)
    tokens = torch.randn(5, 6, dtype=torch.float64)
    x, joined = tokens.numpy(), []
    for head, scale in enumerate((0.3, 1.7)):
        query, key, value = (
            x @ getattr(layer, name).detach().numpy()[3 * head : 3 * head + 3].T for name in ("W_Q", "W_K", "W_V")
        )
        head_output = np.zeros((5, 3))
        for i in range(5):
            others = [j for j in range(5) if j != i]
            weights = np.exp([scale * query[i] @ key[j] for j in others])
            head_output[i] = sum(weight / weights.sum() * value[j] for weight, j in zip(weights, others, strict=True))
        joined.append(head_output)
    expected = np.hstack(joined) @ layer.proj.weight.detach().numpy().T + layer.proj.bias.detach().numpy()
    assert np.allclose(layer(tokens[None])[0].detach().numpy(), expected, atol=1e-12)


@given(masked=st.booleans(), floats=st.booleans(), first=st.sampled_from([None, 1]), qk_norm=st.booleans())
def test_locality_attention_fused_equals_explicit(masked, floats, first, qk_norm) -> None:
    torch.manual_seed(0)
    layer = SelfAttention(8, 2, local=True, qk_norm=qk_norm).double().eval()
    tokens = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.rand(2, 5, 5) > 0.4 if masked else None
    if mask is not None and floats:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    maps = layer.maps(tokens, mask)
    assert not maps.diagonal(dim1=-2, dim2=-1).any()
    assert torch.allclose(layer.mix(maps, tokens)[:, :first], layer(tokens, mask, num_output_tokens=first), atol=1e-12)


def test_the_scale_is_trained_by_adamw_without_weight_decay() -> None:
    model = VisionTransformer(replace(TINY, attention="lsa", depth=1))
    adamw, _ = make_optimizers(model, TrainConfig(optimizer="muon", weight_decay=0.1))
    scale = model.blocks[0].attn.scale
    group = next(group for group in adamw.param_groups if any(weight is scale for weight in group["params"]))
    assert group["weight_decay"] == 0
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert scale.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({"embed_dim": 256, "depth": 7, "num_heads": 4, "patch_size": 2}, 3_760_139),  # CCT-7/3x1
        ({"embed_dim": 256, "depth": 7, "num_heads": 4, "patch_size": 2, "img_size": 28, "in_chans": 1}, 3_740_171),
        ({"embed_dim": 128, "depth": 2, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1.0}, 283_723),  # CCT-2/3x2
    ],
)
def test_cct_has_the_authors_number_of_parameters(settings, parameters) -> None:
    shared = {"img_size": 32, "num_classes": 10, "mlp_ratio": 2.0, "qkv_bias": False, "class_token": False}
    config = ModelConfig(**(shared | {"tokenizer": "conv", "global_pool": "seq"} | settings))
    assert sum(weight.numel() for weight in VisionTransformer(config).parameters()) == parameters
    assert count_parameters(config) == parameters


def test_conv_tokens_see_their_neighbours_and_no_further() -> None:
    """One layer: 3×3 and pooling of 3×3: a token's centre is 2 pixels from the furthest it sees."""
    model = VisionTransformer(replace(TINY, tokenizer="conv", patch_size=2)).eval()
    images = torch.rand(1, 3, 8, 8)
    changed_images = images.clone()
    changed_images[:, :, :, 0] = 9.0
    changed = (model.patch_embed(images) != model.patch_embed(changed_images)).any(-1).reshape(4, 4)
    assert changed.tolist() == [[True, True, False, False]] * 4


def test_mimetic_attention_starts_as_the_paper_says() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(replace(TINY, embed_dim=192, num_heads=12, depth=1, initialize="mimetic")).double()
    layer = model.blocks[0].attn
    query, key = (part.reshape(12, 16, 192) for part in (layer.W_Q, layer.W_K))
    products = (query.transpose(1, 2) @ key).detach()
    assert products.diagonal(dim1=1, dim2=2).mean() == pytest.approx(0.119, abs=0.005)  # 0.7 before the cut to rank 16
    value_projection = (layer.proj.weight @ layer.W_V).detach()
    assert value_projection.diagonal().mean() == pytest.approx(-0.4, abs=0.01)
    assert (value_projection - torch.diag(value_projection.diagonal())).std() == pytest.approx(0.4 / 192**0.5, rel=0.02)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_local_attention_starts_at_one_neighbour_per_head(qk_norm, monkeypatch) -> None:
    offsets = initialize._draw_neighbour_offsets(9)
    assert len(set(map(tuple, offsets.tolist()))) == 9 and offsets.abs().max() == 3
    assert Counter(map(tuple, initialize._draw_neighbour_offsets(27).tolist())).most_common(1)[0][1] == 3
    monkeypatch.setattr(initialize, "_draw_neighbour_offsets", lambda count: offsets[:count])
    config = ModelConfig(
        img_size=32, patch_size=4, embed_dim=576, num_heads=9, depth=2, class_token=False, global_pool="avg",
        positions="learned+rotary", qk_norm=qk_norm, initialize="conv_like", norm="rmsnorm",
    )  # fmt: skip
    model = VisionTransformer(config).double().eval()
    with torch.no_grad():
        for block in model.blocks:  # the token's content would move the maximum slightly
            block.attn.W_Q.zero_()
            block.attn.W_K.zero_()
            value_projection = block.attn.proj.weight @ block.attn.W_V
            assert torch.allclose(value_projection, -0.25 * torch.eye(576, dtype=torch.float64), atol=1e-6)
    for maps in explain.attention_maps(model, torch.randn(2, 3, 32, 32, dtype=torch.float64)):
        inner = maps.unflatten(2, (8, 8)).unflatten(-1, (8, 8))[:, :, 3:-3, 3:-3]  # tokens with all neighbours
        best = inner.flatten(-2).argmax(-1)
        rows, columns = torch.meshgrid(torch.arange(3, 5), torch.arange(3, 5), indexing="ij")
        steps = torch.stack([best // 8 - rows, best % 8 - columns], dim=-1)
        assert (steps == steps[:1, :, :1, :1]).all()  # of each head, for every token of every image
        assert torch.equal(steps[0, :, 0, 0], offsets)
        assert inner.max() < 0.5  # a wide maximum


@pytest.mark.parametrize("tokenizer", ["spt", "conv"])
def test_maps_of_small_data_models_through_explain(tokenizer) -> None:
    config = replace(TINY, tokenizer=tokenizer, attention="lsa", positions="learned+rotary", qk_norm=True, embed_dim=16)
    model = VisionTransformer(config).double().eval()
    maps = explain.attention_maps(model, torch.randn(3, 3, 8, 8, dtype=torch.float64))
    assert [block.shape for block in maps] == [(3, 2, 5, 5)] * 2
    for block in maps:
        assert torch.allclose(block.sum(-1), torch.ones(3, 2, 5, dtype=torch.float64), atol=1e-12)
        assert not block.diagonal(dim1=-2, dim2=-1).any()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tokenizer": "conv", "patch_size": 6, "img_size": 12}, "patch_size must be 2, 4, 8"),
        ({"tokenizer": "conv", "patch_size": (2, 4)}, "patch_size must be 2, 4, 8"),
        ({"attention": "lsa", "causal": True, "global_pool": "avg"}, "the first token has no other"),
        ({"attention": "lsa", "img_size": 4, "class_token": False, "global_pool": "avg"}, "there is only one token"),
        ({"initialize": "mimetic", "output_projection": False}, "Choose initialize=timm"),
        ({"initialize": "conv_like"}, "initialize=conv_like needs rotary positions and biases"),
        ({"initialize": "conv_like", "positions": "rotary", "qkv_bias": False}, "Choose positions=learned"),
        ({"tokenizer": "swin"}, "tokenizer='swin' is unknown"),
        ({"merge_tokens": 2, "drop_tokens": 1}, "cannot be combined"),
        ({"drop_tokens": 1, "causal": True, "global_pool": "avg"}, "order of tokens"),
    ],
)
def test_impossible_settings_are_errors(settings, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        replace(TINY, **settings)
