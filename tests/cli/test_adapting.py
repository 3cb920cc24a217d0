"""`vitascope adapt` and weights from outside in every verb, as a user types them."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.weights.test_pretrained import apart, small_timm
from vitascope import ModelConfig, load
from vitascope.run.directory import create_external_model


@pytest.fixture
def weights(tmp_path) -> str:
    save_file(small_timm().state_dict(), tmp_path / "vit.safetensors")
    return str(tmp_path / "vit.safetensors")


def test_the_report_is_printed_and_the_model_saved(vitascope, weights, tmp_path) -> None:
    out = tmp_path / "adapted"
    answer = vitascope("adapt", weights, "img_size=28", "patch_size=4", "in_chans=1", "--out", str(out))
    assert answer.code == 0, answer.err
    for words in (
        "4×4",
        "7×7",
        "pixels used",
        "pseudo-inverse",
        "num_heads=2 (embed_dim 128 / 64 per head)",
        "Alternative without resampling: keep img_size=32 and patch_size=8, and upscale the images.",
        "The channels are still converted",
        "Relative error:",
    ):
        assert words in answer.out
    answer = vitascope("adapt", str(out), "img_size=56", "--json")
    said = json.loads(answer.out)
    assert said["grid_before"] == [7, 7] and said["grid_after"] == [14, 14] and said["pixels_seen"] == 1.0


def test_a_run_is_no_place_for_an_adapted_model(vitascope, weights, tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine")
    answer = vitascope("adapt", weights, "img_size=64", "--out", str(tmp_path))
    assert answer.code == 2 and "is a run" in answer.err and answer.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "vit.safetensors"]


def test_a_checkpoint_with_other_objects_is_told_which_and_what_to_save(vitascope, tmp_path) -> None:
    checkpoint = {"model": small_timm().state_dict(), "args": Namespace(lr=1)}
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    answer = vitascope("adapt", str(tmp_path / "checkpoint.pth"))
    assert answer.code == 2 and "run code" not in answer.err and answer.err.count("\n") == 1
    assert "Python objects other than tensors (argparse.Namespace). Nothing was executed." in answer.err
    assert "Save only the model's state_dict()" in answer.err


def test_what_is_found_out_about_files_of_the_same_name_is_kept_apart(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x/model.safetensors", "y/model.safetensors", "y/pytorch_model.bin", "y/vit.pth"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    words = ("x/model.safetensors", "y/model.safetensors", "y/pytorch_model.bin", "y/vit.pth", "y", "hf:a/model")
    names = [create_external_model(word, ModelConfig()).path.name for word in words]
    assert names == ["x-model", "y-model", "y-pytorch_model", "vit", "y", "hf-a-model"]


def test_what_sees_too_little_is_refused_and_told_as_json_too(vitascope, weights) -> None:
    answer = vitascope("adapt", weights, "img_size=28", "in_chans=1", "patch_size=16", "--json")
    assert answer.code == 2 and answer.err.count("\n") == 1 and "patch_size=4 (grid 7×7)" in answer.err
    said = json.loads(answer.out)
    assert said["grid_after"] == [1, 1] and round(said["pixels_seen"], 3) == 0.327 and said["refused"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("imgsize=28",), "Did you mean img_size?"),
        (("img_size=big",), "give a whole number, or a pair"),
        (("img_size=true",), "give a whole number, or a pair"),
        (("num_heads=3",), "num_heads=3 does not divide embed_dim=128"),
        (("num_heads=0",), "num_heads=0 is too small"),
        (("num_heads=[2,2]",), "give a whole number."),
        (("in_chans=0",), "in_chans=0 is too small"),
        (("patch_size=0",), "patch_size=0 is too small"),
        (("img_size=0",), "img_size=0 is too small"),
        (("patch_size=[4,0]",), "is too small"),
        (("img_size=[1,2,3]",), "is not a size"),
        (("img_size=[32]",), "is not a size"),
        (('img_size=["a","b"]',), "is not a size"),
    ],
)
def test_a_wrong_word_gets_one_sentence(vitascope, weights, words, sentence) -> None:
    answer = vitascope("adapt", weights, *words)
    assert answer.code == 2 and sentence in answer.err and answer.err.count("\n") == 1


def test_what_weights_do_not_tell_can_be_said(vitascope, tmp_path) -> None:
    for name, settings in {
        "nopos": {"pos_embed": "none"},
        "oblong": {"img_size": (32, 40)},
        "odd": {"embed_dim": 96},
    }.items():
        save_file(small_timm(**settings).state_dict(), tmp_path / f"{name}.safetensors")
    for name, words in {"nopos": "img_size=32", "oblong": "img_size=[32,40]", "odd": "num_heads=2"}.items():
        file, out = str(tmp_path / f"{name}.safetensors"), str(tmp_path / name)
        answer = vitascope("predict", file, str(tmp_path))
        key = words.partition("=")[0]
        assert answer.code == 2 and f"vitascope adapt {file} {key}=" in answer.err and "--out FOLDER" in answer.err
        answer = vitascope("adapt", file, words, "--out", out)
        assert answer.code == 0, answer.err
        assert str(getattr(load(out).config, key)) == str({"nopos": 32, "oblong": (32, 40), "odd": 2}[name])
    answer = vitascope("adapt", str(tmp_path / "oblong.safetensors"), "img_size=[64,80]")
    assert answer.code == 2 and "21 positions do not form a square grid" in answer.err
    answer = vitascope("adapt", str(tmp_path / "odd"), "num_heads=3")
    assert answer.code == 2 and "has num_heads=2, so num_heads=" in answer.err


def test_what_was_assumed_is_said_by_every_verb(vitascope, weights, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "red").save("a.png")
    for words in (
        ("predict", weights, "a.png", "--json"),
        ("embed", weights, "a.png", "--out", "features.npz"),
        ("explain", weights, "a.png", "--json", "--methods", "attention", "--no-analysis"),
        ("anatomy", weights, "--json"),
        ("export", "folder", weights, "--out", "saved"),
    ):
        answer = vitascope(*words)
        assert (
            answer.code == 0 and answer.err.count("vitascope: assumed: num_heads=2 (embed_dim 128 / 64 per head)") == 1
        )
    assert load(weights).notes[0].startswith("assumed: img_size=32")
    assert not load("saved").notes and "assumed" not in vitascope("predict", "saved", "a.png").err


def test_every_verb_takes_weights_from_outside(vitascope, weights, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("0", "1"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        Image.new("RGB", (40, 30), "red").save(tmp_path / "photos" / kind / "a.png")
    answer = vitascope("predict", weights, "photos", "--json")
    assert answer.code == 0 and len(json.loads(answer.out)[0]["probabilities"]) == 7
    answer = vitascope("evaluate", weights, "--data", "photos", "--quick", "--json")
    assert answer.code == 0 and json.loads(answer.out)["images"] == 2
    assert (tmp_path / "evaluated" / "vit" / "evaluation").is_dir()
    answer = vitascope("evaluate", weights)
    assert answer.code == 2 and "is not a run, so it has no data. Name the images to evaluate" in answer.err
    answer = vitascope("anatomy", weights, "img_size=64", "--json")
    assert answer.code == 0 and json.loads(answer.out)["stages"][0]["shape"] == [1, 3, 64, 64]
    answer = vitascope("explain", weights, "photos/0/a.png", "--json", "--methods", "attention")
    assert answer.code == 0, answer.err
    answer = vitascope("embed", weights, "photos", "--out", "features.npz")
    assert answer.code == 0 and "2 images × 128 features" in answer.out
    answer = vitascope("similar", weights, "photos/0/a.png")
    assert answer.code == 2 and "is not a run, so it has no training or validation images" in answer.err


@pytest.mark.parametrize("form", ["vitascope", "timm", "transformers"])
def test_a_folder_is_written_and_its_line_of_python_works(vitascope, weights, tmp_path, form) -> None:
    answer = vitascope("export", "folder", weights, "--out", str(tmp_path / "out"), "--for", form)
    assert answer.code == 0, answer.err
    line = next(line for line in answer.out.splitlines() if line.startswith("model = "))
    names: dict = {}
    exec("\n".join([*(x for x in answer.out.splitlines() if x.startswith(("import", "from"))), line]), names)
    images = torch.randn(2, 3, 32, 32)
    logits = names["model"](images)
    assert apart(getattr(logits, "logits", logits), load(weights)(images)) < 1e-5
    assert "## Accuracy" in (tmp_path / "out" / "README.md").read_text()


def test_what_another_library_lacks_is_refused(vitascope, weights, tmp_path) -> None:
    vitascope("adapt", weights, "img_size=[32,64]", "--out", str(tmp_path / "oblong"))
    answer = vitascope(
        "export", "folder", str(tmp_path / "oblong"), "--out", str(tmp_path / "o"), "--for", "transformers"
    )
    assert answer.code == 2 and "transformers' ViT does not support non-square images" in answer.err
    assert not (tmp_path / "o").exists()
    answer = vitascope("export", "folder", weights, "--out", str(tmp_path / "o"), "--for", "keras")
    assert answer.code == 2 and "form='keras' is unknown" in answer.err


def test_the_hub_gets_the_same_folder_and_its_refusal_is_told(vitascope, weights, monkeypatch) -> None:
    seen = {}

    class Hub:
        def __init__(self, token=None):
            pass

        def create_repo(self, repository, private, exist_ok):
            seen["repository"] = repository, private
            return f"address of {repository}"

        def upload_folder(self, repo_id, folder_path):
            seen["files"] = sorted(path.name for path in Path(folder_path).iterdir())

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    answer = vitascope("export", "hub", weights, "me/mine", "--private")
    assert answer.code == 0 and "address of me/mine" in answer.out
    assert seen == {"repository": ("me/mine", True), "files": ["README.md", "config.json", "model.safetensors"]}
    monkeypatch.setattr(Hub, "create_repo", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    answer = vitascope("export", "hub", weights, "me/mine")
    assert answer.code == 2 and "could not be written to the hub (no network)" in answer.err
