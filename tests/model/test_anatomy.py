"""The anatomy: its shapes, parameters and FLOPs are those of a real model."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

from tests.model.combinations import TINY, settings
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.model.anatomy import list_stages, list_stages_from_first_block
from vitascope.model.attention_cost import fit_growth_exponent_of_larger_half, measure_attention_costs


@given(settings=settings)
def test_parameters_are_a_real_models(settings) -> None:
    try:
        config = replace(TINY, **settings)
    except UserError:
        return
    parameter_count = sum(stage.parameters for stage in list_stages(config))
    assert parameter_count == sum(weight.numel() for weight in VisionTransformer(config).parameters())


@pytest.mark.parametrize(
    "changes", [{}, {"mlp": "swiglu", "global_pool": "seq"}, {"img_size": (8, 16), "reg_tokens": 2}]
)
def test_flops_are_what_pytorch_counts(changes) -> None:
    """FLOPs of all tokens, as papers count; `forward` skips tokens that the head does not read."""
    config = replace(TINY, **changes)
    model = VisionTransformer(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.forward_head(model.forward_features(torch.randn(2, 3, *config.image_shape)))
    assert sum(stage.flops for stage in list_stages(config, batch_size=2)) == counter.get_total_flops()


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": "spt", "attention": "lsa"},
        {"tokenizer": "conv", "global_pool": "seq"},
        {"merge_tokens": 3, "img_size": 16, "reg_tokens": 1},
        {"drop_tokens": 3, "img_size": 16},
    ],
)
def test_flops_of_inference_are_what_pytorch_counts(changes) -> None:
    config = replace(TINY, **({"global_pool": "avg"} | changes))
    model = VisionTransformer(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(2, 3, *config.image_shape))
    assert sum(stage.flops for stage in list_stages(config, batch_size=2)) == counter.get_total_flops()


def test_shapes_are_a_real_models() -> None:
    config = ModelConfig(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3)
    shapes = {stage.name: stage.shape for stage in list_stages(config, batch_size=2)}
    model, images = VisionTransformer(config), torch.randn(2, 3, 8, 8)
    tokens, attention = model.embed(images), model.blocks[0].attn
    query, key, value = attention.compute_queries_keys_values(tokens)
    assert shapes["patch_embed"] == list(model.patch_embed(images).shape)
    assert shapes["tokens"] == list(tokens.shape)
    assert shapes["blocks.0.attn.query"] == shapes["blocks.0.attn.key"] == list(query.shape) == list(key.shape)
    assert shapes["blocks.0.attn.value"] == list(value.shape)
    assert shapes["blocks.0.attn.maps"] == list(attention.maps(tokens).shape)
    assert shapes["blocks.0.mlp.fc1"] == list(model.blocks[0].mlp.fc1(tokens).shape)
    assert shapes["head"] == list(model(images).shape)


def test_sheet_b_shapes_exactly() -> None:
    stages = {stage.name: stage for stage in list_stages_from_first_block(ModelConfig(embed_dim=768, num_heads=12), 5)}
    assert stages["tokens"].shape == [1, 5, 768]
    assert stages["blocks.0.attn.query"].shape == stages["blocks.0.attn.head_outputs"].shape == [1, 12, 5, 64]
    assert stages["blocks.0.attn.maps"].shape == [1, 12, 5, 5]
    assert stages["blocks.0.attn.concat"].shape == [1, 5, 768]
    assert stages["tokens"].bytes == 5 * 768 * 4
    assert "image" not in stages


def test_an_exponent_is_read_off_a_power_law() -> None:
    counts = [64, 128, 256, 512]
    assert fit_growth_exponent_of_larger_half(counts, [3.0 * count**1.7 for count in counts]) == pytest.approx(1.7)


@pytest.mark.filterwarnings("ignore:.*profiler.*:UserWarning")
def test_explicit_attention_stores_its_maps_and_the_fused_kernel_does_not() -> None:
    costs = {(cost.way, cost.tokens): cost for cost in measure_attention_costs(2, 16, token_counts=(256, 1024))}
    maps = 2 * 1024 * 1024 * 4
    assert costs["written out", 1024].peak_bytes >= maps
    assert costs["fused", 1024].peak_bytes < maps / 2
    assert all(cost.seconds > 0 for cost in costs.values())
