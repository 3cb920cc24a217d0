"""`vitascope adapt`, and external weights in every command, as a user types them."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.weights.test_pretrained import SHARED, build_small_timm, compute_max_difference, real
from vitascope import ModelConfig, adapt, load
from vitascope.cli.adapt import CHANNELS_ERROR, GRAYSCALE_ERROR, PATCH_SIZE_ERROR, POSITIONS_ERROR
from vitascope.run.directory import make_run_for_external_weights
from vitascope.weights.pretrained import read_pretrained_model


@pytest.fixture
def weights(tmp_path) -> str:
    save_file(build_small_timm().state_dict(), tmp_path / "vit.safetensors")
    return str(tmp_path / "vit.safetensors")


def test_the_report_is_printed_and_the_model_saved(vitascope, weights, tmp_path) -> None:
    out = tmp_path / "adapted"
    answer = vitascope("adapt", weights, "img_size=28", "patch_size=4", "in_chans=1", "--out", str(out))
    assert answer.code == 0, answer.err
    for words in (
        "4×4",
        "7×7",
        "pixels covered by patches",
        "pseudo-inverse",
        "num_heads=2 (embed_dim 128 / 64 per head)",
        "Alternative without resampling: keep img_size=32 and patch_size=8, and upscale the images.",
        "The channels are still converted",
        "Relative error:",
    ):
        assert words in answer.out
    answer = vitascope("adapt", str(out), "img_size=56", "--json")
    report = json.loads(answer.out)
    assert report["grid_before"] == [7, 7] and report["grid_after"] == [14, 14] and report["pixels_seen"] == 1.0


@pytest.mark.parametrize(
    ("settings", "explained"),
    [
        ("img_size=64", ["pos_embed: the table"]),
        ("img_size=28 patch_size=4", ["patch_embed.proj.weight, patch size: the outputs", "pos_embed: the table"]),
        ("in_chans=1", ["patch_embed.proj.weight, one channel: this step alone does not change the output"]),
        ("in_chans=6", ["patch_embed.proj.weight, channels: the filters' effect"]),
        ("num_classes=7", []),
    ],
)
def test_the_relative_error_is_explained_for_what_is_resampled(vitascope, weights, settings, explained) -> None:
    answer = vitascope("adapt", weights, *settings.split())
    lines = [line for line in answer.out.splitlines() if line.startswith("  ")]
    assert [line.strip().startswith(start) for line, start in zip(lines, explained, strict=True)] == [True] * len(lines)
    assert all("Typical values: " in line for line in lines) and ("Relative error:" in answer.out) == bool(explained)


@real
def test_the_relative_errors_that_are_called_normal_are_those_of_real_weights() -> None:
    pretrained = read_pretrained_model(str(SHARED / "weights" / "deit_tiny_patch16_224.safetensors"))

    def measure_percent(name: str, **settings: Any) -> float:
        """Of the last change: the channels are adapted after the patch size."""
        changes = [change for change in adapt(pretrained, **settings).report.resampled if change.name == name]
        return 100 * changes[-1].lost

    filters = "patch_embed.proj.weight"
    assert "0 % for larger patches, 20 % for half the side length, 40 % for a quarter of it" in PATCH_SIZE_ERROR
    for patch_size, percent in ((32, 0), (8, 20), (4, 40)):
        assert measure_percent(filters, patch_size=patch_size) == pytest.approx(percent, abs=2)
    assert "50 to 85 %" in GRAYSCALE_ERROR
    assert all(45 < measure_percent(filters, in_chans=1, patch_size=patch_size) < 85 for patch_size in (32, 16, 8, 4))
    assert "0 % if the number of channels is a multiple of the old one, otherwise 25 to 65 %" in CHANNELS_ERROR
    for channels, (low, high) in {6: (0, 0.1), 4: (25, 65), 5: (25, 65), 2: (25, 65)}.items():
        assert low <= measure_percent(filters, in_chans=channels) <= high
    assert "3 % for a larger grid, 10 to 15 % for about half as many rows and columns, 36 % for 4×4" in POSITIONS_ERROR
    for img_size, (low, high) in {384: (2, 4), 512: (2, 4), 128: (10, 15), 112: (10, 15), 64: (35, 38)}.items():
        assert low < measure_percent("pos_embed", img_size=img_size) < high


def test_an_adapted_model_cannot_be_saved_in_a_run(vitascope, weights, tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine")
    answer = vitascope("adapt", weights, "img_size=64", "--out", str(tmp_path))
    assert answer.code == 2 and "is a run" in answer.err and answer.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "vit.safetensors"]


def test_a_checkpoint_with_other_objects_is_refused_with_their_names(vitascope, tmp_path) -> None:
    checkpoint = {"model": build_small_timm().state_dict(), "args": Namespace(lr=1)}
    torch.save(checkpoint, tmp_path / "checkpoint.pth")
    answer = vitascope("adapt", str(tmp_path / "checkpoint.pth"))
    assert answer.code == 2 and "run code" not in answer.err and answer.err.count("\n") == 1
    assert "Python objects other than tensors (argparse.Namespace). Nothing was executed." in answer.err
    assert "Save only the model's state_dict()" in answer.err


def test_results_of_files_with_the_same_name_have_different_folders(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x/model.safetensors", "y/model.safetensors", "y/pytorch_model.bin", "y/vit.pth"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    words = ("x/model.safetensors", "y/model.safetensors", "y/pytorch_model.bin", "y/vit.pth", "y", "hf:a/model")
    names = [make_run_for_external_weights(word, ModelConfig()).path.name for word in words]
    assert names == ["x-model", "y-model", "y-pytorch_model", "vit", "y", "hf-a-model"]


def test_too_few_patches_are_refused_and_reported_as_json(vitascope, weights) -> None:
    answer = vitascope("adapt", weights, "img_size=28", "in_chans=1", "patch_size=16", "--json")
    assert answer.code == 2 and answer.err.count("\n") == 1 and "patch_size=4 (grid 7×7)" in answer.err
    report = json.loads(answer.out)
    assert report["grid_after"] == [1, 1] and round(report["pixels_seen"], 3) == 0.327 and report["refused"]


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
def test_a_wrong_argument_gets_one_sentence(vitascope, weights, words, sentence) -> None:
    answer = vitascope("adapt", weights, *words)
    assert answer.code == 2 and sentence in answer.err and answer.err.count("\n") == 1


def test_settings_that_the_weights_do_not_define_can_be_given(vitascope, tmp_path) -> None:
    for name, settings in {
        "nopos": {"pos_embed": "none"},
        "oblong": {"img_size": (32, 40)},
        "odd": {"embed_dim": 96},
    }.items():
        save_file(build_small_timm(**settings).state_dict(), tmp_path / f"{name}.safetensors")
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


def test_another_number_of_heads_than_published_models_have_is_noted(vitascope, weights) -> None:
    answer = vitascope("adapt", weights, "num_heads=4")
    assert answer.code == 0 and "note: num_heads=4 instead of 2 regroups the pretrained heads" in answer.out
    assert "regroups" not in vitascope("adapt", weights, "num_heads=2").out


def test_every_command_prints_the_assumptions(vitascope, weights, tmp_path, monkeypatch) -> None:
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
        assert answer.code == 0 and answer.err.count("Note: assumed num_heads=2 (embed_dim 128 / 64 per head)\n") == 1
    assert load(weights).notes[0].startswith("assumed img_size=32")
    assert not load("saved").notes and "assumed" not in vitascope("predict", "saved", "a.png").err


def test_every_command_accepts_external_weights(vitascope, weights, tmp_path, monkeypatch) -> None:
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
    assert compute_max_difference(getattr(logits, "logits", logits), load(weights)(images)) < 1e-5
    assert "## Results" in (tmp_path / "out" / "README.md").read_text()


def test_settings_that_another_library_lacks_are_refused(vitascope, weights, tmp_path) -> None:
    vitascope("adapt", weights, "img_size=[32,64]", "--out", str(tmp_path / "oblong"))
    answer = vitascope(
        "export", "folder", str(tmp_path / "oblong"), "--out", str(tmp_path / "o"), "--for", "transformers"
    )
    assert answer.code == 2 and "transformers' ViT does not support non-square images" in answer.err
    assert not (tmp_path / "o").exists()
    answer = vitascope("export", "folder", weights, "--out", str(tmp_path / "o"), "--for", "keras")
    assert answer.code == 2 and "--for keras is unknown" in answer.err


def test_the_hub_gets_the_same_folder_and_its_error_is_reported(vitascope, weights, monkeypatch) -> None:
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
