"""Weights from outside: every library's names, sizes from shapes, what is assumed, what is refused."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer as TimmTransformer
from torch import nn
from torchvision.transforms import v2

from tests.slow import slow_except
from vitascope import Classifier, UserError, load
from vitascope.evaluation.sharing import save_pretrained
from vitascope.weights.model_info import IMAGENET_MEAN, IMAGENET_STD, WeightsMetadata
from vitascope.weights.pretrained import build_pretrained_from_state_dict, read_pretrained_model

SHARED = Path(__file__).parents[3] / "shared" / "data"
SHAPES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
HF = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
shapes = pytest.mark.parametrize("shape", slow_except(SHAPES, ["tiny", "small"]))
real = pytest.mark.skipif(not SHARED.is_dir(), reason="the real weights are not on this machine")


def randomize_weights(model: nn.Module) -> nn.Module:
    """Away from zeros and ones, where mistakes could hide."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    return model.eval()


def build_small_timm(**settings) -> nn.Module:
    result = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 128,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 7,
    } | settings
    return randomize_weights(TimmTransformer(**result))


def have_equal_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def compute_max_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


@shapes
@torch.no_grad()
def test_timm_s_weights_go_in_and_out_unchanged(shape, tmp_path) -> None:
    width, heads = SHAPES[shape]
    theirs = randomize_weights(TimmTransformer(embed_dim=width, num_heads=heads, depth=12, num_classes=10))
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    ours = load(tmp_path / "theirs.safetensors")
    assert ours.config.num_heads == heads
    back = timm.create_model(
        f"local-dir:{save_pretrained(ours, tmp_path / 'out', library='timm')}", pretrained=True
    ).eval()
    images = torch.randn(1, 3, 224, 224)
    assert (
        compute_max_difference(ours(images), theirs(images)) < 1e-5
        and compute_max_difference(back(images), theirs(images)) < 1e-5
    )
    assert have_equal_tensors(back.state_dict(), theirs.state_dict())


@shapes
@torch.no_grad()
def test_transformers_weights_go_in_and_out_unchanged(shape, tmp_path) -> None:
    width, heads = SHAPES[shape]
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width, "num_labels": 10}
    theirs = randomize_weights(transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert ours.config.norm_eps == 1e-12 and ours.classes == [f"LABEL_{number}" for number in range(10)]
    folder = save_pretrained(ours, tmp_path / "out", library="transformers")
    back = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    images = torch.randn(1, 3, 224, 224)
    assert compute_max_difference(ours(images), theirs(images).logits) < 1e-5
    assert compute_max_difference(back(images).logits, theirs(images).logits) < 1e-5
    assert have_equal_tensors(back.state_dict(), theirs.state_dict())


@torch.no_grad()
def test_transformers_names_in_memory_are_read_too() -> None:
    theirs = randomize_weights(
        transformers.ViTForImageClassification(transformers.ViTConfig(**HF, intermediate_size=256))
    )
    ours = build_pretrained_from_state_dict(
        theirs.state_dict(), "memory", WeightsMetadata({"num_heads": 4})
    ).build_model()
    images = torch.randn(2, 3, 32, 32)
    assert compute_max_difference(ours(images), theirs(images).logits) < 1e-5


@pytest.mark.parametrize(
    ("kind", "left_out", "note"),
    [
        ("Dinov2", ["mask_token"], None),
        ("Dinov2WithRegisters", ["mask_token"], "position embedding was added to the class token"),
        ("DeiT", [], "became a register"),
    ],
)
@torch.no_grad()
def test_dino_and_deit_backbones_give_the_same_features(kind, left_out, note, tmp_path) -> None:
    theirs = randomize_weights(getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**HF)))
    theirs.save_pretrained(tmp_path)
    pretrained_model = read_pretrained_model(str(tmp_path))
    images = torch.randn(2, 3, 32, 32)
    assert compute_max_difference(pretrained_model.build_model()(images), theirs(images).last_hidden_state[:, 0]) < 1e-5
    assert [name for name in pretrained_model.dropped_names if "pooler" not in name] == left_out
    assert bool(pretrained_model.notes) == bool(note) and (not note or note in pretrained_model.notes[0])


@torch.no_grad()
def test_mae_s_encoder_is_read_and_its_decoder_dropped(tmp_path) -> None:
    sizes = HF | {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    theirs = randomize_weights(transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes, mask_ratio=0.0)))
    theirs.save_pretrained(tmp_path)
    pretrained_model = read_pretrained_model(str(tmp_path))
    images = torch.randn(2, 3, 32, 32)
    seen = theirs.vit(images, noise=torch.arange(16.0).expand(2, -1)).last_hidden_state[:, 0]
    assert compute_max_difference(pretrained_model.build_model()(images), seen) < 1e-5
    assert pretrained_model.dropped_names and all(name.startswith("decoder") for name in pretrained_model.dropped_names)


