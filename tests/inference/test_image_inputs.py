"""Paths, Pillow images, arrays and tensors: every method of a classifier sees the pixels that `predict` sees."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from tests.training.tiny import shared_run
from vitascope import Classifier, UserError, explain, open_model

COLOUR = {"model.img_size": 12, "model.patch_size": 4, "model.in_chans": 3}
SIZES = {"wide": (45, 20), "tall": (21, 44), "square": (30, 30), "rotated": (40, 18)}  # columns, rows
METHODS = ["predict", "features", "attention_maps", "hidden_states", "explain", "preprocess"]


def make_photos(folder: Path) -> dict[str, Path]:
    """Photos of odd sizes whose middle, which remains after cropping, differs from their edges."""
    generator, paths = np.random.default_rng(1), {}
    for name, (columns, rows) in SIZES.items():
        pixels = generator.integers(0, 256, (rows, columns, 3), dtype=np.uint8)
        pixels[:, : columns // 4] //= 4
        image, exif = Image.fromarray(pixels), Image.Exif()
        exif[0x0112] = 6 if name == "rotated" else 1  # 6: a quarter turn
        paths[name] = folder / f"{name}.png"
        image.save(paths[name], exif=exif)
    return paths


def list_forms(path: Path) -> list:
    """One photo as a path, a Pillow image, an array and a tensor, alone and in lists. Arrays have no EXIF rotation."""
    pillow = Image.open(path)
    forms = [str(path), path, pillow, [path], [pillow]]
    if path.stem != "rotated":
        array = np.asarray(pillow)
        forms += [array, array[None], [array], torch.from_numpy(array.copy()).permute(2, 0, 1), array / 255]
    return forms


def call(classifier: Classifier, method: str, images) -> torch.Tensor:
    result = getattr(classifier, method)(images)
    if method == "predict":
        return torch.tensor([list(item.probabilities.values()) for item in result], dtype=torch.float64)
    return torch.cat([part.flatten(1) for part in result], 1) if isinstance(result, list) else result


def open_colour_model(folder: Path) -> Classifier:
    """A model of colour images that are stored larger than the model's size."""
    return replace(open_model(shared_run(folder, **COLOUR)), stored_shape=(3, 24, 24))


@pytest.mark.parametrize("open_classifier", [open_colour_model, lambda folder: open_model(shared_run(folder))])
@pytest.mark.parametrize("method", METHODS)
def test_a_photo_gives_the_same_result_in_every_form(tmp_path, open_classifier, method) -> None:
    classifier = open_classifier(tmp_path)
    for path in make_photos(tmp_path).values():
        first, *others = [call(classifier, method, form) for form in list_forms(path)]
        assert len(first) == 1 and all(torch.equal(first, other) for other in others)


