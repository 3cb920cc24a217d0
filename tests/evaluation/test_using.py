"""A trained run in use: predictions, evaluations, features, neighbours."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope
from tests.training.tiny import tiny_run
from vitascope import UserError
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.evaluation.embedding import compute_features_of_image_files, find_similar_images
from vitascope.evaluation.figures import (
    describe_number_of_shown_errors,
    describe_possible_mislabelling,
    draw_evaluation_figures,
    write_evaluation_json_and_figures,
)
from vitascope.inference.hardware import make_float32_inference_hardware
from vitascope.inference.scoring import compute_logits, compute_outputs_in_eval_mode


def saved(folder, count=30):
    """Test images as files in class folders; (paths, their labels)."""
    test = open_builtin_digits().load_split("test").select(slice(0, count))
    paths = []
    for number, (image, label) in enumerate(zip(test.images, test.labels.tolist(), strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place / f"{number:03}.png")
        paths.append(place / f"{number:03}.png")
    return paths, test


@pytest.mark.parametrize("settings", [{}, {"model.img_size": 12, "model.patch_size": 4, "model.in_chans": 3}])
def test_a_prediction_from_a_file_equals_the_evaluation_of_the_same_image(tmp_path, settings) -> None:
    """Also where the model's size and channels are not the stored ones: a file goes the training images' way."""
    model = vitascope.open_model(tiny_run(tmp_path, **settings))
    paths, test = saved(tmp_path / "files")
    shares = (
        compute_logits(model.model, test.images, model.info.preparation, make_float32_inference_hardware(model.model))
        .double()
        .softmax(1)
    )
    for path, expected in zip(paths, shares, strict=True):
        (prediction,) = model.predict(path)
        assert prediction.label == model.classes[int(expected.argmax())] and prediction.file == str(path)
        assert list(prediction.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-5)
        assert prediction.probability == max(prediction.probabilities.values())


def test_images_in_any_form_are_the_same_images(run, tmp_path) -> None:
    model = vitascope.open_model(run)
    paths, test = saved(tmp_path / "files", 6)
    forms = [
        paths,
        [Image.open(path) for path in paths],
        test.images,
        test.images.float() / 255,
        test.images.permute(0, 2, 3, 1).numpy(),
        test.images[:, 0].numpy(),
        [image[0].numpy() for image in test.images],
        list(test.images),
    ]
    answers = [[item.probability for item in model.predict(form)] for form in forms]
    for answer in answers[1:]:
        assert answer == pytest.approx(answers[0], abs=1e-9)
    assert model.predict(test.images[0]).labels == model.predict(paths[0]).labels
    html = model.predict(paths)._repr_html_()
    assert html.count("<img") == 6 and paths[0].name in html
    assert len(model.predict(paths)[2:5]) == 3


def test_a_picture_of_another_shape_is_the_same_picture_as_file_pillow_image_array_and_tensor(run, tmp_path) -> None:
    """Cropped, resized and set on white in one way; order and repetitions are kept."""
    model = vitascope.open_model(run)
    noise = (torch.rand(30, 20, 4) * 255).byte().numpy()
    Image.fromarray(noise).save(tmp_path / "rgba.png")
    Image.fromarray(noise[..., :3]).save(tmp_path / "rgb.png")
    for name, array in (("rgba.png", noise), ("rgb.png", noise[..., :3])):
        file, picture = tmp_path / name, Image.open(tmp_path / name)
        forms = [file, picture, array, torch.from_numpy(array).permute(2, 0, 1)]
        shares = [list(model.predict(form)[0].probabilities.values()) for form in forms]
        assert all(share == pytest.approx(shares[0], abs=1e-9) for share in shares)
    a, b = tmp_path / "rgba.png", tmp_path / "rgb.png"
    assert [item.file for item in model.predict([a, b, a, a])] == [str(path) for path in (a, b, a, a)]
    assert model.features([a, a]).shape == (2, 32)


def test_one_error_is_not_called_some_images() -> None:
    assert describe_possible_mislabelling(1) == "The image may be mislabelled in the data set."
    assert describe_possible_mislabelling(2).startswith("Some of these images may be")


def test_a_classifier_can_be_fitted_on_features(run) -> None:
    probe = torch.nn.Linear(32, 10)
    features = vitascope.open_model(run).features(open_builtin_digits().load_split("train").images[:8])
    torch.nn.functional.cross_entropy(probe(features), torch.arange(8)).backward()
    assert probe.weight.grad is not None


def test_a_failed_answer_leaves_the_model_as_it_was(run) -> None:
    model = vitascope.open_model(run).model.train()
    with pytest.raises(ValueError, match="spoilt"):
        compute_outputs_in_eval_mode(
            model,
            model,
            open_builtin_digits().load_split("train").images[:2],
            _spoilt,
            make_float32_inference_hardware(model),
        )
    assert model.training


def _spoilt(images):
    raise ValueError("spoilt")


@pytest.mark.filterwarnings("ignore:Mean of empty")
def test_a_mirror_symmetric_model_gains_nothing_from_two_views_whatever_the_images_suffer(run) -> None:
    """So both views must see the same spoilt image."""
    from vitascope.evaluation.robustness import measure_accuracy_under_corruptions

    model, test = vitascope.open_model(run), open_builtin_digits().load_split("test")

    class Symmetric(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one_sided = model.model

        def forward(self, images):
            return self.one_sided(images) + self.one_sided(images.flip(-1))

    symmetric = replace(model, model=Symmetric().eval())
    accuracies = [measure_accuracy_under_corruptions(symmetric, test, views) for views in (1, 2)]
    assert accuracies[0] == accuracies[1]


def test_a_look_at_other_images_is_no_look_at_the_test_images(run, tmp_path) -> None:
    """Spelling a path in another way, or judging training images, must not turn into a test accuracy."""
    from vitascope.run.listing import summarize_run
    from vitascope.run.test_set_log import find_first_finished_test_entry, read_test_set_log

    model = vitascope.open_model(run)
    saved(tmp_path / "files", 12)
    model.evaluate(data=str(tmp_path / "files"))
    model.evaluate(data=str(tmp_path / "runs" / ".." / "files"))
    assert [opening.use_count for opening in read_test_set_log(run)] == [1, 2]
    assert find_first_finished_test_entry(run, 1) is None and summarize_run(run).test_accuracy is None
    evaluation = model.evaluate(data="digits")
    assert (
        evaluation.eval_data.is_run_data
        and evaluation.test_use_count == 1
        and summarize_run(run).test_accuracy == evaluation.accuracy
    )
    assert find_first_finished_test_entry(run, 1).use_count == 1


def test_the_runs_own_folder_without_test_images_is_not_evaluated_as_new_data(tmp_path) -> None:
    saved(tmp_path / "own", 80)
    run = tiny_run(tmp_path, **{"data.name": str(tmp_path / "own"), "train.batch_size": 8, "train.epochs": 1})
    model = vitascope.open_model(run)
    with pytest.raises(UserError, match="has no test images"):
        model.evaluate(data=str(tmp_path / "own"))
    assert model.evaluate("val").temperature is None
    for number in range(3):
        Image.new("L", (8, 8), 9 * number).save(tmp_path / "own" / "3" / f"new{number}.png")
    for split in ("val", "train"):
        with pytest.raises(UserError, match="has changed since the run was trained"):
            model.evaluate(split)
    saved(tmp_path / "other", 20)
    evaluation = model.evaluate(data=str(tmp_path / "other"))
    assert evaluation.temperature is None and "has changed since" in evaluation.temperature_note


def test_data_that_is_gone_costs_the_temperature_only(tmp_path) -> None:
    saved(tmp_path / "own", 80)
    run = tiny_run(tmp_path, **{"data.name": str(tmp_path / "own"), "train.batch_size": 8, "train.epochs": 1})
    (tmp_path / "own").rename(tmp_path / "moved")
    evaluation = vitascope.open_model(run).evaluate(data=str(tmp_path / "moved"))
    assert evaluation.temperature is None and "There is no data set" in evaluation.temperature_note


def test_an_npz_with_numbers_for_classes_judges_a_run_with_names(tmp_path) -> None:
    """Also without anything to train on."""
    _, test = saved(tmp_path / "own", 80)
    run = tiny_run(tmp_path, **{"data.name": str(tmp_path / "own"), "train.batch_size": 8, "train.epochs": 1})
    config = json.loads(run.get_path("config.json").read_text())
    config["classes"] = [f"class {name}" for name in config["classes"]]
    run.get_path("config.json").write_text(json.dumps(config))
    np.savez(tmp_path / "new.npz", x_test=test.images[:, 0].numpy(), y_test=test.labels.numpy())
    evaluation = vitascope.open_model(run).evaluate(data=str(tmp_path / "new.npz"))
    assert evaluation.eval_data.split == "test" and evaluation.per_class["class 3"].images == int(
        (test.labels == 3).sum()
    )


def test_files_that_are_no_images_are_named_in_every_answer(run, tmp_path) -> None:
    paths, _ = saved(tmp_path / "files", 12)
    (paths[0].parent / "torn.png").write_bytes(b"no image")
    model = vitascope.open_model(run)
    evaluation = model.evaluate(data=str(tmp_path / "files"))
    near = find_similar_images(model, paths[0], tmp_path / "files", 3)
    for broken in (
        evaluation.eval_data.unreadable_files,
        evaluation.as_dict()["skipped"],
        near.unreadable_files,
        model.predict(tmp_path / "files").unreadable_files,
    ):
        assert [name.split("/")[-1] for name in broken] == ["torn.png"]


def test_a_torn_line_among_the_openings_is_a_look_without_a_result(run) -> None:
    from vitascope.run.test_set_log import read_test_set_log

    run.get_path("test-openings.jsonl").write_bytes(b'{"opening": 1, "when": "20\xff')
    evaluation = vitascope.open_model(run).evaluate()
    assert evaluation.test_use_count == 2
    assert [bool(opening.result) for opening in read_test_set_log(run)] == [False, True]


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (torch.randn(2, 1, 8, 8), "bytes from 0 to 255, or floats from 0 to 1"),
        (torch.zeros(8, 8, dtype=torch.uint8), "channels × rows × columns"),
        ([], "No images were given"),
        ([3], "not int"),
        ("nowhere.png", r"no file or folder nowhere\.png"),
        (3, "not int"),
        (np.zeros((40, 40, 5), np.uint8)[None], "channels last"),
        (torch.zeros(1, 5, 9, 9, dtype=torch.uint8), "5 channels; 1 to 4 are possible"),
    ],
    ids=["normalised", "no channels", "nothing", "numbers", "missing", "number", "array", "channels"],
)
def test_what_is_no_image_is_refused(run, images, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        vitascope.open_model(run).predict(images)


def test_an_evaluation_agrees_with_itself(run) -> None:
    evaluation = vitascope.open_model(run).evaluate(robustness=True)
    report = evaluation.as_dict()
    counts = torch.tensor(report["confusion"])
    assert counts.sum() == report["images"] == 899
    assert report["accuracy"] == pytest.approx(counts.diagonal().sum().item() / 899)
    assert report["accuracy"] > 0.5, "the run must have learnt something, or this tests nothing"
    assert report["interval"][0] < report["accuracy"] < report["interval"][1] and report["top5"] >= report["accuracy"]
    assert set(report["per_class"]) == {str(number) for number in range(10)}
    assert report["temperature"]["fitted_on"] == 90 and "90 validation images" in report["temperature_words"]
    assert repr(evaluation).startswith("Evaluation(test, 899 images") and len(repr(evaluation)) < 200
    assert (evaluation.loss, evaluation.ece) == (report["loss"], report["ece"])
    worst = report["worst"]
    assert [m["probability_of_label"] for m in worst] == sorted(m["probability_of_label"] for m in worst)
    assert all(m["label"] != m["said"] and m["probability"] > m["probability_of_label"] for m in worst)
    for decline in report["robustness"].values():
        assert decline["levels"][0] == 0 and decline["accuracy"][0] == pytest.approx(report["accuracy"])
    assert report["robustness"]["noise"]["accuracy"][-1] < report["accuracy"]
    json.dumps(report)


def test_the_report_and_its_pictures_are_in_the_run_and_in_a_notebook(run) -> None:
    model = vitascope.open_model(run)
    evaluation = model.evaluate("val", robustness=True)
    folder = write_evaluation_json_and_figures(evaluation)
    assert folder == run.path / "evaluation" / "val"
    count = 90 - evaluation.num_correct
    assert describe_number_of_shown_errors(evaluation, count - 1) == f"the worst {count - 1} of {count} errors"
    assert describe_number_of_shown_errors(evaluation, count) == f"all {count} errors"
    assert sorted(p.name for p in folder.iterdir()) == [
        *("confusion.png", "coverage.png", "errors.png", "reliability.png", "report.json", "robustness.png"),
    ]
    assert evaluation._repr_html_().count("<img") == len(draw_evaluation_figures(evaluation)) == 5
    assert str(run.path) in model._repr_html_()
    assert "val accuracy" not in run._repr_html_() and "<img" in run._repr_html_()


def test_other_data_is_matched_by_the_names_of_its_classes(run, tmp_path) -> None:
    paths, test = saved(tmp_path / "files", 40)
    for path in (tmp_path / "files" / "3").iterdir():
        path.unlink()
    (tmp_path / "files" / "3").rmdir()  # a class less: numbers would be off by one
    evaluation = vitascope.open_model(run).evaluate(data=str(tmp_path / "files"))
    kept = test.labels != 3
    predicted = vitascope.open_model(run).compute_logits_of_stored_images(test.images).argmax(1)
    assert evaluation.accuracy == pytest.approx((predicted == test.labels)[kept].float().mean().item())
    assert evaluation.eval_data.split == "all" and evaluation.per_class["3"].recall is None
    assert evaluation.worst_errors[0].file in [str(path.resolve()) for path in paths]
    (tmp_path / "files" / "cat").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "files" / "cat" / "x.png")
    with pytest.raises(UserError, match="classes unknown to the model: cat"):
        vitascope.open_model(run).evaluate(data=str(tmp_path / "files"))


def test_two_views_are_the_mean_of_an_image_and_its_mirror_image(tmp_path) -> None:
    from vitascope.data.sources.arrays import open_npz_data_source
    from vitascope.run.test_set_log import read_test_set_log

    test = open_builtin_digits().load_split("test")
    pixels = test.images[:, 0].numpy()
    np.savez(tmp_path / "own.npz", x_train=pixels, y_train=test.labels, x_test=pixels[:50], y_test=test.labels[:50])
    run = tiny_run(tmp_path, **{"data.name": str(tmp_path / "own.npz"), "data.augment.flip": 0.5})
    model = vitascope.open_model(run)
    images = open_npz_data_source(tmp_path / "own.npz").load_split("test").images
    prepare = model.info.preparation
    with torch.inference_mode():
        expected = (model(prepare(images)) + model(prepare(images.flip(-1)))) / 2
    torch.testing.assert_close(
        compute_logits(model.model, images, prepare, make_float32_inference_hardware(model.model), num_views=2),
        expected,
    )
    evaluation = model.evaluate(views=2)
    assert evaluation.accuracy == pytest.approx((expected.argmax(1) == test.labels[:50]).float().mean().item())
    assert write_evaluation_json_and_figures(evaluation).name == "test-2-views"
    for views in (6, 10):
        assert write_evaluation_json_and_figures(model.evaluate(views=views)).name == f"test-{views}-views"
    assert [opening.views for opening in read_test_set_log(run)] == [2, 6, 10]
    six = model.compute_logits_of_stored_images(images, views=6).double().softmax(1)
    predictions = model.predict(images, views=6, temperature=1)
    assert [item.probability for item in predictions] == pytest.approx(six.amax(1).tolist())


def test_a_mirror_image_is_not_shown_to_a_model_that_never_saw_one(run) -> None:
    for ask in (lambda model: model.evaluate(views=2), lambda model: model.predict(torch.zeros(1, 1, 8, 8), views=2)):
        with pytest.raises(UserError, match=r"this run was trained with data\.augment\.flip=0"):
            ask(vitascope.open_model(run))
    with pytest.raises(UserError, match="views=3"):
        vitascope.open_model(run).evaluate(views=3)
    assert not run.get_path("test-openings.jsonl").exists(), "a refused look is no look"


def test_features_are_what_the_classifier_sees_and_are_written_with_their_files(run, tmp_path) -> None:
    model = vitascope.open_model(run)
    _, test = saved(tmp_path / "files", 20)
    (tmp_path / "files" / "0" / "torn.png").write_bytes(b"no image")
    image_features = compute_features_of_image_files(model, [tmp_path / "files"])
    assert [name.split("/")[-1] for name in image_features.unreadable_files] == ["torn.png"]
    with torch.inference_mode():
        logits = model.model.head(image_features.features)
    assert [model.classes[number] for number in logits.argmax(1).tolist()] == image_features.predictions.labels
    torch.testing.assert_close(model.features(test.images).sum(0), image_features.features.sum(0), atol=1e-4, rtol=0)
    image_features.save(tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as file:
        assert file["features"].shape == (20, 32) and sorted(file) == sorted(
            ["features", "file", "folder", "predicted", "probability"]
        )
        assert file["folder"][0] == "0"
    with pytest.raises(UserError, match=r"\.npz, \.parquet"):
        image_features.save(tmp_path / "out.csv")


def test_features_go_to_parquet(run, tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    saved(tmp_path / "files", 5)
    image_features = compute_features_of_image_files(vitascope.open_model(run), [tmp_path / "files"])
    image_features.save(tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column("file").to_pylist() == image_features.files
    np.testing.assert_allclose(
        np.array(table.column("features").to_pylist()), image_features.features.numpy(), rtol=1e-6
    )


def test_the_image_most_like_a_training_image_is_itself(run, tmp_path) -> None:
    model = vitascope.open_model(run)
    from vitascope.run.images import load_run_split_if_any

    train = load_run_split_if_any(run, model.info, "train")
    Image.fromarray(train.images[17, 0].numpy()).save(tmp_path / "one.png")
    first = find_similar_images(model, tmp_path / "one.png", None, 5)
    assert first.similarities[0] == pytest.approx(1, abs=1e-5) and torch.equal(
        first.nearest_samples.images[0], train.images[17]
    )
    assert first.similarities == sorted(first.similarities, reverse=True) and len(first.labels) == 5
    assert first.labels[0] == model.classes[int(train.labels[17])]
    again = find_similar_images(model, tmp_path / "one.png", None, 5)  # from the features kept in the run
    assert run.get_path("features.npz").is_file() and again.similarities == pytest.approx(first.similarities)
    with torch.no_grad():
        model.model.fc_norm.weight.mul_(-1)  # other weights: the kept features must not answer for them
    assert find_similar_images(model, tmp_path / "one.png", None, 1).similarities[0] == pytest.approx(1, abs=1e-5)


def test_a_run_from_another_machine_finds_its_data_in_this_ones_place(tmp_path, monkeypatch) -> None:
    from vitascope.data.config import DataConfig
    from vitascope.run.images import reset_missing_data_root

    assert reset_missing_data_root(DataConfig(root="/not/here")).root is None
    assert reset_missing_data_root(DataConfig(root=str(tmp_path))).root == str(tmp_path)


def test_a_run_can_be_loaded_with_token_reduction(run) -> None:
    """The predictions change and the log names the setting; the run's config does not change."""
    whole, merged = vitascope.open_model(run), vitascope.open_model(run, merge_tokens=2)
    images = open_builtin_digits().load_split("test").images[:50]
    shares = [[item.probability for item in model.predict(images)] for model in (whole, merged)]
    assert shares[0] != shares[1]
    evaluation = merged.evaluate("test")
    assert evaluation.weights_label == "last, merge_tokens=2"
    assert write_evaluation_json_and_figures(evaluation).name == "test-merge2"
    assert "merge_tokens=2" in run.get_path("test-openings.jsonl").read_text()
    assert vitascope.open_model(run).config == whole.config
    quick = vitascope.open_model(run, fast=True)
    quick = quick.with_token_reduction(drop_tokens=3)
    plain = vitascope.open_model(run, drop_tokens=3)
    assert torch.equal(quick.features(images), plain.features(images))  # what was made for all tokens is not used
    assert evaluation.reduction == "2 tokens merged per block" and evaluation.reduction in merged._repr_html_()
    with pytest.raises(UserError, match="merge_tokens and drop_tokens cannot be combined"):
        vitascope.open_model(run, merge_tokens=1, drop_tokens=1)