@torch.no_grad()
def test_torchvision_s_weights_are_read() -> None:
    theirs = torchvision.models.VisionTransformer(32, 8, 2, 2, 128, 256, num_classes=7)
    images = torch.randn(2, 3, 32, 32)
    assert (
        compute_max_difference(
            build_pretrained_from_state_dict(randomize_weights(theirs).state_dict(), "theirs").build_model()(images),
            theirs(images),
        )
        < 1e-5
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5},
        {"global_pool": "avg", "class_token": False},
        {"qk_norm": True, "qkv_bias": False},
        {"reg_tokens": 1},
        {"patch_size": (8, 4), "img_size": (32, 16)},
        {"num_classes": 0},
    ],
    ids=str,
)
@torch.no_grad()
def test_sizes_are_inferred_from_the_shapes(settings, tmp_path) -> None:
    theirs = build_small_timm(**settings)
    torch.save(
        {"model_ema": {f"module.{name}": weight for name, weight in theirs.state_dict().items()}, "epoch": 3},
        tmp_path / "w.pth",
    )
    pretrained_model = read_pretrained_model(str(tmp_path / "w.pth"))
    images = torch.randn(2, pretrained_model.info.model.in_chans, *pretrained_model.info.model.image_shape)
    assert compute_max_difference(pretrained_model.build_model()(images), theirs(images)) < 1e-5
    assert any("num_heads=2" in words for words in pretrained_model.assumptions)


def test_dino_s_checkpoint_gives_the_teacher_s_backbone(tmp_path) -> None:
    teacher, student = build_small_timm(num_classes=0), build_small_timm(num_classes=0, qkv_bias=False)
    parts = {f"backbone.{name}": weight for name, weight in teacher.state_dict().items()}
    parts |= {"head.mlp.0.weight": torch.zeros(4, 128), "head.last_layer.weight_v": torch.zeros(9, 4)}
    torch.save({"student": student.state_dict(), "teacher": parts}, tmp_path / "dino.pth")
    pretrained_model = read_pretrained_model(str(tmp_path / "dino.pth"))
    assert pretrained_model.info.model.num_classes == 0 and torch.equal(
        pretrained_model.weights["norm.weight"], teacher.norm.weight
    )


def test_another_number_of_heads_can_be_given(tmp_path) -> None:
    theirs = build_small_timm(num_heads=4)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    pretrained_model = read_pretrained_model(str(tmp_path / "w.safetensors"), num_heads=4)
    images = torch.randn(1, 3, 32, 32)
    assert compute_max_difference(pretrained_model.build_model()(images), theirs(images)) < 1e-5 and not any(
        "num_heads" in words for words in pretrained_model.assumptions
    )


def test_a_timm_vit_is_opened_by_name_and_another_architecture_is_refused(monkeypatch) -> None:
    built = {}
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: built[name])
    built["vit_tiny_patch16_224"] = build_small_timm()
    pretrained_model = read_pretrained_model("timm:vit_tiny_patch16_224")
    images = torch.randn(1, 3, 32, 32)
    assert compute_max_difference(pretrained_model.build_model()(images), built["vit_tiny_patch16_224"](images)) < 1e-5
    built["vit_tiny_patch16_224"] = build_small_timm(act_layer="relu")
    with pytest.raises(
        UserError, match="not a plain ViT: with the same weights, Vitascope's model gives a different output"
    ):
        read_pretrained_model("timm:vit_tiny_patch16_224")
    built["resnet18"] = nn.Linear(1, 1)
    with pytest.raises(UserError, match="timm's Linear is not a plain ViT"):
        read_pretrained_model("timm:resnet18")


def test_without_a_network_the_error_names_the_files_to_download(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("vitascope.weights.files._is_proxied_or_reachable", lambda address: False)
    with pytest.raises(UserError, match=r"repository someone/some-vit could not be downloaded.*in one folder here"):
        read_pretrained_model("hf:someone/some-vit")
    with pytest.raises(
        UserError, match=r"timm/vit_tiny_patch16_224\.\w+ on another machine.*instead of timm:vit_tiny.*weights=FOLDER"
    ):
        read_pretrained_model("timm:vit_tiny_patch16_224")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("it-was-run",)


def test_a_pickle_with_code_is_refused_and_nothing_is_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Malicious()}, "new.pth")
    Path("old.pth").write_bytes(pickle.dumps({"model": Malicious()}))
    for name in ("new.pth", "old.pth"):
        with pytest.raises(UserError, match="Nothing was executed"):
            read_pretrained_model(name)
    assert not Path("it-was-run").exists()


