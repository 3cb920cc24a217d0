"""The run's temperature in `predict`, unsure predictions, and coverage against accuracy."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

import vitascope as package
from tests.training.tiny import TINY, shared_run, tiny_run
from vitascope import UserError
from vitascope.cli.coverage import _describe_reliability, describe_suggested_threshold
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.draw.explanation import draw_heat_maps_over_image
from vitascope.evaluation.coverage import (
    TABLE_THRESHOLDS,
    THRESHOLDS,
    CoverageRow,
    SuggestedThreshold,
    compute_coverage_rows,
    find_lowest_threshold,
    find_min_error_below,
)
from vitascope.evaluation.embedding import predict_with_features
from vitascope.evaluation.figures import draw_evaluation_figures
from vitascope.explain.report import evaluate_and_write_html_report
from vitascope.inference.prediction import LoadedImages, build_predictions
from vitascope.inference.scoring import wilson_interval
from vitascope.run.images import load_run_split_if_any
from vitascope.run.test_set_log import read_test_set_log

IMAGES = open_builtin_digits().load_split("test").images[:40]


def draw_random_logits(seed, scale=3.0, images=60, classes=5):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(images, classes, generator=generator)
    return logits, torch.randint(0, classes, (images,), generator=generator)


@given(seed=st.integers(0, 10_000), temperature=st.floats(0.05, 20))
def test_coverage_falls_with_the_threshold_and_threshold_0_answers_all(seed, temperature) -> None:
    logits, labels = draw_random_logits(seed)
    rows = compute_coverage_rows(logits, labels, temperature)
    assert rows[0].threshold == 0 and rows[0].coverage == 1 and rows[0].answered == len(labels)
    assert rows[0].accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    answered = [row.answered for row in rows]
    assert answered == sorted(answered, reverse=True) and len(set(THRESHOLDS)) == len(rows)
    for row in rows:
        assert (row.accuracy is None) == (row.answered == 0)
        assert row.accuracy is None or row.interval.low <= row.accuracy <= row.interval.high


@given(seed=st.integers(0, 10_000), temperature=st.floats(0.05, 20), threshold=st.sampled_from(THRESHOLDS))
def test_predict_answers_the_images_that_the_coverage_counts(seed, temperature, threshold) -> None:
    logits, labels = draw_random_logits(seed)
    classes = list("abcde")
    loaded = LoadedImages(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8))
    predictions = build_predictions(logits, loaded, classes, temperature=temperature, threshold=threshold)
    row = next(row for row in compute_coverage_rows(logits, labels, temperature) if row.threshold == threshold)
    assert sum(not item.is_unsure for item in predictions) == row.answered
    assert predictions.labels == [classes[index] for index in logits.argmax(1).tolist()]  # whatever the temperature
    for item in predictions:
        assert item.probability == max(item.probabilities.values()) and sum(item.probabilities.values()) == (
            pytest.approx(1)
        )


def test_the_coverage_of_a_worked_example() -> None:
    """Probabilities 0.95 (right), 0.8 (wrong), 0.7 (right), 0.6 (right)."""
    probabilities = torch.tensor([0.95, 0.8, 0.7, 0.6], dtype=torch.float64)
    logits = torch.stack([probabilities, 1 - probabilities], 1).log()
    rows = compute_coverage_rows(logits, torch.tensor([0, 1, 0, 0]), 1.0)
    by_threshold = {row.threshold: (row.answered, row.accuracy) for row in rows}
    assert by_threshold[0] == by_threshold[0.5] == (4, 0.75) and by_threshold[0.65] == (3, pytest.approx(2 / 3))
    assert by_threshold[0.9] == (1, 1.0) and by_threshold[0.99] == (0, None)
    assert find_lowest_threshold(rows, 0.25) == rows[0] and find_lowest_threshold(rows, 0.1).threshold == 0.81
    assert find_lowest_threshold(compute_coverage_rows(logits, torch.ones(4, dtype=torch.long), 1.0), 0.1) is None


@pytest.mark.parametrize(
    ("answered", "target", "too_few"),
    [(1, 0.02, True), (188, 0.02, True), (189, 0.02, False), (72, 0.05, True), (73, 0.05, False), (19, 0.9, True)],
)
def test_a_threshold_is_called_unreliable_if_even_no_error_could_not_support_the_target(
    answered, target, too_few
) -> None:
    row = CoverageRow(0.89, answered, answered / 1000, 1.0, wilson_interval(answered, answered))
    suggestion = SuggestedThreshold(target, "val", 1000, row, min_error_below=0.95)
    text = _describe_reliability(suggestion)
    assert suggestion.is_from_too_few_images is too_few
    assert (f"{answered} of 1,000 images answered: too few to rely on. " in text) is too_few
    assert "All lower thresholds have error rates of at least 95.00 %, so every target below" in text


def test_the_smallest_error_rate_of_lower_thresholds_bounds_the_targets_with_the_same_suggestion() -> None:
    logits, labels = torch.tensor([[2.0, 0], [1, 0], [0.8, 0], [0.1, 0]]), torch.tensor([0, 1, 0, 1])
    rows = compute_coverage_rows(logits, labels, 1.0)
    chosen = find_lowest_threshold(rows, 0.02)
    assert (chosen.threshold, chosen.answered) == (0.74, 1) and find_min_error_below(rows, 0) is None
    below = find_min_error_below(rows, chosen.threshold)
    assert below == pytest.approx(1 / 3), "three images are answered, of which one is wrong"
    assert find_lowest_threshold(rows, 0.33) == chosen != find_lowest_threshold(rows, 0.34)


def test_predict_counts_the_files_that_it_ignores(vitascope, photos, tmp_path) -> None:
    quiet = vitascope("predict", "runs/digits", "photos", "--csv", "--temperature", "1")
    for name in ("notes.txt", "labels.CSV", ".hidden.txt"):
        (tmp_path / "photos" / name).write_text("not an image")
    answer = vitascope("predict", "runs/digits", "photos", "--csv", "--temperature", "1")
    assert quiet.err == "" and answer.out == quiet.out
    assert answer.err == "Note: 2 files of other types are ignored (.csv, .txt).\n"


def test_evaluate_stores_the_validation_temperature_and_predict_applies_it(run) -> None:
    """Each split gives the same temperature: that of the validation images."""
    model = package.open_model(run)
    logits = model.compute_logits_of_stored_images(IMAGES)
    unscaled = [item.probability for item in model.predict(IMAGES)]
    assert unscaled == pytest.approx(logits.double().softmax(1).amax(1).tolist()), "nothing before an evaluation"
    stored = []
    for split in ("val", "test", "train"):
        evaluation = model.evaluate(split)
        stored.append(json.loads(run.get_path("temperature.json").read_text()))
        run.get_path("temperature.json").unlink()
    assert stored[0] == stored[1] == stored[2]
    temperature = evaluation.run_temperature
    assert stored[0]["last, views=1"]["value"] == temperature.value != 1 and temperature.fitted_on == 90
    validation = load_run_split_if_any(run, model.info, "val")
    val_logits = model.compute_logits_of_stored_images(validation.images).double()
    losses = [F.cross_entropy(val_logits / t, validation.labels).item() for t in (1, temperature.value)]
    assert losses[1] < losses[0] and losses == pytest.approx([temperature.loss, temperature.scaled_loss])
    model.evaluate("val")
    predictions = model.predict(IMAGES)
    expected = (logits.double() / temperature.value).softmax(1)
    found = np.array([list(item.probabilities.values()) for item in predictions])
    assert found == pytest.approx(expected.numpy(), abs=1e-9)
    assert predictions[0].temperature == temperature.value
    assert [item.probability for item in model.predict(IMAGES, temperature=1)] == unscaled
    assert predictions.labels == model.predict(IMAGES, temperature=1).labels
    with_features = predict_with_features(model, LoadedImages(IMAGES))
    assert [item.probability for item in with_features.predictions] == pytest.approx(
        [item.probability for item in predictions], abs=1e-5
    )


def test_explain_and_report_say_that_their_probabilities_are_unscaled(run, vitascope, tmp_path, monkeypatch) -> None:
    Image.fromarray(IMAGES[0, 0].numpy()).save(tmp_path / "digit.png")
    captions = []

    def record_caption(*arguments, **options):
        captions.append(arguments[3])
        return draw_heat_maps_over_image(*arguments, **options)

    monkeypatch.setattr("vitascope.explain.figures.draw_heat_maps_over_image", record_caption)
    words = ("explain", str(run.path), str(tmp_path / "digit.png"), "--out", str(tmp_path / "out"))
    words += ("--no-analysis", "--methods", "rollout")
    run.get_path("temperature.json").unlink(missing_ok=True)
    answer = vitascope(*words)
    assert answer.code == 0 and "temperature" not in answer.err + captions[0], answer.err
    value = package.open_model(run).evaluate("val").run_temperature.value
    note = f"before temperature scaling; predict divides the logits by the run's temperature {value:.2f}."
    captions.clear()
    assert note in vitascope(*words).err and captions[0].endswith(note)
    page = evaluate_and_write_html_report(run.path, "val", tmp_path / "report.html").read_text(encoding="utf-8")
    assert (
        page.count(f"before temperature scaling; predict divides the logits by the run&#39;s temperature {value:.2f}.")
        == 2
    )


def test_the_temperature_belongs_to_its_weights_and_views(run) -> None:
    model = package.open_model(run)
    model.evaluate("val")
    assert model.find_temperature() and model.find_temperature(views=2) is None
    assert package.open_model(run, best=True).find_temperature() is None
    assert model.with_token_reduction(merge_tokens=2).find_temperature() is None
    for damaged in ("{", "[]", '{"last, views=1": 3}', '{"last, views=1": {"value": 2}}', '{"last, views=1": null}'):
        run.get_path("temperature.json").write_text(damaged)
        assert model.find_temperature() is None and model.predict(IMAGES)[0].temperature == 1


def test_a_temperature_that_does_not_lower_the_validation_loss_is_not_applied(run, monkeypatch) -> None:
    monkeypatch.setattr("vitascope.evaluation.temperature.fit_temperature_within_bounds", lambda *_: 20.0)
    model = package.open_model(run)
    evaluation = model.evaluate("val")
    assert evaluation.run_temperature.value == evaluation.coverage.temperature == model.predict(IMAGES)[0].temperature
    assert evaluation.coverage.temperature == 1
    monkeypatch.setattr("vitascope.evaluation.temperature.fit_temperature_within_bounds", lambda *_: None)
    assert model.evaluate("val").run_temperature.value == 1 == model.find_temperature().value


def test_a_run_that_cannot_be_written_keeps_its_unscaled_probabilities(run, monkeypatch) -> None:
    def refuse(*_):
        raise UserError("read-only")

    monkeypatch.setattr("vitascope.run.temperature.write_json", refuse)
    model = package.open_model(run)
    evaluation = model.evaluate("val")
    assert evaluation.run_temperature is None and evaluation.coverage.temperature == 1
    assert model.predict(IMAGES)[0].temperature == 1


def test_the_threshold_is_chosen_on_validation_images_and_also_measured_on_the_test_images(run) -> None:
    model = package.open_model(run)
    on_validation, on_test = model.evaluate("val", target_error=0.1), model.evaluate("test", target_error=0.1)
    chosen = on_validation.coverage.suggestion
    assert chosen == on_test.coverage.suggestion and (chosen.split, chosen.images) == ("val", 90)
    assert on_validation.coverage.row_at_suggested_threshold == chosen.row and 1 - chosen.row.accuracy <= 0.1
    lower = [row for row in on_validation.coverage.rows if row.threshold < chosen.row.threshold]
    assert all(1 - row.accuracy > 0.1 for row in lower)
    coverage_report = on_test.as_dict()["coverage"]
    assert {row["threshold"] for row in coverage_report["rows"]} == {*TABLE_THRESHOLDS, chosen.row.threshold}
    at_threshold = on_test.coverage.row_at_suggested_threshold
    answered = model.predict(on_test.eval_data.samples.images, threshold=chosen.row.threshold)
    assert sum(not item.is_unsure for item in answered) == at_threshold.answered
    with pytest.raises(UserError, match="target error rate 2 is not a fraction"):
        model.evaluate("test", target_error=2)
    assert len(read_test_set_log(run)) == 1, "a refused evaluation uses no test images"
    assert "coverage" in draw_evaluation_figures(on_test)


def test_without_validation_images_the_threshold_is_chosen_on_the_evaluated_images_and_there_is_no_temperature(
    tmp_path,
) -> None:
    run = tiny_run(tmp_path, **{"data.validation": 0, "train.epochs": 1})
    model = package.open_model(run)
    evaluation = model.evaluate(target_error=0.95)
    assert evaluation.run_temperature is None and not run.get_path("temperature.json").exists()
    assert (evaluation.coverage.suggestion.split, evaluation.coverage.suggestion.images) == ("test", 899)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"threshold": 1.5}, r"The threshold 1\.5 is not a probability"),
        ({"threshold": -0.1}, "not a probability"),
        ({"threshold": float("nan")}, "not a probability"),
        ({"temperature": 0}, "The temperature 0 must be positive"),
        ({"temperature": float("inf")}, "must be positive"),
    ],
)
def test_impossible_thresholds_and_temperatures_are_refused(tmp_path, options, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        package.open_model(shared_run(tmp_path)).predict(IMAGES, **options)


@pytest.fixture
def photos(run, tmp_path, monkeypatch):
    """A run in runs/ and five images in photos/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for index, image in enumerate(IMAGES[:5]):
        Image.fromarray(image[0].numpy()).resize((40, 30)).save(tmp_path / "photos" / f"{index}.png")
    return run


