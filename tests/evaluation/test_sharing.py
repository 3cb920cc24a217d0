"""A model saved for others: by the library it is for it answers the same, or nothing is written."""

import json
import re
import shutil
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import timm
import torch
import transformers

from vitascope import ModelConfig, UserError, VisionTransformer, open_model
from vitascope.data.preprocessing import Preprocessing
from vitascope.evaluation import sharing
from vitascope.evaluation.sharing import save_pretrained
from vitascope.inference.classifier import Classifier
from vitascope.inference.fast import FastInference
from vitascope.run.checkpoint import save_model_folder
from vitascope.weights.model_info import ModelInfo
from vitascope.weights.write_formats import CONVERTERS_BY_LIBRARY

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
DROPS = {"pos_drop_rate": 0.3, "proj_drop_rate": 0.3, "attn_drop_rate": 0.3, "drop_path_rate": 0.3, "drop_rate": 0.3}


def ours(folder: Path, **settings) -> Classifier:
    config = ModelConfig(**(SMALL | settings))
    model, colours = VisionTransformer(config), config.in_chans
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    preparation = Preprocessing(config.image_shape, (0.5,) * colours, (0.5,) * colours)
    classes = [str(number) for number in range(config.num_classes)]
    facts = ModelInfo(config, classes, preparation, (colours, *config.image_shape))
    save_model_folder(folder, facts, model.state_dict())
    return open_model(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def largest(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first - second).abs().max().item()


@pytest.mark.parametrize(
    "settings",
    [
        {"embed_dim": 60, "mlp_ratio": 123 / 60},
        {"mlp_ratio": 1.3},
        {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.1},
        {"norm": "rmsnorm", "qk_norm": True},
        {"global_pool": "avg", "class_token": False, "positions": "none"},
        {"img_size": (32, 64), "patch_size": (8, 16), "in_chans": 1, "qkv_bias": False},
        {"num_classes": 0},
    ],
    ids=str,
)
@torch.no_grad()
def test_timm_loads_what_is_saved_for_it(settings, tmp_path) -> None:
    model = ours(tmp_path / "ours", **settings)
    folder = model.save_pretrained(tmp_path / "out", library="timm")
    assert int(60 * (123 / 60)) == 122  # timm's own reckoning for the first of these settings
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(2, model.config.in_chans, *model.config.image_shape)
    wanted = model(images)
    assert largest(theirs(images), wanted) < 1e-5 * wanted.abs().max()


def test_a_ratio_that_timm_rounds_as_we_do_is_written_as_it_is(tmp_path) -> None:
    folder = ours(tmp_path / "ours", mlp_ratio=1.3).save_pretrained(tmp_path / "out", library="timm")
    assert json.loads((folder / "config.json").read_text())["model_args"]["mlp_ratio"] == 1.3


def test_a_layer_scale_of_zero_is_not_for_timm(tmp_path) -> None:
    model = ours(tmp_path / "ours", init_values=0.0)
    with pytest.raises(UserError, match="timm's VisionTransformer does not support init_values=0"):
        model.save_pretrained(tmp_path / "out", library="timm")
    assert model.save_pretrained(tmp_path / "out").is_dir()


@pytest.mark.parametrize("form", CONVERTERS_BY_LIBRARY)
def test_what_answers_otherwise_is_not_written_and_what_was_there_stays(form, tmp_path, monkeypatch) -> None:
    model, real = ours(tmp_path / "ours"), CONVERTERS_BY_LIBRARY[form]

    def spoilt(facts, weights):
        return real(facts, weights | {"blocks.1.norm1.weight": weights["blocks.1.norm1.weight"] * 1.001})

    model.save_pretrained(tmp_path / "out", library=form)
    before = files_of(tmp_path)
    monkeypatch.setitem(CONVERTERS_BY_LIBRARY, form, spoilt)
    for place in ("out", "new"):
        with pytest.raises(UserError, match=f"Loaded by {form}, .* logits differ .* Nothing was written"):
            model.save_pretrained(tmp_path / place, library=form)
    assert files_of(tmp_path) == before and sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out"]


@pytest.mark.parametrize("form", ["timm", "transformers"])
def test_a_folder_is_opened_by_the_library_it_is_for(form, tmp_path, monkeypatch) -> None:
    model, real = ours(tmp_path / "ours"), CONVERTERS_BY_LIBRARY[form]

    def other(facts, weights):
        """A hidden width that is not the weights': our own reader does not ask the config for it."""
        files, tensors = real(facts, weights)
        config = files["config.json"]
        if form == "timm":
            config["model_args"]["mlp_ratio"] = 2.0
        else:
            config["intermediate_size"] = 17
        return files, tensors

    monkeypatch.setitem(CONVERTERS_BY_LIBRARY, form, other)
    with pytest.raises(UserError, match=f"{form} cannot load the saved model"):
        model.save_pretrained(tmp_path / "out", library=form)
    assert not (tmp_path / "out").exists()


def test_where_transformers_is_missing_our_own_reader_checks(tmp_path, monkeypatch) -> None:
    model = ours(tmp_path / "ours")
    monkeypatch.setattr(sharing, "find_spec", lambda name: None)
    monkeypatch.setattr(transformers.ViTForImageClassification, "from_pretrained", lambda *_: pytest.fail("used"))
    assert model.save_pretrained(tmp_path / "out", library="transformers").is_dir()


def test_a_model_that_trains_or_answers_faster_is_saved_as_its_weights_are(tmp_path) -> None:
    model = ours(tmp_path / "ours", **DROPS)
    model.model.train()
    model.save_pretrained(tmp_path / "training")
    assert all(module.training for module in model.model.modules())
    model.model.eval()
    fast = FastInference(lambda images: torch.zeros(len(images), 48), "very fast")
    replace(model, fast=fast).save_pretrained(tmp_path / "fast")
    before, after = (files_of(tmp_path / name)["model.safetensors"] for name in ("ours", "fast"))
    assert before == after


@pytest.mark.parametrize("form", CONVERTERS_BY_LIBRARY)
def test_a_run_is_never_overwritten(run, form, tmp_path) -> None:
    before, model = files_of(run.path), ours(tmp_path / "ours")
    with pytest.raises(UserError, match=r"is a run, and its files would be overwritten\. Choose another folder"):
        model.save_pretrained(run.path, library=form)
    with pytest.raises(UserError, match="is a run, and its files would be overwritten"):
        save_model_folder(run.path, model.info, model.model.state_dict())
    assert files_of(run.path) == before


def test_a_place_that_cannot_be_written_gets_a_sentence(tmp_path) -> None:
    model = ours(tmp_path / "ours")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/nowhere/model"), Path("/proc/model")):
        with pytest.raises(UserError, match="could not be"):
            model.save_pretrained(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "ours"]


def test_a_card_tells_the_accuracy_of_the_weights_it_is_for(run, tmp_path) -> None:
    place = tmp_path / "copy" / run.path.name
    shutil.copytree(run.path, place)
    rows = [row | {"val_accuracy": 0.5} for row in run.metrics]
    rows[4]["val_accuracy"], rows[-1]["val_accuracy"] = 0.875, 0.25
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for best, there, elsewhere in (
        (True, "87.50 % (epoch 5, the best of 20", "25.00 %"),
        (False, "25.00 %", "87.50 %"),
    ):
        folder = open_model(place, best=best).save_pretrained(tmp_path / str(best))
        card = (folder / "README.md").read_text()
        assert f"Validation accuracy {there}" in card and elsewhere not in card


def test_a_card_counts_the_evaluations_on_test_images(run, tmp_path) -> None:
    open_model(run.path).evaluate()
    open_model(run.path).evaluate()
    card = (open_model(run.path).save_pretrained(tmp_path / "out") / "README.md").read_text()
    assert "first evaluation on the test images)." in card and "evaluation number 2 on the test images)." in card


@torch.no_grad()
def test_their_own_preparation_of_an_oblong_photo_gives_our_answer(tmp_path) -> None:
    """Resized by the shorter side, bicubic, cut around the centre: by timm and by transformers."""
    from PIL import Image
    from timm.data import create_transform, resolve_model_data_config

    model = ours(tmp_path / "ours")
    smooth = torch.rand(3, 6, 9).repeat_interleave(12, 1).repeat_interleave(12, 2)
    photo = Image.fromarray((255 * smooth).byte().permute(1, 2, 0).numpy())
    wanted = torch.tensor(list(model.predict(photo)[0].probabilities.values()))
    folder = model.save_pretrained(tmp_path / "timm", library="timm")
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    prepared = create_transform(**resolve_model_data_config(theirs), is_training=False)(photo)[None]
    assert largest(theirs(prepared).softmax(1)[0], wanted) < 0.02
    folder = model.save_pretrained(tmp_path / "transformers", library="transformers")
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    prepared = processor(images=photo, return_tensors="pt")
    theirs = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    assert largest(theirs(**prepared).logits.softmax(1)[0], wanted) < 0.02


ODD_NAMES = ["<script>alert(1)</script>", "a&b", "*x* _y_", "`q` | r", "plain"]


def read_code_by_library(card: str) -> dict[str, str]:
    """Return the Python code of a card by the library that it is for."""
    return dict(re.findall(r"^With (\w+):\n\n```python\n(.*?)\n```$", card, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("library", CONVERTERS_BY_LIBRARY)
@torch.no_grad()
def test_the_code_of_a_card_predicts_the_class_of_a_photo(library, channels, tmp_path, monkeypatch, capsys) -> None:
    from PIL import Image

    model = ours(tmp_path / "ours", in_chans=channels)
    pixels = torch.rand(6, 9, 3, generator=torch.Generator().manual_seed(1))
    photo = Image.fromarray((255 * pixels.repeat_interleave(12, 0).repeat_interleave(12, 1)).byte().numpy())
    photo.save(tmp_path / "photo.png")
    expected = model.predict(photo).labels[0]
    model.save_pretrained(tmp_path / "FOLDER", library=library)
    monkeypatch.chdir(tmp_path)
    code_by_library = read_code_by_library((tmp_path / "FOLDER/README.md").read_text(encoding="utf-8"))
    assert list(code_by_library) == list(dict.fromkeys([library, "vitascope"]))
    for code in code_by_library.values():
        exec(code, {})
        assert capsys.readouterr().out.strip().strip("[]'") == expected


def test_class_names_in_a_card_stay_text(tmp_path) -> None:
    from markdown_it import MarkdownIt

    model = ours(tmp_path / "ours")
    save_model_folder(tmp_path / "odd", replace(model.info, classes=ODD_NAMES), model.model.state_dict())
    card = (open_model(tmp_path / "odd").save_pretrained(tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    _, header, text = card.split("---\n", 2)
    assert header.splitlines()[:2] == ["library_name: vitascope", "pipeline_tag: image-classification"]
    assert escape(f"It predicts one of 5 classes: {', '.join(ODD_NAMES)}.", quote=False) in MarkdownIt().render(text)


def test_a_card_of_the_hub_names_the_repository_and_a_model_without_classes_gives_features(tmp_path) -> None:
    model = ours(tmp_path / "ours", num_classes=0)
    card = (save_pretrained(model, tmp_path / "out", repository="me/mine") / "README.md").read_text()
    assert "`vitascope export onnx hf:me/mine`" in card
    assert "pipeline_tag: image-feature-extraction" in card and "has no classifier; its output is features" in card
    assert read_code_by_library(card) == {} and "Its probabilities" not in card
    for library, code in (("timm", '"hf-hub:me/mine"'), ("transformers", '"me/mine"'), ("vitascope", '"hf:me/mine"')):
        named = tmp_path / f"{library}-folder"
        folder = save_pretrained(ours(tmp_path / library), named, library=library, repository="me/mine")
        assert code in read_code_by_library((folder / "README.md").read_text())[library]


def test_the_card_of_a_run_has_its_settings_and_its_data(run, tmp_path) -> None:
    card = (open_model(run.path).save_pretrained(tmp_path / "out") / "README.md").read_text()
    assert "| `model.depth` |" in card and "Augmentation: " in card and "## Intended use" in card
    assert "The model was trained only on digits images of 8×8 pixels." in card and str(tmp_path) not in card
    external = (open_model(tmp_path / "out").save_pretrained(tmp_path / "again") / "README.md").read_text()
    assert "## Training" not in external and "Not measured." in external and "trained only" not in external
