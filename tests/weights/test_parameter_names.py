"""Names of every library and checkpoint, and what shapes tell: gated MLPs, wrappers, grids, heads."""

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from tests.weights.test_pretrained import HF, build_small_timm, compute_max_difference, randomize_weights
from vitascope import UserError
from vitascope.weights.model_info import WeightsMetadata
from vitascope.weights.pretrained import build_pretrained_from_state_dict, read_pretrained_model

GATED = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU}


@torch.no_grad()
def test_dinov2_s_own_gated_names_are_read() -> None:
    theirs, images = build_small_timm(**GATED, init_values=1e-5, num_classes=0), torch.randn(2, 3, 32, 32)
    state = {name.replace("fc1", "w12").replace("fc2", "w3"): weight for name, weight in theirs.state_dict().items()}
    pretrained_model = build_pretrained_from_state_dict(state | {"mask_token": torch.zeros(1, 128)}, "dinov2")
    assert compute_max_difference(pretrained_model.build_model()(images), theirs(images)) < 1e-5
    assert pretrained_model.info.model.mlp == "swiglu" and pretrained_model.dropped_names == ["mask_token"]


@pytest.mark.parametrize("kind", ["Dinov2", "Dinov2WithRegisters"])
@torch.no_grad()
def test_transformers_gated_names_are_read(kind, tmp_path) -> None:
    config = getattr(transformers, f"{kind}Config")(**HF, use_swiglu_ffn=True)
    theirs, images = randomize_weights(getattr(transformers, f"{kind}Model")(config)), torch.randn(2, 3, 32, 32)
    theirs.save_pretrained(tmp_path)
    pretrained_model = read_pretrained_model(str(tmp_path))
    assert pretrained_model.info.model.mlp == "swiglu"
    assert compute_max_difference(pretrained_model.build_model()(images), theirs(images).last_hidden_state[:, 0]) < 1e-5


@torch.no_grad()
def test_the_distillation_head_of_deit_is_dropped(tmp_path) -> None:
    sizes = HF | {"num_labels": 4, "intermediate_size": 256}
    theirs = randomize_weights(transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**sizes)))
    theirs.save_pretrained(tmp_path)
    pretrained_model, images = read_pretrained_model(str(tmp_path)), torch.randn(2, 3, 32, 32)
    assert pretrained_model.dropped_names == ["head_dist.bias", "head_dist.weight"]
    assert compute_max_difference(pretrained_model.build_model()(images), theirs(images).cls_logits) < 1e-5


def test_the_double_width_classifier_of_dinov2_is_dropped_with_a_note(tmp_path) -> None:
    theirs = randomize_weights(transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**HF, num_labels=4)))
    theirs.save_pretrained(tmp_path)
    pretrained_model = read_pretrained_model(str(tmp_path))
    assert pretrained_model.info.model.num_classes == 0 and {"head.weight", "head.bias"} <= set(
        pretrained_model.dropped_names
    )
    assert "needs 256 features, but a token has 128" in pretrained_model.notes[0]


@pytest.mark.parametrize("wrapper", ["backbone.", "model.backbone.", "module._orig_mod.model.", "model.model."])
def test_wrapper_prefixes_are_removed_and_other_tensors_are_named(wrapper, tmp_path) -> None:
    inside = build_small_timm(num_classes=0).state_dict()
    state = {f"{wrapper}{name}": weight for name, weight in inside.items()}
    torch.save(state | {"head.weight": torch.zeros(7, 128), "head.bias": torch.zeros(7)}, tmp_path / "w.pth")
    pretrained_model = read_pretrained_model(str(tmp_path / "w.pth"))
    assert pretrained_model.weights.keys() == inside.keys() and pretrained_model.dropped_names == [
        "head.bias",
        "head.weight",
    ]


@pytest.mark.parametrize("name", ["model_ema", "state_dict_ema"])
def test_averaged_weights_are_the_ones_to_use(name, tmp_path) -> None:
    raw, averaged = build_small_timm(), build_small_timm()
    averaged.norm.weight.data.mul_(3)
    torch.save({"state_dict": raw.state_dict(), name: averaged.state_dict()}, tmp_path / "w.pth")
    assert torch.equal(read_pretrained_model(str(tmp_path / "w.pth")).weights["norm.weight"], averaged.norm.weight)


@torch.no_grad()
def test_registers_without_positions_do_not_shrink_a_small_grid() -> None:
    theirs, images = build_small_timm(img_size=24, reg_tokens=4, no_embed_class=True), torch.randn(2, 3, 24, 24)
    pretrained_model = build_pretrained_from_state_dict(theirs.state_dict(), "theirs")
    assert (
        pretrained_model.info.model.grid == (3, 3)
        and compute_max_difference(pretrained_model.build_model()(images), theirs(images)) < 1e-5
    )
    config = transformers.Dinov2WithRegistersConfig(**(HF | {"image_size": 24}))
    theirs = randomize_weights(transformers.Dinov2WithRegistersModel(config))
    pretrained_model = build_pretrained_from_state_dict(
        theirs.state_dict(), "theirs", WeightsMetadata({"num_heads": 4, "norm_eps": 1e-6})
    )
    assert pretrained_model.info.model.grid == (3, 3) and pretrained_model.info.model.no_embed_class
    assert compute_max_difference(pretrained_model.build_model()(images), theirs(images).last_hidden_state[:, 0]) < 1e-5
    oblong = theirs.state_dict() | {"embeddings.position_embeddings": torch.zeros(1, 1 + 2 * 7, 128)}
    with pytest.raises(UserError, match="14 positions do not form a square grid"):  # not 3×3 and five tokens in front
        build_pretrained_from_state_dict(oblong, "theirs", WeightsMetadata({"num_heads": 4}))


@pytest.mark.parametrize("width", [1152, 1280, 1408, 1664])
@torch.no_grad()
def test_the_widest_published_vits_have_sixteen_heads(width) -> None:
    theirs = randomize_weights(torchvision.models.VisionTransformer(28, 14, 1, 16, width, 64, num_classes=5))
    pretrained_model, images = (
        build_pretrained_from_state_dict(theirs.state_dict(), "theirs"),
        torch.randn(1, 3, 28, 28),
    )
    assert compute_max_difference(pretrained_model.build_model()(images), theirs(images)) < 1e-4
    assert f"num_heads=16 (as in published ViTs with embed_dim {width})" in pretrained_model.assumptions