def test_predict_tells_how_to_calibrate_and_then_that_it_is_calibrated(vitascope, photos) -> None:
    command = ("predict", "runs/digits", "photos", "--json")
    first = vitascope(*command)
    assert (
        f"To fit a temperature for predict: vitascope evaluate {photos.path.relative_to(photos.path.parents[2])}"
        in (first.err)
    )
    answer = vitascope("evaluate", "runs/digits", "--split", "val", "--quick", "--target-error", "0.5")
    assert "predict uses temperature" in answer.out and "fitted on 90 validation images" in answer.out
    assert " of 90 images answered (" in answer.out and "chosen on the 90 validation images" in answer.out
    second, unscaled = vitascope(*command), vitascope(*command, "--temperature", "1")
    assert second.err.count("\n") == 1 and "--temperature 1 switches this off" in second.err and not unscaled.err
    predictions_by_run = [json.loads(answer.out) for answer in (first, second, unscaled)]
    assert predictions_by_run[0] == predictions_by_run[2] and {
        item["temperature"] for item in predictions_by_run[0]
    } == {1.0}
    assert [item["class"] for item in predictions_by_run[0]] == [item["class"] for item in predictions_by_run[1]]
    assert {item["temperature"] for item in predictions_by_run[1]} == {
        package.open_model(photos).find_temperature().value
    }
    assert vitascope("predict", "runs/digits", "photos", "--temperature", "0").code == 2
    for command in (("embed", "runs/digits", "photos", "--out", "f.npz"), ("similar", "runs/digits", "photos/0.png")):
        assert "Note: Logits are divided by the run's temperature" in vitascope(*command).err
    easy = vitascope("evaluate", "runs/digits", "--split", "val", "--quick", "--target-error", "0.99").out
    assert "no threshold is needed, chosen on the 90 validation images: 90 of 90 images answered (100.0 %)" in easy
    assert "table of thresholds below and predict use temperature" in easy and "probabilities with temperature" in easy
    assert "Temperature and threshold were fitted on these same images" in easy
    evaluation = package.open_model(photos).evaluate("val")
    suggestion = replace(evaluation.coverage.suggestion, row=None)
    unreachable = replace(evaluation, coverage=replace(evaluation.coverage, suggestion=suggestion))
    assert describe_suggested_threshold(unreachable) == (
        "No threshold gives an error rate of at most 2 % on the 90 validation images."
    )