def test_weights_without_a_classifier_give_features_and_say_so_otherwise(tmp_path) -> None:
    """DINO's and MAE's: embed and similar work, predict and evaluate say what is missing."""
    import timm
    from safetensors.torch import save_file

    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=0)
    save_file(theirs.state_dict(), tmp_path / "features.safetensors")
    model = vitascope.open_model(tmp_path / "features.safetensors")
    paths, _ = saved(tmp_path / "files", 6)
    image_features = compute_features_of_image_files(model, [tmp_path / "files"])
    assert image_features.predictions is None and image_features.features.shape == (6, 192)
    with np.load(image_features.save(tmp_path / "f.npz")) as arrays:
        assert set(arrays) == {"file", "folder", "features"}
    alike = find_similar_images(model, paths[0], tmp_path / "files", 3)
    assert alike.prediction is None and len(alike.labels) == 3 and figures_of(alike)
    for ask in (lambda: model.predict(paths), lambda: model.evaluate(data=str(tmp_path / "files"))):
        with pytest.raises(UserError, match="has no classifier"):
            ask()


def figures_of(neighbours):
    from vitascope.evaluation.figures import draw_query_and_neighbours

    return draw_query_and_neighbours(neighbours)


def test_of_a_thousand_classes_the_confusion_shows_those_that_occur() -> None:
    from vitascope.draw.evaluation import draw_confusion_matrix

    counts = np.zeros((1000, 1000), dtype=int)
    counts[7, 7], counts[7, 900], counts[300, 300] = 5, 2, 9
    figure = draw_confusion_matrix(counts, [f"class {number}" for number in range(1000)], "few of many")
    panel = figure.axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["class 7", "class 300", "class 900"]
    assert "3 most frequent of 1000 classes" in figure.get_supxlabel().replace("\n", " ")