def test_every_method_sees_the_pixels_of_predict(tmp_path) -> None:
    """Cropped to the aspect ratio, not squashed; the logits of `preprocess` are those of `predict`."""
    classifier, paths = open_colour_model(tmp_path), list(make_photos(tmp_path).values())
    images, network = classifier.preprocess(paths), classifier.model
    assert images.shape == (4, 3, 12, 12)
    expected = torch.tensor(np.array([list(item.probabilities.values()) for item in classifier.predict(paths)]))
    torch.testing.assert_close(classifier(images).double().softmax(1), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(classifier.features(paths), classifier.compute_pooled_features(images))
    for found, maps in zip(classifier.attention_maps(paths), explain.attention_maps(network, images), strict=True):
        assert torch.equal(found, maps)
    for method in ("relevance", "occlusion"):
        assert torch.equal(classifier.explain(paths, method), explain.explain(network, images, method))
    squashed = torch.stack([torch.from_numpy(np.array(Image.open(path).resize((24, 24)))) for path in paths])
    assert not torch.allclose(classifier.preprocess(squashed.permute(0, 3, 1, 2)), images, atol=0.1)


def test_a_list_may_mix_paths_pillow_images_arrays_and_tensors(tmp_path) -> None:
    classifier = open_colour_model(tmp_path)
    wide, tall, square, _ = make_photos(tmp_path).values()
    array = np.asarray(Image.open(square))
    batch = torch.from_numpy(np.stack([array, 255 - array])).permute(0, 3, 1, 2)
    found = classifier.predict([wide, Image.open(tall), array, batch, str(wide)])
    alone = [item for images in (wide, tall, array, batch, wide) for item in classifier.predict(images)]
    assert [item.file for item in found] == [str(wide), None, None, None, None, str(wide)]
    for item, expected in zip(found, alone, strict=True):
        assert list(item.probabilities.values()) == pytest.approx(list(expected.probabilities.values()), abs=1e-6)
    assert len(classifier.explain([wide, array])) == len(classifier.features([wide, array])) == 2
    (tmp_path / "torn.png").write_bytes(b"no image")
    for images, sentence in (([array, tmp_path / "torn.png"], "cannot be read"), ([wide, 3], "not int")):
        with pytest.raises(UserError, match=sentence):
            classifier.predict(images)


def test_an_explanation_is_of_the_class_that_is_asked_for(tmp_path) -> None:
    classifier = open_model(shared_run(tmp_path))
    path = make_photos(tmp_path)["wide"]
    predicted = classifier.predict(path)[0].label
    whole = classifier.explain(path)
    assert whole.shape == (1, 4, 4) and torch.equal(whole, classifier.explain(path, target=predicted))
    other = (int(predicted) + 1) % 10
    assert torch.equal(classifier.explain(path, target=other), classifier.explain(path, target=str(other)))
    assert not torch.equal(classifier.explain(path, target=other), whole)
    for options, sentence in (
        ({"target": "cat"}, "There is no class 'cat'"),
        ({"target": 10}, "There is no class 10"),
        ({"method": "relevanc"}, "Did you mean relevance"),
    ):
        with pytest.raises(UserError, match=sentence):
            classifier.explain(path, **options)
    with pytest.raises(UserError, match="has no classifier, so it has no predictions to explain"):
        replace(classifier, classes=[]).explain(path)


def test_attention_is_drawn_from_a_path(tmp_path) -> None:
    """A panel for the image, for each head of each block, and a colour bar."""
    classifier = open_model(shared_run(tmp_path))
    path = make_photos(tmp_path)["wide"]
    figure = classifier.plot_attention(path)
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "attention.png")
    panels = [panel for part in figure.subfigs for panel in part.axes]
    assert len(panels) == 1 + 2 * 2 + 1 and panels[0].get_title().startswith("wide\nprediction: ")
    drawn = np.asarray(panels[1].images[0].get_array())
    maps = classifier.attention_maps(Image.open(path))
    np.testing.assert_allclose(drawn, maps[0][0, 0].mean(0).unflatten(0, (4, 4)), rtol=1e-5)
    one = classifier.plot_attention(np.asarray(Image.open(path)), blocks=[2], heads=[1], query=(1, 3))
    panels = [panel for part in one.subfigs for panel in part.axes]
    assert len(panels) == 1 + 1 + 1 and panels[0].get_title().startswith("image\n")
    drawn = np.asarray(panels[1].images[0].get_array())
    np.testing.assert_allclose(drawn, maps[1][0, 0, 2].unflatten(0, (4, 4)), rtol=1e-5)
    for options, sentence in (
        ({"blocks": [3]}, "There is no block 3"),
        ({"heads": [0]}, "There is no head 0"),
        ({"query": (5, 1)}, "There is no patch in row 5"),
    ):
        with pytest.raises(UserError, match=sentence):
            classifier.plot_attention(path, **options)
    with pytest.raises(UserError, match="draws one image, but 2 were given"):
        classifier.plot_attention([path, path])
