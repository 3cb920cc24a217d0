"""`open_model` opens every kind of model, and refuses everything else in one sentence."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file

import vitascope
from tests.inference.test_classifier import STORED, save_timm
from tests.training.tiny import shared_run
from vitascope import Classifier, UserError, VisionTransformer, open_model
from vitascope.inference import open_model as open_model_module
from vitascope.inference.prediction import load_or_convert_input_images
from vitascope.weights import files, pretrained

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 1, "num_classes": 5}
IMAGES = torch.randn(2, 3, 32, 32)
Opened = tuple[str, torch.nn.Module]  # a name, and the reference model whose logits are expected


def build_small_timm() -> torch.nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", **SIZES).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def make_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    model = build_small_timm()
    save_file(model.state_dict(), folder / "w.safetensors")
    return str(folder / "w.safetensors"), model


def make_vitascope_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    name, model = make_file(folder, monkeypatch)
    open_model(name).save_pretrained(folder / "ours")
    return str(folder / "ours"), model


def make_bundled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    name, model = make_vitascope_folder(folder, monkeypatch)
    (folder / "bundled").mkdir()
    shutil.move(name, folder / "bundled" / "small")
    monkeypatch.setattr(pretrained, "BUNDLED_FOLDER", folder / "bundled")
    return "bundled:small", model


def make_timm_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    name, model = make_file(folder, monkeypatch)
    open_model(name).save_pretrained(folder / "timm", library="timm")
    return str(folder / "timm"), model


def make_transformers_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    name, _ = make_file(folder, monkeypatch)
    open_model(name).save_pretrained(folder / "hf", library="transformers")
    theirs = transformers.ViTForImageClassification.from_pretrained(folder / "hf").eval()
    return str(folder / "hf"), WithLogits(theirs)


class WithLogits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).logits


def make_timm_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    model, real = build_small_timm(), timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, **how: model if how == {"pretrained": True} else real(name))
    return "timm:vit_tiny_patch16_224", model


def make_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    name, model = make_timm_folder(folder, monkeypatch)
    for module in (pretrained, open_model_module):
        monkeypatch.setattr(module, "download_hub_repository", lambda repository: Path(name))
    return "hf:someone/small", model


SOURCES = [
    *(make_file, make_vitascope_folder, make_bundled, make_timm_folder, make_transformers_folder, make_timm_name),
    make_repository,
]


@pytest.mark.parametrize("make", SOURCES)
@torch.no_grad()
def test_external_weights_are_opened_as_a_vision_transformer(make, tmp_path, monkeypatch) -> None:
    name, reference = make(tmp_path, monkeypatch)
    classifier = open_model(name)
    assert isinstance(classifier.model, VisionTransformer) and not classifier.model.training and not classifier.is_run
    assert classifier.name == name and len(classifier.classes) == 5 and classifier.config.depth == 2
    torch.testing.assert_close(classifier(IMAGES), reference(IMAGES), atol=1e-4, rtol=1e-4)
    assert classifier.predict(torch.zeros(2, 3, 40, 30)).labels and name in repr(classifier)


@pytest.mark.parametrize("kind", ["run", "path", "newest"])
def test_a_run_is_opened_by_itself_its_path_or_its_recipe_s_folder(kind, tmp_path) -> None:
    run = shared_run(tmp_path, **{"train.epochs": 2})
    classifier = open_model({"run": run, "path": str(run.path), "newest": run.path.parent}[kind])
    assert classifier.is_run and classifier.run.path == run.path and classifier.weights_label == "last"
    assert open_model(run, best=True).weights_label == "best"
    assert classifier.predict(STORED).labels == vitascope.load(run).predict(STORED).labels
    assert Classifier.from_pretrained(run).info == vitascope.from_pretrained(run).info == classifier.info


def test_a_network_that_is_no_plain_vit_predicts_and_has_one_sentence_for_the_rest(tmp_path) -> None:
    name = save_timm(tmp_path / "cnn", "test_resnet", num_classes=10, in_chans=1)
    classifier = open_model(name)
    reference = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    reference.load_state_dict(classifier.model.state_dict())
    prepared = classifier.preprocessing(load_or_convert_input_images(STORED, classifier.stored_shape).images)
    with torch.no_grad():
        assert torch.equal(classifier(prepared), reference.eval()(prepared))
        features = classifier.features(STORED)
        torch.testing.assert_close(reference.get_classifier()(features), reference(prepared))
    assert classifier.notes[0].startswith("timm's own network is used: ") and "ResNet" in classifier._repr_html_()
    with pytest.raises(UserError, match="its attention maps cannot be recorded"):
        classifier.attention_maps(STORED[:1])
    for ask in (
        lambda: classifier.evaluate(data="digits"),
        lambda: classifier.save_pretrained(tmp_path / "out"),
        lambda: classifier.with_token_reduction(merge_tokens=1),
        lambda: open_model(name, fast=True),
        lambda: open_model(name, drop_tokens=1),
    ):
        with pytest.raises(UserError, match="is not a plain ViT"):
            ask()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("nowhere", {}, "There is no run nowhere, and no weights of this name. Use timm:NAME"),
        ("nowhere.pth", {}, r"There is no file nowhere\.pth|There are no weights 'nowhere\.pth'"),
        ("timm:vit_tinny", {}, "timm has no model 'vit_tinny'"),
        ("bundled:mnist", {}, "There is no bundled model 'mnist'. This version bundles no models."),
        ("empty", {}, "empty is not a run: it has no recipe.yaml"),
        ("w.safetensors", {"best": True}, "has only one set of weights"),
        ("w.safetensors", {"device": "tpu"}, "The device tpu is not available"),
        ("w.safetensors", {"merge_tokens": 9}, "merge_tokens=9 is too large: the model has 16 patches"),
        ("broken", {}, "was not written by Vitascope, timm or transformers"),
    ],
)
def test_what_cannot_be_opened_is_refused_in_one_line(name, options, sentence, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_file(tmp_path, monkeypatch)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"layers": 3}))
    with pytest.raises(UserError, match=sentence) as caught:
        open_model(name, **options)
    assert "\n" not in str(caught.value)


def test_bundled_models_are_listed_where_a_name_is_unknown(tmp_path, monkeypatch) -> None:
    make_bundled(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"There is no bundled model 'mnist'\. Bundled models: small\."):
        open_model("bundled:mnist")


def test_the_reason_of_a_failed_download_is_the_error(monkeypatch) -> None:
    """The network is not asked twice, and its error is not taken for a network that is no plain ViT."""
    asked = []

    def fail(name: str, **_: object) -> None:
        asked.append(name)
        raise OSError("outgoing traffic has been disabled")

    monkeypatch.setattr(files, "use_cache_if_offline", torch.no_grad)
    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(UserError, match="could not be downloaded"):
        open_model("timm:resnet18")
    assert asked == ["resnet18"]