def test_unsure_predictions_are_marked_in_text_json_and_csv(vitascope, photos) -> None:
    def predict(*options):
        return vitascope("predict", "runs/digits", "photos", "--temperature", "1", *options)

    items = json.loads(predict("--json").out)
    probabilities = sorted(item["probability"] for item in items)
    threshold = str((probabilities[2] + probabilities[3]) / 2)
    marked = json.loads(predict("--json", "--threshold", threshold).out)
    assert [item["unsure"] for item in items] == [False] * 5 and sum(item["unsure"] for item in marked) == 3
    assert [item["class"] for item in marked] == [item["class"] for item in items]
    rows = list(csv.DictReader(io.StringIO(predict("--csv", "--threshold", threshold).out)))
    assert [row["unsure"] for row in rows] == [str(item["unsure"]).lower() for item in marked]
    assert [row["class"] for row in rows] == [item["class"] for item in items]
    text = predict("--threshold", threshold)
    assert text.code == 0 and text.out.count("unsure: ") == 3 and "for 5 images, 3 of them unsure" in text.out
    assert vitascope("predict", "runs/digits", "photos", "--threshold", "90").code == 2
    model = package.open_model(photos)
    assert "unsure" in model.predict(IMAGES, threshold=1)._repr_html_()
    assert "unsure" not in model.predict(IMAGES)._repr_html_()