def test_a_story_follows_one_of_the_run_s_own_images(run, tmp_path) -> None:
    from vitascope.cli.figures import draw_and_save_trained_forward_pass

    with Image.open(draw_and_save_trained_forward_pass(run.path, tmp_path / "story.png")) as picture:
        assert picture.width > 1500


def test_only_merged_patches_are_outlined_and_numbered() -> None:
    from matplotlib.figure import Figure

    from vitascope.draw.images import (
        compute_group_number_font_size,
        draw_group_numbers_on_patches,
        outline_patch_groups,
    )

    panel, groups = Figure().subplots(), np.arange(16).reshape(4, 4)
    outline_patch_groups(panel, groups, (2, 2))
    assert len(panel.collections[0].get_segments()) == 0  # nothing is merged
    groups[0, 0] = groups[3, 3]
    outline_patch_groups(panel, groups, (2, 2))
    assert len(panel.collections[2].get_segments()) == 4  # two edges inside the image for each of two corners
    for font_size, numbers in ((compute_group_number_font_size(groups, 2.7), ["1", "1"]), (1.0, ["1"])):
        panel = Figure().subplots()
        draw_group_numbers_on_patches(panel, groups, (2, 2), font_size)
        assert [text.get_text() for text in panel.texts] == numbers


def test_fewer_tokens_are_drawn_for_a_run(run, tmp_path) -> None:
    from vitascope.cli.figures import draw_and_save_token_reduction

    paths, _ = saved(tmp_path / "files", 1)
    with Image.open(draw_and_save_token_reduction(str(run.path), paths[0], 2, tmp_path / "fewer.png")) as picture:
        assert picture.width > 500
