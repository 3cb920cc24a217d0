"""Folders with config.json: everything in it is used, nothing in it is trusted, answers are compared."""

import json
from pathlib import Path

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from tests.training.tiny import shared_run
from tests.weights.test_pretrained import HF, build_small_timm, compute_max_difference, randomize_weights
from vitascope import UserError, adapt, open_model
from vitascope.run.checkpoint import save_model_folder
from vitascope.weights.files import read_plain_timm_vit_metadata
from vitascope.weights.model_info import get_default_normalisation
from vitascope.weights.pretrained import (
    build_pretrained_from_state_dict,
    read_pretrained_model,
)

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 2, "num_heads": 2}


def timm_folder(folder: Path, model: nn.Module, **config_fields) -> str:
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 7, "model_args": SIZES}
    (folder / "config.json").write_text(json.dumps(config | config_fields))
    return str(folder)


def hf_folder(folder: Path, kind: str = "ViTForImageClassification", config: str = "ViTConfig", **settings) -> None:
    model = randomize_weights(getattr(transformers, kind)(getattr(transformers, config)(**(HF | settings))))
    model.save_pretrained(folder)


def change_json(path: Path, *without: str, **fields) -> None:
    contents = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({name: value for name, value in (contents | fields).items() if name not in without}))


def test_timm_s_folder_tells_names_and_normalisation(tmp_path) -> None:
    names = list("abcdefg")
    normalisation = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    pretrained_model = read_pretrained_model(
        timm_folder(tmp_path, build_small_timm(), label_names=names, pretrained_cfg=normalisation)
    )
    assert pretrained_model.info.classes == names and pretrained_model.library == "timm"
    assert (pretrained_model.info.preparation.mean, pretrained_model.info.preparation.std) == (
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
    )


@pytest.mark.parametrize(
    "changes",
    [{"act_layer": "relu"}, {"act_layer": "gelu_tanh"}, {"global_pool": "avg", "pool_include_prefix": True}],
    ids=str,
)
def test_a_timm_folder_that_computes_otherwise_is_refused(changes, tmp_path) -> None:
    model = build_small_timm(**changes)
    with pytest.raises(UserError, match="with the same weights, Vitascope's model gives a different output"):
        read_pretrained_model(timm_folder(tmp_path, model, model_args=SIZES | changes))


def test_weights_that_do_not_fit_timm_s_config_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"has shape|do not fit"):
        read_pretrained_model(timm_folder(tmp_path, build_small_timm(), model_args=SIZES | {"patch_size": 4}))


@pytest.mark.parametrize(
    "config_fields",
    [
        {"architecture": "local-dir:elsewhere"},
        {"architecture": "hf-hub:someone/something"},
        {"architecture": "vit_tiny_patch16_224.local-dir:x"},
        {"architecture": 3},
        *({"model_args": SIZES | {name: "other.pth"}} for name in ("checkpoint_path", "cache_dir", "pretrained_cfg")),
        {"model_args": SIZES | {"pretrained": True}},
        {"model_args": SIZES | {"features_only": True}},
        {"model_args": SIZES | {"scriptable": True}},
        {"model_args": SIZES | {"embed_dim": {"a": 1}}},
        {"model_args": ["img_size"]},
    ],
    ids=str,
)
def test_a_config_reaches_nothing_but_the_network_s_settings(config_fields, tmp_path, monkeypatch) -> None:
    torch.save(build_small_timm().state_dict(), tmp_path / "other.pth")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("timm was asked"))
    word = timm_folder(tmp_path / "folder", build_small_timm(), **config_fields)
    for opening in (read_pretrained_model, open_model):
        with pytest.raises(UserError, match=r"timm has no architecture|model_args m"):
            opening(word)


def test_settings_of_other_networks_are_for_teachers_only(tmp_path) -> None:
    model = timm.create_model("test_resnet", num_classes=3, stem_width=16)
    config = {"architecture": "test_resnet", "num_classes": 3, "model_args": {"stem_width": 16}}
    word = timm_folder(tmp_path, model, **config)
    assert len(open_model(word).classes) == 3
    with pytest.raises(UserError, match="stem_width is not one"):
        read_pretrained_model(word)


def test_parallel_blocks_are_no_plain_vit() -> None:
    model = timm.create_model("vit_small_patch16_18x2_224", depth=1, embed_dim=64, num_heads=1)
    with pytest.raises(UserError, match="not a plain ViT: it has ParallelThingsBlock"):
        read_plain_timm_vit_metadata(model)


