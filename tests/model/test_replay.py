"""A replay is the model's own forward pass with everything in between; no model is changed by it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as replace_settings

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.model.combinations import TINY, settings
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.model.replay import (
    clone_with_fused_attention,
    make_logits_function_with_fixed_token_groups,
    record_attention,
    replay_forward_pass,
)

GRID = {"img_size": 16, "depth": 3}  # 16 patches
REDUCTIONS = [{"merge_tokens": 3}, {"drop_tokens": 3}]


def make_model(**changes) -> VisionTransformer:
    model = VisionTransformer(replace_settings(TINY, **changes)).double().eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.1 if "norm" in changes else 0.3)  # without norms, more would grow too large
    return model


def make_images(config: ModelConfig, count: int = 2) -> torch.Tensor:
    return torch.randn(count, config.in_chans, *config.image_shape, dtype=torch.float64)


def make_timm_model() -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=4, depth=2).eval()
    nn.init.normal_(model.head.weight)
    return model


def make_transformers_model(attention: str) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, attn_implementation=attention)
    return ViTForImageClassification(config).eval()


@given(settings=settings, reduction=st.sampled_from([{}, {"merge_tokens": 1}, {"drop_tokens": 1}]))
def test_a_replay_s_logits_are_the_model_s_for_every_combination(settings, reduction) -> None:
    torch.manual_seed(0)
    try:
        model = make_model(**settings, **reduction)
    except UserError:
        return
    images = make_images(model.config)
    with torch.no_grad():
        result, expected = replay_forward_pass(model, images), model(images)
    torch.testing.assert_close(result.logits, expected, atol=1e-10, rtol=1e-8)
    assert len(result.maps) == 2 and len(result.hidden_states) == 3
    for maps in result.maps:
        torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))
    torch.testing.assert_close(result.pool_weights.sum(1), torch.ones(2, dtype=torch.float64))
    if not reduction:
        recording = record_attention(model, images)  # an independent way: at the calls of the fused function
        torch.testing.assert_close(result.maps, recording.maps, atol=1e-10, rtol=1e-8)
        torch.testing.assert_close(result.hidden_states, recording.hidden_states, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("reduction", [{}, *REDUCTIONS])
def test_a_replay_has_the_model_s_gradients(reduction) -> None:
    model = make_model(**GRID, **reduction, qk_norm=True, positions="rotary")
    images = make_images(model.config).requires_grad_()
    result = replay_forward_pass(model, images)
    gradients = torch.autograd.grad(result.logits.sin().sum(), [images, *result.maps])
    (expected,) = torch.autograd.grad(model(images).sin().sum(), images)
    torch.testing.assert_close(gradients[0], expected, atol=1e-8, rtol=1e-6)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_the_model_uses_edited_maps() -> None:
    model = make_model(**GRID)
    images = make_images(model.config)

    def attend_to_itself(_: int, maps: torch.Tensor) -> torch.Tensor:
        return torch.eye(maps.shape[-1], dtype=maps.dtype).expand_as(maps)

    with torch.no_grad():
        tokens = model.embed(images)
        for block in model.blocks:
            maps = torch.eye(tokens.shape[1], dtype=tokens.dtype).expand(2, 2, -1, -1)
            tokens = tokens + block.ls1(block.attn.mix(maps, block.norm1(tokens)))
            tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
        expected = model.forward_head(model.norm(tokens))
        edited = replay_forward_pass(model, images, edit_maps=attend_to_itself)
        recorded = record_attention(model, images, attend_to_itself)
    torch.testing.assert_close(edited.logits, expected)
    torch.testing.assert_close(recorded.logits, expected)
    torch.testing.assert_close(edited.maps[1], attend_to_itself(1, edited.maps[1]))


def list_attributes(model: nn.Module) -> list[dict]:
    """Return a copy of every attribute of every module, and of the dictionaries that hold hooks and parameters."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in module.__dict__.items()}
        for module in model.modules()
    ]


