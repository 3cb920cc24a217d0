"""ModelConfig: timm's defaults, derived values, errors."""

import dataclasses
import inspect

import pytest
import timm

from vitascope import ModelConfig, UserError


def test_the_defaults_are_timms() -> None:
    timm_parameters = inspect.signature(timm.models.VisionTransformer).parameters
    shared = [field for field in dataclasses.fields(ModelConfig) if field.name in timm_parameters]
    assert len(shared) >= 20
    assert {field.name: field.default for field in shared} == {
        field.name: timm_parameters[field.name].default for field in shared
    }


def test_derived_numbers_by_hand() -> None:
    config = ModelConfig(img_size=(32, 64), patch_size=(4, 8), reg_tokens=3, embed_dim=192, num_heads=3, mlp_ratio=2.5)
    assert (config.grid, config.num_patches, config.num_tokens) == ((8, 8), 64, 68)
    assert (config.head_width, config.hidden_width) == (64, 480)


def test_stochastic_depth_grows_linearly_from_zero() -> None:
    assert ModelConfig(depth=5, drop_path_rate=0.4).drop_path_rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert ModelConfig(depth=1, drop_path_rate=0.4).drop_path_rates == [0]


def test_a_config_is_frozen_and_hashable_and_takes_lists() -> None:
    config = ModelConfig(img_size=[32, 16], patch_size=8)
    assert config.img_size == (32, 16) and hash(config) == hash(ModelConfig(img_size=(32, 16), patch_size=8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.depth = 3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"img_size": 28, "patch_size": 16},
            "patch_size=16 does not divide img_size=28. Choose patch_size from 1, 2, 4, 7, 14, 28.",
        ),
        ({"img_size": (32, 20), "patch_size": 8}, "patch_size=8 does not divide 20 of img_size=(32, 20)"),
        (
            {"embed_dim": 100, "num_heads": 3},
            "num_heads=3 does not divide embed_dim=100. Choose num_heads from 1, 2, 4, 5",
        ),
        ({"depth": 0}, "depth=0 is too small"),
        ({"depth": 2.5}, "depth=2.5 is not a whole number"),
        ({"depth": True}, "depth=True is true or false, but depth must be a whole number"),
        ({"class_token": 1}, "class_token=1 is not true or false"),
        ({"num_classes": -1}, "num_classes=-1 is negative"),
        ({"img_size": "big"}, "img_size='big' is not a size"),
        ({"img_size": (1, 2, 3)}, "is not a size"),
        ({"img_size": 0}, "img_size=0 is too small"),
        ({"mlp_ratio": 0}, "mlp_ratio=0 must be greater than 0 and finite"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio=nan must be greater"),
        ({"mlp_ratio": float("inf")}, "mlp_ratio=inf must be greater than 0 and finite"),
        ({"init_values": float("nan")}, "init_values=nan must be a finite number"),
        ({"qk_norm": True, "norm": "none"}, "qk_norm=true needs a norm, but norm=none"),
        ({"drop_path_rate": 1.0}, "drop_path_rate=1.0 is not a rate"),
        ({"attn_drop_rate": -0.1}, "attn_drop_rate=-0.1 is not a rate"),
        ({"positions": "learnt"}, "positions='learnt' is unknown. Did you mean learned?"),
        ({"global_pool": "max"}, "Choose one of avg, seq, token"),
        ({"class_token": False}, "Choose global_pool=avg or seq, or model.class_token=true."),
        ({"causal": True}, "the class token, which comes first, attends to no patch"),
        (
            {"positions": "rotary", "embed_dim": 60, "num_heads": 10},
            "to be a multiple of 4; it is 60 / 10 = 6. Choose num_heads from 1, 3, 5, 15",
        ),
        ({"positions": "sincos2d", "embed_dim": 6, "num_heads": 1}, "needs embed_dim to be a multiple of 4"),
        ({"mlp": "swiglu", "embed_dim": 5, "num_heads": 1, "mlp_ratio": 1}, "must be even. It is embed_dim=5 ×"),
        ({"mlp_ratio": 0.0001}, "mlp_ratio=0.0001 × embed_dim="),
    ],
)
def test_wrong_combinations_are_errors_that_say_what_works(settings, sentence) -> None:
    with pytest.raises(UserError) as caught:
        ModelConfig(**settings)
    assert sentence in str(caught.value)