def test_top_k_lists_the_most_probable_classes(vitascope, photos) -> None:
    whole = json.loads(vitascope("predict", "runs/digits", "photos", "--json").out)
    best = json.loads(vitascope("predict", "runs/digits", "photos", "--json", "--top-k", "3").out)
    answer = vitascope("predict", "runs/digits", "photos", "--csv", "--top-k", "3")
    rows = list(csv.DictReader(io.StringIO(answer.out)))
    assert answer.out.splitlines()[0] == "file,class,probability,unsure,class_2,probability_2,class_3,probability_3"
    for item, short, row in zip(whole, best, rows, strict=True):
        expected = sorted(item["probabilities"].items(), key=lambda pair: -pair[1])[:3]
        assert [(entry["class"], entry["probability"]) for entry in short["top_k"]] == expected
        assert "probabilities" not in short and short["class"] == expected[0][0]
        assert [row["class"], row["class_2"], row["class_3"]] == [name for name, _ in expected]
        assert float(row["probability_3"]) == pytest.approx(expected[2][1], abs=1e-6)
    shown = vitascope("predict", "runs/digits", "photos", "--top-k", "5").out
    assert "5th" in shown and "6th" not in shown
    assert vitascope("predict", "runs/digits", "photos", "--csv", "--top-k", "99").out.count("probability_10") == 1