def test_incomplete_and_unknown_files_are_refused(tmp_path) -> None:
    whole = build_small_timm().state_dict()
    save_file(whole, tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(data[: len(data) // 2])
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    (tmp_path / "torn.pth").write_bytes(buffer.getvalue()[:5000])
    with zipfile.ZipFile(tmp_path / "empty.pth", "w"):
        pass
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    save_file(whole | {"blocks.1.mlp.fc1.weight": torch.zeros(3, 128)}, tmp_path / "shape.safetensors")
    save_file(whole | {"attn_pool.latent": torch.zeros(3)}, tmp_path / "more.safetensors")
    save_file({name: weight for name, weight in whole.items() if name != "norm.bias"}, tmp_path / "less.safetensors")
    save_file(build_small_timm(embed_dim=96).state_dict(), tmp_path / "odd.safetensors")
    save_file(whole | {"pos_embed": torch.zeros(1, 13, 128)}, tmp_path / "grid.safetensors")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    for name, sentence in (
        ("torn.safetensors", "is not a complete safetensors file"),
        ("torn.pth", "cannot be read as weights"),
        ("empty.pth", "cannot be read as weights"),
        ("other.safetensors", "does not have the parameter names of a ViT of timm"),
        ("shape.safetensors", r"blocks.1.mlp.fc1.weight has shape \[3, 128\]"),
        ("more.safetensors", "it has the unexpected weights attn_pool.latent"),
        ("less.safetensors", "lacks norm.bias"),
        ("odd.safetensors", "so num_heads is unknown"),
        ("grid.safetensors", "13 positions do not form a square grid"),
        ("tensor.pt", "contains no named tensors"),
        ("none.pth", "There is no file"),
        ("none", "There are no weights"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_pretrained_model(str(tmp_path / name))


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_pretrained_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "swin"}')
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        read_pretrained_model(str(tmp_path))
    save_file(build_small_timm().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has model_type 'swin'"):
        read_pretrained_model(str(tmp_path))


@real
@torch.no_grad()
def test_published_weights_predict_as_timm_does_on_photos() -> None:
    path = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
    ours = load(path)
    theirs = timm.create_model("deit_tiny_patch16_224", checkpoint_path=str(path)).eval()
    lines = (SHARED / "photos" / "imagenet" / "labels.csv").read_text().splitlines()[1:]
    files = [SHARED / "photos" / "imagenet" / line.split(",")[0] for line in lines]
    assert len(files) == 40
    right = 0
    steps = (
        v2.Resize(256, v2.InterpolationMode.BICUBIC),
        v2.CenterCrop(224),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
    )
    transform = v2.Compose([*steps, v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)])
    for file, line in zip(files, lines, strict=True):
        image = transform(Image.open(file).convert("RGB"))[None]
        logits, wanted = ours(image), theirs(image)
        assert compute_max_difference(logits, wanted) < 1e-4
        right += int(logits.argmax()) == int(line.split(",")[1])
    assert right == 29  # the data's README measured that through timm


def test_a_saved_model_is_loaded_unchanged(tmp_path) -> None:
    save_file(build_small_timm().state_dict(), tmp_path / "w.safetensors")
    ours = load(tmp_path / "w.safetensors")
    folder = ours.save_pretrained(tmp_path / "saved")
    again = type(ours).from_pretrained(folder)
    assert isinstance(again, Classifier) and have_equal_tensors(again.model.state_dict(), ours.model.state_dict())
    assert again.info == ours.info and "library_name: vitascope" in (folder / "README.md").read_text()


def test_for_a_file_without_weights_the_error_lists_its_keys(tmp_path) -> None:
    torch.save({"net": build_small_timm().state_dict(), "epoch": 3}, tmp_path / "net.pth")
    with pytest.raises(UserError, match=r"it contains net, epoch\..* directly or under one of model_ema"):
        read_pretrained_model(str(tmp_path / "net.pth"))
    state = build_small_timm().state_dict()
    state["blocks.0.mlp.fc1.weight"][0, 0] = float("nan")
    save_file(state, tmp_path / "nan.safetensors")
    with pytest.raises(UserError, match=r"blocks.0.mlp.fc1.weight contains NaN or infinite values"):
        read_pretrained_model(str(tmp_path / "nan.safetensors"))


def test_for_a_misspelt_timm_name_similar_names_are_suggested() -> None:
    with pytest.raises(UserError, match="deit_tiny_patch16_224"):
        read_pretrained_model("timm:deit_tinny_patch16_224")