def test_transformers_preprocessor_is_used(tmp_path) -> None:
    hf_folder(tmp_path)
    file, colours = tmp_path / "preprocessor_config.json", get_default_normalisation(3)
    change_json(file, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])
    preprocessing = read_pretrained_model(str(tmp_path)).info.preparation
    assert (preprocessing.mean, preprocessing.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    change_json(file, do_normalize=False)
    preprocessing = read_pretrained_model(str(tmp_path)).info.preparation
    assert (preprocessing.mean, preprocessing.std) == ((0.0,) * 3, (1.0,) * 3)
    change_json(file, do_normalize=True, image_mean=[0.5])
    preprocessing = read_pretrained_model(str(tmp_path))
    assert (
        preprocessing.info.preparation.mean,
        preprocessing.info.preparation.std,
    ) == colours and "normalised" in preprocessing.assumptions[-1]


def test_another_activation_is_refused(tmp_path) -> None:
    hf_folder(tmp_path, hidden_act="gelu_new")
    with pytest.raises(UserError, match="hidden_act=gelu_new is not supported; only gelu is"):
        read_pretrained_model(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "eps"),
    [("ViT", 1e-12), ("DeiT", 1e-12), ("Dinov2", 1e-6), ("Dinov2WithRegisters", 1e-6), ("ViTMSN", 1e-6)],
)
def test_what_transformers_config_leaves_out_is_theirs_or_assumed(kind, eps, tmp_path) -> None:
    hf_folder(tmp_path, f"{kind}Model", f"{kind}Config", num_attention_heads=2)
    change_json(tmp_path / "config.json", "layer_norm_eps", "num_attention_heads", "image_size")
    pretrained_model = read_pretrained_model(str(tmp_path))
    assert pretrained_model.info.model.norm_eps == eps == getattr(transformers, f"{kind}Config")().layer_norm_eps
    assert (
        pretrained_model.info.model.num_heads == 2
        and "num_heads=2 (embed_dim 128 / 64 per head)" in pretrained_model.assumptions
    )


def test_class_names_that_occur_twice_get_their_number(tmp_path) -> None:
    hf_folder(tmp_path, num_labels=3)
    change_json(tmp_path / "config.json", id2label={"0": "crane", "1": "dog", "2": "crane"})
    assert read_pretrained_model(str(tmp_path)).info.classes == ["crane (0)", "dog", "crane (2)"]


def test_given_heads_are_used_where_nothing_else_says_them(tmp_path) -> None:
    hf_folder(tmp_path / "theirs")
    with pytest.raises(UserError, match="has num_heads=4, so num_heads="):
        read_pretrained_model(str(tmp_path / "theirs"), num_heads=2)
    change_json(tmp_path / "theirs" / "config.json", "num_attention_heads")
    assert read_pretrained_model(str(tmp_path / "theirs"), num_heads=8).info.model.num_heads == 8
    with pytest.raises(UserError, match="has num_heads=2, so num_heads="):
        read_pretrained_model(timm_folder(tmp_path / "timm", build_small_timm()), num_heads=4)


def test_a_run_s_file_is_read_with_the_run_s_config(tmp_path) -> None:
    run = shared_run(tmp_path, **{"train.epochs": 2})
    wanted, opened_model = open_model(run, best=True), open_model(run.path / "best.safetensors")
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(opened_model(images), wanted(images)) and opened_model.info == wanted.info
    assert opened_model.notes == (f"sizes, classes and normalisation are from {run.path / 'config.json'}",)


def test_another_model_s_file_beside_a_config_says_so(tmp_path) -> None:
    word = timm_folder(tmp_path, build_small_timm())
    save_file(build_small_timm(depth=1).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(
        UserError, match=r"was read with .*config\.json\. If that belongs to another model, move the weights"
    ):
        read_pretrained_model(str(tmp_path / "other.safetensors"))
    change_json(tmp_path / "config.json", "architecture")  # now nobody's
    assert read_pretrained_model(f"{word}/other.safetensors").info.model.depth == 1


@pytest.mark.parametrize(
    "changes", [{"classes": ["a"]}, {"preparation": {"size": [32, 32], "mean": [0.5], "std": [0.5]}}], ids=str
)
def test_our_config_must_agree_with_itself(changes, tmp_path) -> None:
    made = adapt(build_pretrained_from_state_dict(build_small_timm().state_dict(), "theirs"))
    save_model_folder(tmp_path, made.info, made.weights)
    assert (
        compute_max_difference(read_pretrained_model(str(tmp_path)).weights["norm.weight"], made.weights["norm.weight"])
        == 0
    )
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match="is inconsistent"):
        read_pretrained_model(str(tmp_path))