def test_predict_fast_says_how_it_is_fast_and_gives_the_same_classes(vitascope, photos, monkeypatch) -> None:
    from vitascope.inference import fast

    monkeypatch.setattr(fast, "measure_inference_speedup", lambda name, *_: 2.0 * (name == "bfloat16"))
    monkeypatch.setattr(fast, "MAX_ACCURACY_LOSS_POINTS", 100.0)
    answer = vitascope("predict", "runs/digits", "photos", "--json", "--fast")
    assert "Note: --fast: bfloat16: matrix products 2.0 times as fast as float32" in answer.err
    plain = json.loads(vitascope("predict", "runs/digits", "photos", "--json").out)
    for item, expected in zip(json.loads(answer.out), plain, strict=True):
        assert item["probability"] == pytest.approx(expected["probability"], abs=0.02)
        assert item["class"] == expected["class"] and item["probability"] != expected["probability"], "in bfloat16"


def test_corruption_tests_report_their_progress_up_to_the_end(tmp_path) -> None:
    from vitascope.evaluation.evaluate import evaluate_and_log_test_use

    model, reports = package.open_model(shared_run(tmp_path)), []
    evaluation = evaluate_and_log_test_use(
        model, split="val", robustness=True, report_progress=lambda *report: reports.append(report)
    )
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions) and fractions[-1] == 1 and len(reports) == 17
    assert reports[0][0] == "no corruption" and reports[-1][0] == "contrast 0.8"
    assert replace(evaluation, robustness={}).as_dict()["accuracy"] == model.evaluate("val").accuracy


def test_python_evaluates_without_corruptions_and_rejects_the_old_keyword(tmp_path) -> None:
    model = package.open_model(shared_run(tmp_path, **{"train.epochs": TINY["train.epochs"]}))
    assert model.evaluate("val").robustness == {}
    assert set(model.evaluate("val", robustness=True).robustness) == {"noise", "blur", "shift", "contrast"}
    for value in (False, True):
        with pytest.raises(UserError, match="robust was renamed to robustness"):
            model.evaluate("val", robust=value)
