"""Other libraries: ours and timm's are one model, and what transformers' ViT does not have is refused by name."""

import pytest
import timm
import torch

from tests.slow import slow_except
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.weights.write_formats import (
    build_timm_model,
    check_transformers_support,
    compare_outputs_gradients_with_timm,
)

PLAIN = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"global_pool": "avg"}, "global_pool=avg"),
        ({"reg_tokens": 1}, "registers"),
        ({"positions": "rotary"}, "positions=rotary"),
        ({"no_embed_class": True}, "positions=learned"),
        ({"norm": "rmsnorm"}, "norm=rmsnorm"),
        ({"mlp": "relu2"}, "mlp=relu2"),
        ({"qk_norm": True}, "QK-norm"),
        ({"init_values": 0.1}, "LayerScale"),
        ({"output_projection": False}, "output_projection=false"),
        ({"proj_bias": False}, "proj_bias=false"),
        ({"num_classes": 0}, "a model without classifier"),
        ({"img_size": (32, 64)}, "non-square images or patches"),
        ({"img_size": (32, 64), "patch_size": (8, 16)}, "non-square images or patches"),
        ({"tokenizer": "spt"}, "tokenizer=spt"),
        ({"attention": "lsa"}, "attention=lsa"),
        ({"merge_tokens": 1}, "merge_tokens=1"),
        ({"drop_tokens": 1}, "drop_tokens=1"),
        ({"causal": True, "global_pool": "avg"}, "causal attention"),
    ],
    ids=str,
)
def test_settings_that_transformers_lacks_are_named(settings, named) -> None:
    check_transformers_support(ModelConfig(**PLAIN))
    with pytest.raises(UserError, match=f"transformers' ViT does not support .*{named}"):
        check_transformers_support(ModelConfig(**(PLAIN | settings)))


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 10}
SETTINGS = [
    {},
    {"reg_tokens": 4},
    {"reg_tokens": 2, "no_embed_class": True},
    {"qkv_bias": False},
    {"proj_bias": False},
    {"qk_norm": True},
    {"init_values": 0.1},
    {"global_pool": "avg"},
    {"global_pool": "avg", "class_token": False, "no_embed_class": True},
    {"img_size": (32, 64), "patch_size": (8, 16)},
    {"in_chans": 1},
    {"positions": "none"},
    {"norm": "rmsnorm"},
    {"mlp": "swiglu", "mlp_ratio": 16 / 3},
    {"mlp_ratio": 1.3},
]
SHAPES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_logits_and_gradients_equal_timms(changes) -> None:
    config = ModelConfig(**(SMALL | changes))
    double, single = (compare_outputs_gradients_with_timm(config, dtype) for dtype in (torch.float64, torch.float32))
    assert max(double.max_logit_difference, double.max_gradient_difference) < 1e-8
    assert max(single.max_logit_difference, single.max_gradient_difference) < 1e-4


@pytest.mark.parametrize("name", slow_except(SHAPES, ["tiny", "small"]))
def test_the_standard_shapes_equal_timms_forward_and_backward(name) -> None:
    width, heads = SHAPES[name]
    config = ModelConfig(img_size=32, patch_size=16, embed_dim=width, num_heads=heads, num_classes=10)
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        comparison = compare_outputs_gradients_with_timm(config, dtype)
        assert 0 <= max(comparison.max_logit_difference, comparison.max_gradient_difference) < tolerance


def test_a_difference_is_detected(monkeypatch) -> None:
    """The agreement is only worth something if it can fail: one wrong weight in one block must show."""
    config = ModelConfig(**SMALL)
    load = VisionTransformer.load_state_dict

    def load_wrongly(self, state):
        return load(self, state | {"blocks.2.mlp.fc2.bias": state["blocks.2.mlp.fc2.bias"] * 1.1})

    monkeypatch.setattr(VisionTransformer, "load_state_dict", load_wrongly)
    comparison = compare_outputs_gradients_with_timm(config, torch.float64)
    assert comparison.max_logit_difference > 1e-4 and comparison.max_gradient_difference > 1e-4


@pytest.mark.parametrize("name", slow_except(SHAPES, ["tiny", "small"]))
def test_the_standard_shapes_at_224_pixels_equal_timms(name) -> None:
    width, heads = SHAPES[name]
    theirs = timm.create_model(f"vit_{name}_patch16_224").eval()
    ours = VisionTransformer(ModelConfig(embed_dim=width, num_heads=heads)).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        assert (ours(images) - theirs(images)).abs().max() < 1e-4
        assert (ours.forward_features(images) - theirs.forward_features(images)).abs().max() < 1e-4


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_a_state_dict_goes_back_to_timm_strictly(changes) -> None:
    config = ModelConfig(**(SMALL | changes))
    ours, theirs = VisionTransformer(config).eval(), build_timm_model(config).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, config.in_chans, *config.image_shape)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=0)


def test_settings_that_timm_lacks_are_named() -> None:
    with pytest.raises(UserError, match="does not support mlp=relu2"):
        build_timm_model(ModelConfig(**(SMALL | {"mlp": "relu2"})))
