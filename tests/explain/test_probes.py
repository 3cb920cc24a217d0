"""Numbers about a model: laws, hand-worked values, and agreement with the model's own answer."""

import math

import numpy as np
import pytest
import timm
import torch
from torch import nn

from tests.explain.test_explain import KINDS, made, pictures
from vitascope import UserError
from vitascope.draw.probes import draw_block_statistics
from vitascope.explain import attention_maps, get_token_layout, model_statistics
from vitascope.explain.maps import TokenLayout
from vitascope.explain.model_figures import _convert_to_json_numbers


@pytest.mark.parametrize(("side", "wanted"), [(7, 3.609), (8, 4.136), (2, 0.8536)])
def test_even_attention_looks_as_far_as_the_grid_s_mean_distance(side, wanted) -> None:
    tokens = side * side + 1
    even = torch.full((1, 2, tokens, tokens), 1 / tokens).double()
    distance = model_statistics.compute_mean_attention_distance(
        even, TokenLayout(1, side, side, reads_class_token=True)
    )
    assert distance.shape == (1, 2) and distance[0, 0].item() == pytest.approx(wanted, abs=1e-3)


def test_distance_does_not_depend_on_what_the_class_token_draws() -> None:
    layout = TokenLayout(1, 3, 3, reads_class_token=True)
    maps = torch.rand(2, 1, 10, 10).double().softmax(-1)
    drawn = maps.clone()
    drawn[..., 0] = 50.0
    drawn = drawn / drawn.sum(-1, keepdim=True)
    torch.testing.assert_close(
        model_statistics.compute_mean_attention_distance(drawn, layout),
        model_statistics.compute_mean_attention_distance(maps, layout),
    )


def test_entropy_is_zero_for_one_and_largest_for_all() -> None:
    assert model_statistics.compute_attention_entropy(torch.eye(5)[None, None]).item() == 0
    assert model_statistics.compute_attention_entropy(torch.full((1, 1, 65, 65), 1 / 65)).item() == pytest.approx(
        math.log(65)
    )


def test_cka_by_its_laws() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 6).double()
    turn, _ = torch.linalg.qr(torch.randn(6, 6).double())
    cka = model_statistics.MinibatchCKA(4)
    cka.add_batch([x, 3 * x @ turn, x + 5, torch.randn(12, 6).double()])
    matrix = cka.compute_cka_matrix()
    torch.testing.assert_close(matrix[0, :3], torch.ones(3).double())
    assert abs(matrix[0, 3]) < 0.5 and torch.allclose(matrix, matrix.T)
    apart = model_statistics.MinibatchCKA(2)
    apart.add_batch([torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])])
    assert apart.compute_cka_matrix()[0, 1].item() < 0.01
    with pytest.raises(UserError, match="at least 4 images"):
        cka.add_batch([x[:3]] * 4)


def test_the_state_before_the_first_block_is_called_input() -> None:
    """Its number would be 0, and blocks.0 is the first block."""
    head_values, states = np.full((12, 3), 0.5), np.ones(13)
    figure = draw_block_statistics(head_values, head_values, np.ones((13, 3)), np.eye(13), states, 5, "caption")
    for panel in figure.axes[2:5]:
        labels = [label.get_text() for label in panel.get_xticklabels()]
        assert labels == ["input", "2", "4", "6", "8", "10", "12"]
    assert [label.get_text() for label in figure.axes[3].get_yticklabels()] == labels


def test_the_similarity_of_features_that_are_equal_for_all_images_is_undefined() -> None:
    cka = model_statistics.MinibatchCKA(2)
    cka.add_batch([torch.randn(1, 6).expand(12, 6), torch.randn(12, 6)])
    matrix = cka.compute_cka_matrix()
    assert matrix[0].isnan().all() and matrix[1, 0].isnan() and matrix[1, 1].item() == pytest.approx(1)
    assert _convert_to_json_numbers(matrix) == [[None, None], [None, 1.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_block_s_lens_is_the_model_s_answer(kind) -> None:
    model = made(**KINDS[kind])
    images = pictures(model)
    states = model_statistics.compute_hidden_states_of_all_tokens(model, images)
    assert len(states) == 4
    with torch.no_grad():
        torch.testing.assert_close(states[0], model.embed(images))
        torch.testing.assert_close(
            model_statistics.apply_logit_lens(model, states[-1]), model(images), atol=1e-10, rtol=0
        )
        alone = model_statistics.apply_logit_lens_per_token(model, states[-1])
        read = alone[:, 0] if get_token_layout(model).reads_class_token else None
        assert alone.shape == (3, states[-1].shape[1], 5)
        assert read is None or torch.allclose(read, model(images), atol=1e-10)
    assert all(not block._forward_hooks and not block._forward_pre_hooks for block in model.blocks)


def test_timm_and_transformers_models_are_probed_too() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=4).eval()
    nn.init.normal_(theirs.head.weight)
    for model, depth in ((theirs, 12), (ViTForImageClassification(config).eval(), 3)):
        images, layout = pictures(model, 2), get_token_layout(model)
        states = model_statistics.compute_hidden_states_of_all_tokens(model, images)
        assert len(states) == depth + 1 == len(attention_maps(model, images)) + 1
        with torch.no_grad():
            answer = model(images)
            torch.testing.assert_close(
                model_statistics.apply_logit_lens(model, states[-1]),
                getattr(answer, "logits", answer),
                atol=1e-4,
                rtol=0,
            )
        likeness = model_statistics.compute_position_similarity_matrix(model, layout.num_patches)
        torch.testing.assert_close(likeness.diagonal(), torch.ones(16))


def test_filters_are_principal_components() -> None:
    model = made()
    filters, shares = model_statistics.compute_patch_filter_pca(model, num_components=10)
    assert filters.shape == (10, 3, 4, 4) and shares[0] >= shares[1]
    flat = filters.flatten(1)
    torch.testing.assert_close(flat @ flat.T, torch.eye(10), atol=1e-5, rtol=0)


def test_colours_are_between_0_and_1_and_like_patches_are_alike() -> None:
    layout = TokenLayout(1, 2, 2, reads_class_token=True)
    tokens = torch.randn(6, 5, 8)
    tokens[:, 2] = tokens[:, 1]
    colours = model_statistics.project_patches_to_pca_rgb(tokens, layout)
    assert colours.shape == (6, 2, 2, 3) and colours.min() >= 0 and colours.max() <= 1
    torch.testing.assert_close(colours[:, 0, 0], colours[:, 0, 1])


def test_the_initial_tokens_contain_positions_only_if_they_are_added() -> None:
    with_positions = "patch embedding plus position embedding"
    for positions, text in {"learned": with_positions, "sincos2d": with_positions, "rotary": "patch embedding"}.items():
        assert model_statistics.describe_tokens_before_first_block(made(positions=positions)) == text
    assert model_statistics.describe_tokens_before_first_block(made(positions="none")) == "patch embedding"


def test_a_model_without_positions_says_so() -> None:
    model = made(class_token=False, global_pool="avg", positions="rotary")
    with pytest.raises(UserError, match="has no position embedding"):
        model_statistics.compute_position_similarity_matrix(model, get_token_layout(model).num_patches)