@pytest.mark.parametrize("kind", ["own", "timm", "eager", "sdpa"])
def test_no_attribute_of_the_model_changes_even_after_a_mistake(kind) -> None:
    makers = {"own": lambda: make_model(**GRID), "timm": make_timm_model}
    model = makers[kind]() if kind in makers else make_transformers_model(kind)
    if kind == "own":
        model.blocks[0].attn.kernel = "own"
    if kind == "timm":
        model.blocks[0].attn.fused_attn = False
    before, config_before = list_attributes(model), str(getattr(model, "config", None))
    images = make_images(model.config) if kind == "own" else torch.randn(2, 3, 32, 32)
    during = []

    def compare(_: int, maps: torch.Tensor) -> torch.Tensor:
        during.append(list_attributes(model) == before)
        return maps

    replay_forward_pass(model, images, edit_maps=compare)
    record_attention(model, images, compare)
    for run in (replay_forward_pass, record_attention):
        with pytest.raises(ZeroDivisionError):
            run(model, images, edit_maps=lambda index, _: 1 / 0 * index)
    assert list_attributes(model) == before and during and all(during)
    assert str(getattr(model, "config", None)) == config_before


@pytest.mark.parametrize("kind", ["own", "timm", "eager"])
def test_threads_can_replay_one_model_at_the_same_time(kind) -> None:
    torch.set_num_threads(1)
    makers = {"own": lambda: make_model(**GRID, merge_tokens=2), "timm": make_timm_model}
    model = makers[kind]() if kind in makers else make_transformers_model(kind)
    shape, dtype = ((3, 16, 16), torch.float64) if kind == "own" else ((3, 32, 32), torch.float32)
    inputs = [torch.randn(1 + index % 3, *shape, dtype=dtype) for index in range(16)]

    def look(images: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():  # per thread
            result = replay_forward_pass(model, images)
            output = model(images)
        return [result.logits, *result.maps, *result.hidden_states, getattr(output, "logits", output)]

    serial = [look(images) for images in inputs]
    with ThreadPoolExecutor(8) as threads:
        parallel = list(threads.map(look, inputs))
    for one, other in zip(serial, parallel, strict=True):
        assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def test_a_clone_shares_all_tensors() -> None:
    model = make_timm_model()
    model.blocks[0].attn.fused_attn = False
    clone = clone_with_fused_attention(model)
    assert clone.blocks[0].attn.fused_attn and not model.blocks[0].attn.fused_attn
    shared = model.state_dict(keep_vars=True)
    for name, ours in clone.state_dict(keep_vars=True).items():
        assert ours is shared[name]
    assert not {id(module) for module in clone.modules()} & {id(module) for module in model.modules()}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("pool", ["token", "avg", "seq"])
def test_values_of_all_tokens_make_the_reduced_model_s_prediction(pool, reduction) -> None:
    """Merged patches count one each, with their token's state; dropped patches do not count."""
    model = make_model(**GRID, **reduction, global_pool=pool, reg_tokens=1)
    images = make_images(model.config)
    with torch.no_grad():
        result, expected = replay_forward_pass(model, images), model(images)
    tokens = model.norm(result.expand_hidden_states_to_all_tokens()[-1])
    weights = result.expand_pool_weights_to_all_tokens()
    pooled = torch.einsum("bt,btf->bf", weights, tokens)
    torch.testing.assert_close(model.head(model.fc_norm(pooled)), expected, atol=1e-9, rtol=1e-7)
    is_present = (result.memberships[-1].sum(1) > 0).double()
    torch.testing.assert_close(model.forward_head(tokens, token_sizes=is_present), expected, atol=1e-9, rtol=1e-7)
    for maps, membership in zip(result.expand_maps_to_all_tokens(), result.memberships, strict=False):
        present = (membership.sum(1) > 0).double()[:, None]
        assert maps.shape == (2, 2, 18, 18)
        torch.testing.assert_close(maps.sum(-1), present.expand(2, 2, 18))
        assert (maps * (1 - present[..., None, :])).abs().max() == 0
    assert result.memberships[-1].shape[1] == 18 - 3 * 3


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_frozen_groups_are_those_of_the_image(reduction) -> None:
    model = make_model(**GRID, **reduction, global_pool="avg", class_token=False)
    images, others = make_images(model.config), make_images(model.config)
    with torch.no_grad():
        frozen = make_logits_function_with_fixed_token_groups(model, images)
        torch.testing.assert_close(frozen(images), model(images))
        assert not torch.allclose(frozen(others), model(others), atol=1e-3)  # other tokens are merged there


def test_mistakes_get_one_sentence() -> None:
    model = make_model()
    with pytest.raises(UserError, match=r"Call model\.eval"):
        replay_forward_pass(make_model().train(), make_images(model.config))
    with pytest.raises(UserError, match="images"):
        replay_forward_pass(model, torch.randn(2, 8, 8))
    with pytest.raises(UserError, match="its attention maps cannot be recorded"):
        replay_forward_pass(nn.Flatten().eval(), torch.randn(2, 3, 8, 8))
