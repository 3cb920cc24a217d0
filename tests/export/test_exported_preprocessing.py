"""Exported models give `predict`'s answers on image files of any size and kind, run by other libraries alone."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.odd_photos import write_odd_photos
from tests.slow import slow_except
from vitascope import ModelConfig, VisionTransformer, open_model
from vitascope.data.preprocessing import Preprocessing
from vitascope.export import write_onnx
from vitascope.inference.classifier import Classifier
from vitascope.run.checkpoint import save_model_folder
from vitascope.run.directory import Run
from vitascope.run.temperature import RunTemperature, store_run_temperature_if_possible
from vitascope.weights.model_info import ModelInfo

DOCS = Path(__file__).parents[2] / "docs" / "export.md"
WEIGHTS = Path(__file__).parents[3] / "shared" / "data" / "weights" / "deit_tiny_patch16_224.safetensors"
NUM_PHOTOS = 50
TOLERANCE = 1e-4  # of a probability: rounding of float32. Other pixels change it by far more.
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}


class PhotoAnswers(NamedTuple):
    labels: list[str]
    probabilities: torch.Tensor  # photo × class


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_odd_photos(tmp_path_factory.mktemp("odd") / "photos", NUM_PHOTOS)


def make_sensitive_model(
    folder: Path, photos: list[Path], stored: tuple[int, int, int] | None = None, **settings
) -> Classifier:
    """Return a model whose predictions differ between the photos, and depend on every pixel."""
    config = ModelConfig(**(SMALL | settings))
    model = VisionTransformer(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    preparation = Preprocessing(config.image_shape, (0.45,) * config.in_chans, (0.25,) * config.in_chans)
    names = [f"class {number}" for number in range(config.num_classes)]
    info = ModelInfo(config, names, preparation, stored or (config.in_chans, *config.image_shape))
    save_model_folder(folder, info, model.state_dict())
    with torch.no_grad():  # logits with mean 0 and standard deviation 2 over the photos, for each class
        logits = predict_photos(open_model(folder), photos).probabilities.log().float()
        logits -= logits.mean(1, keepdim=True)
        model.head.weight -= model.head.weight.mean(0)
        model.head.bias -= model.head.bias.mean() + logits.mean(0)
        model.head.weight *= (2 / logits.std(0))[:, None]
        model.head.bias *= 2 / logits.std(0)
    save_model_folder(folder, info, model.state_dict())
    return open_model(folder)


def predict_photos(model: Classifier, photos: list[Path]) -> PhotoAnswers:
    predictions = model.predict(photos)
    return PhotoAnswers(
        predictions.labels,
        torch.tensor([list(item.probabilities.values()) for item in predictions], dtype=torch.float64),
    )


def read_card_code(folder: Path, library: str) -> str:
    card = (folder / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^With {library}:\n\n```python\n(.*?)\n```$", card, re.DOTALL | re.MULTILINE)[0]


def run_program_for_each_photo(code: str, photos: list[Path], folder: Path, capsys) -> PhotoAnswers:
    """Run a program for each photo, which it reads as photo.png. The part before the last empty line runs once."""
    setup, predict = code.rsplit("\n\n", 1)
    names, labels, logits = {}, [], []
    exec(setup, names)
    for photo in photos:
        shutil.copy(photo, folder / "photo.png")
        capsys.readouterr()
        exec(predict, names)
        labels.append(capsys.readouterr().out.strip())
        logits.append(torch.as_tensor(names["logits"]).detach().double().flatten())
    return PhotoAnswers(labels, torch.stack(logits).softmax(1))


def compare_answers(answers: PhotoAnswers, expected: PhotoAnswers, tolerance: float = TOLERANCE) -> None:
    assert len(set(expected.labels)) > 2, "the photos have different answers"
    assert answers.labels == expected.labels
    assert (answers.probabilities - expected.probabilities).abs().max() < tolerance


# Channels, rows and columns of the data; channels and size of the model.
SAME_SHAPE = ((3, 32, 32), 3, 32)
SAME_SHAPES = {"colour": SAME_SHAPE, "grayscale": ((1, 32, 32), 1, 32), "not square": ((3, 24, 48), 3, (24, 48))}
RESIZED_SHAPES = {"grayscale to colour": ((1, 20, 20), 3, 32), "colour to grayscale": ((3, 20, 30), 1, 32)}
SHAPES = SAME_SHAPES | RESIZED_SHAPES
RESIZED_TOLERANCE = 0.03  # Pillow rounds the intermediate size to bytes; predict does not


@pytest.mark.parametrize("library", ["timm", "transformers"])
@pytest.mark.parametrize("shape", slow_except(SHAPES, ["colour", "grayscale to colour"]))
@torch.no_grad()
def test_the_code_of_a_card_answers_as_predict(library, shape, photos, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed; the next test reads its folder without it")
    stored, channels, size = SHAPES[shape]
    if library == "transformers" and shape == "not square":
        pytest.skip("transformers' ViT has no images that are not square")
    chosen = photos if shape == "colour" else photos[:12]
    model = make_sensitive_model(tmp_path / "ours", photos, stored, in_chans=channels, img_size=size)
    folder = model.save_pretrained(tmp_path / "FOLDER", library=library)
    monkeypatch.chdir(tmp_path)
    answers = run_program_for_each_photo(read_card_code(folder, library), chosen, tmp_path, capsys)
    expected = predict_photos(model, chosen)
    compare_answers(answers, expected, TOLERANCE if shape in SAME_SHAPES else RESIZED_TOLERANCE)
    compare_answers(predict_photos(open_model(folder), chosen), expected)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_folder_keeps_normalisation_and_the_data_s_shape(library, photos, tmp_path) -> None:
    model = make_sensitive_model(tmp_path / "ours", photos, (1, 20, 20))
    folder = model.save_pretrained(tmp_path / "FOLDER", library=library)
    opened = open_model(folder)
    assert (opened.preprocessing, opened.stored_shape) == (model.preprocessing, (1, 20, 20))
    assert not any("crop_pct" in note for note in opened.notes)
    config = json.loads((folder / "config.json").read_text())
    if library == "transformers":
        processor = json.loads((folder / "preprocessor_config.json").read_text())
        assert (processor["size"], processor["resample"]) == ({"shortest_edge": 32}, 3)
        assert processor["crop_size"] == {"height": 32, "width": 32}
    else:
        settings = config["pretrained_cfg"]
        chosen = (settings["interpolation"], settings["crop_pct"], settings["crop_mode"])
        assert chosen == ("bicubic", 1.0, "center")
    for damaged in ({"stored": [1, "20", 20]}, {"stored": [20]}, [], None):
        (folder / "config.json").write_text(json.dumps(config | {"vitascope": damaged}))
        assert open_model(folder).stored_shape == (3, 32, 32)


@pytest.mark.parametrize("shape", slow_except(SHAPES, ["colour"]))
def test_the_onnx_program_of_the_docs_answers_as_predict(shape, photos, tmp_path, monkeypatch, capsys) -> None:
    code = re.findall(r"```python\n(.*?)\n```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert "vitascope" not in code and "torch" not in code
    stored, channels, size = SHAPES[shape]
    chosen = photos if shape == "colour" else photos[:12]
    model = make_sensitive_model(tmp_path / "ours", photos, stored, in_chans=channels, img_size=size)
    write_onnx(model.vision_transformer, model.info, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    answers = run_program_for_each_photo(code, chosen, tmp_path, capsys)
    printed = [line.rsplit(" ", 1) for line in answers.labels]
    assert np.allclose([float(text) for _, text in printed], answers.probabilities.amax(1), atol=1e-5)
    answers = answers._replace(labels=[label for label, _ in printed])
    tolerance = TOLERANCE if shape in SAME_SHAPES else RESIZED_TOLERANCE
    compare_answers(answers, predict_photos(model, chosen), tolerance)


@pytest.mark.parametrize("library", ["onnxruntime", "timm", "transformers", "vitascope"])
@torch.no_grad()
def test_exports_of_a_run_with_a_temperature_give_the_probabilities_of_predict(
    library, run, photos, tmp_path, monkeypatch, capsys
) -> None:
    if library in ("timm", "transformers"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    moved = Run(tmp_path / "run")
    shutil.copytree(run.path, moved.path)
    stored = RunTemperature(2.5, fitted_on=90, loss=0.5, scaled_loss=0.4)
    assert store_run_temperature_if_possible(moved, "last", 1, stored)
    model, chosen = replace(make_sensitive_model(tmp_path / "ours", photos), run=moved), photos[:12]
    monkeypatch.chdir(tmp_path)
    if library == "onnxruntime":
        code = re.findall(r"```python\n(.*?)\n```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[0]
        write_onnx(model.vision_transformer, model.info, tmp_path / "model.onnx")
    else:
        folder = model.save_pretrained(tmp_path / "FOLDER", library=library)
        code = read_card_code(folder, library)
        assert "divides the logits by 2.5" in (folder / "README.md").read_text(encoding="utf-8")
    expected = predict_photos(model, chosen)
    unscaled = torch.tensor([item.probability for item in model.predict(chosen, temperature=1)])
    assert (expected.probabilities.amax(1) - unscaled).abs().max() > 0.05
    if library == "vitascope":
        assert 'model.predict("photo.png", temperature=2.5)' in code
        answers = open_model(folder).predict(chosen, temperature=2.5)
        assert np.allclose([item.probability for item in answers], expected.probabilities.amax(1), atol=TOLERANCE)
        return
    answers = run_program_for_each_photo(code, chosen, tmp_path, capsys)
    assert (answers.probabilities - expected.probabilities).abs().max() < TOLERANCE


@pytest.mark.slow
@torch.no_grad()
def test_real_weights_exported_for_timm_answer_as_predict(photos, tmp_path, monkeypatch, capsys) -> None:
    if not WEIGHTS.is_file():
        pytest.skip("../shared/data is not on this machine")
    model = open_model(WEIGHTS)
    folder = model.save_pretrained(tmp_path / "FOLDER", library="timm")
    monkeypatch.chdir(tmp_path)
    answers = run_program_for_each_photo(read_card_code(folder, "timm"), photos, tmp_path, capsys)
    compare_answers(answers, predict_photos(model, photos))


def test_the_preprocessing_is_described_in_the_order_of_its_steps(photos, tmp_path) -> None:
    info = make_sensitive_model(tmp_path / "ours", photos, (1, 20, 30)).info
    assert info.preprocessing_description == (
        "rotate by the EXIF orientation, put transparent images on white, convert to grayscale, crop the centre to the "
        "shape of 20×30 (rows × columns), resize to 20×30 (bicubic, antialiased, 8 bits), resize to 32×32 (bilinear), "
        "convert to RGB, divide by 255, subtract 0.45, 0.45, 0.45 and divide by 0.25, 0.25, 0.25 (per channel)"
    )
