"""`vitascope evaluate`, `predict`, `embed`, `similar`, `runs`, `record`, as a user types them."""

import csv
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.training.tiny import TINY, shared_run
from vitascope.cli.runs import _format_cells_by_column
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.run.directory import open_run_or_newest
from vitascope.run.listing import RunSummary

WORDS = [f"{key}={value}" for key, value in TINY.items()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(vitascope, here):
    """Two runs in runs/, six test images in photos/."""
    for seed in (1, 2):
        shared_run(here / "runs", **{"train.seed": seed, "train.epochs": 1})
    (here / "photos" / "inner").mkdir(parents=True)
    for number, image in enumerate(open_builtin_digits().load_split("test").images[:6]):
        Image.fromarray(image[0].numpy()).resize((40, 30)).save(here / "photos" / "inner" / f"{number}.png")
    return here


def test_json_output_is_only_json_with_the_documented_keys(vitascope, trained) -> None:
    report = json.loads(vitascope("evaluate", "runs/digits", "--split", "val", "--json").out)
    assert {"accuracy", "interval", "top5", "ece", "per_class"} <= set(report)
    assert 0 <= report["interval"][0] <= report["accuracy"] <= report["interval"][1] <= 1 and report["images"] == 90
    place = open_run_or_newest("runs/digits").get_path("evaluation") / "val"
    assert json.loads((place / "report.json").read_text()) == report
    with Image.open(place / "confusion.png") as picture:
        assert picture.width > 500
    quick = json.loads(vitascope("evaluate", "runs/digits", "--split", "val", "--json", "--quick").out)
    assert quick["robustness"] == {} and quick["accuracy"] == report["accuracy"]
    kept = json.loads((place / "report.json").read_text())
    assert kept["robustness"] == report["robustness"] and (place / "robustness.png").is_file(), (
        "of the same predictions"
    )
    (place / "report.json").write_text(json.dumps(kept | {"loss": 1.1 * kept["loss"]}))
    vitascope("evaluate", "runs/digits", "--split", "val", "--json", "--quick")
    assert json.loads((place / "report.json").read_text())["robustness"] == {}, "those were of other predictions"
    assert not (place / "robustness.png").exists()


def test_evaluating_prints_classes_calibration_and_corruptions(vitascope, trained) -> None:
    answer = vitascope("evaluate", "runs/digits", "--split", "val")
    for words in (
        "validation accuracy",
        "95 % confidence interval",
        "calibration error",
        "temperature",
        "recall",
        "most frequent wrong predictions (images)",
        "Each cell: strength: accuracy.",
        "noise (standard deviation; pixel values 0 to 1)",
        "blur (standard deviation in pixels)",
        "contrast (fraction removed)",
        "level 4",
    ):
        assert words in answer.out
    assert "selection bias" not in answer.out and "because the temperature is fitted on these same images" in answer.out


@pytest.mark.parametrize(("temperature", "is_worse"), [(0.05, True), (20.0, False)])
def test_a_temperature_that_increases_the_loss_is_commented(
    vitascope, trained, monkeypatch, temperature, is_worse
) -> None:
    """After one epoch the model is hardly better than random guessing, so only a high temperature suits it."""
    monkeypatch.setattr("vitascope.evaluation.temperature.fit_temperature_within_bounds", lambda *_: temperature)
    answer = vitascope("evaluate", "runs/digits", "--quick")
    sentence = "On these 899 test images, temperature scaling increases the loss ("
    assert f"After temperature scaling (logits / {temperature:.2f}" in answer.out
    assert (sentence in answer.out) is is_worse


def test_token_reduction_is_printed_and_too_large_values_are_refused(vitascope, trained) -> None:
    words = ("evaluate", "runs/digits", "--split", "val", "--quick")
    dropped = vitascope(*words, "--drop-tokens", "2").out
    assert "(2 tokens dropped per block) on 90 images" in dropped
    assert "(up to 8 tokens merged per block)" in vitascope(*words, "--merge-tokens", "8").out
    refused = vitascope(*words, "--merge-tokens", "50")
    assert refused.code == 2 and "a block can merge at most 8 of them" in refused.err
    assert "a block can drop at most 15 of them" in vitascope(*words, "--drop-tokens", "16").err


def test_predicting_files_and_folders_in_three_formats(vitascope, trained) -> None:
    (trained / "photos" / "torn.jpg").write_bytes(b"not an image")
    (trained / "photos" / "notes.txt").write_text("not an image, and not meant to be")
    answer = vitascope("predict", "runs/digits", "photos", "--json")
    predictions = json.loads(answer.out)
    assert len(predictions) == 6 and {"file", "class", "probability", "probabilities"} <= set(predictions[0])
    assert sum(predictions[0]["probabilities"].values()) == pytest.approx(1)
    assert "torn.jpg cannot be read as an image and is skipped" in answer.err and "notes" not in answer.err
    rows = list(csv.DictReader(io.StringIO(vitascope("predict", "runs/digits", "photos", "--csv").out)))
    assert [row["class"] for row in rows] == [item["class"] for item in predictions]
    assert float(rows[0]["probability"]) == pytest.approx(predictions[0]["probability"], abs=1e-6)
    shown = vitascope("predict", "runs/digits", "photos/inner/3.png").out
    assert (
        "photos/inner/3.png" in shown
        and f"{predictions[3]['class']} {100 * predictions[3]['probability']:.1f} %" in shown
    )


def test_features_and_neighbours(vitascope, trained) -> None:
    assert "6 images × 16 features: out/f.npz" in vitascope("embed", "runs/digits", "photos", "--out", "out/f.npz").out
    assert (trained / "out" / "f.npz").is_file()
    assert "Figure: similar.png" in vitascope("similar", "runs/digits", "photos/inner/0.png").out
    among = vitascope("similar", "runs/digits", "photos/inner/0.png", "--among", "photos", "--count", "3").out
    assert "photos/inner/0.png" not in among.split("\n", 2)[2] and among.count("│ inner") == 3, "itself is no answer"
    assert "most similar of 5 other images in photos" in among and "same image" not in among
    (trained / "copy.png").write_bytes((trained / "photos" / "inner" / "0.png").read_bytes())
    copied = vitascope("similar", "runs/digits", "copy.png", "--among", "photos").out
    assert "most similar of 6 images in photos" in copied and copied.count("inner (same image)") == 1


def test_runs_are_listed_compared_and_deleted(vitascope, trained) -> None:
    listed = json.loads(vitascope("runs", "list", "--json").out)
    assert [item["seed"] for item in listed] == [1, 2] and listed[0]["test_accuracy"] is None
    vitascope("evaluate", listed[0]["run"], "--quick")
    listed = json.loads(vitascope("runs", "list", "--json").out)
    again = vitascope("evaluate", listed[0]["run"], "--quick").out
    assert "Evaluation 2 of this run" in again and "later test results are too optimistic" in again
    assert "record uses the first one with the last epoch's weights and the same --views" in again
    probe = _format_cells_by_column(RunSummary(**listed[0] | {"uses_linear_probe": True}))
    assert probe["validation accuracy"].endswith("% (probe)") and probe["test accuracy"].endswith("% (probe)")
    for command in (("evaluate", listed[0]["run"]), ("predict", listed[0]["run"], "photos")):
        assert "--views 6 adds the mirror image" in vitascope(*command, "--views", "6").err
    assert 0 <= listed[0]["test_accuracy"] <= 1 and listed[0]["finished"] and listed[0]["epochs_done"] == 1
    assert "2 runs in runs" in vitascope("runs", "list").out
    answer = vitascope("runs", "compare", listed[0]["run"], listed[1]["run"], "--out", "both.png")
    assert "train.seed" in answer.out and "model.depth" not in answer.out and (trained / "both.png").is_file()
    report = json.loads(vitascope("runs", "compare", listed[0]["run"], listed[1]["run"], "--json").out)
    assert report["differing"] == {"train.seed": [1, 2]}
    refused = vitascope("runs", "delete", listed[0]["run"])
    assert refused.code == 2 and "Add --yes" in refused.err and len(list(trained.glob("runs/digits/*"))) == 2
    assert "is not a run" in vitascope("runs", "delete", "runs/digits", "--yes").err, "never the newest of a folder"
    assert vitascope("runs", "delete", listed[0]["run"], "--yes").code == 0
    assert [path.name for path in trained.glob("runs/digits/*")] == [listed[1]["run"].split("/")[-1]]


def test_a_broken_run_does_not_hide_the_others(vitascope, trained) -> None:
    first = sorted(trained.glob("runs/digits/*"))[0]
    (first / "recipe.yaml").write_text("model: {dept: 3}\n")
    answer = vitascope("runs", "list", "--json")
    assert len(json.loads(answer.out)) == 2 and "There is no setting 'model.dept'" in answer.err
    assert ["model.dept" in (row["remark"] or "") for row in json.loads(answer.out)] == [True, False]
    assert f"{first.name[:20]}" in (table := vitascope("runs", "list").out) and "cannot be read" in table


def test_names_are_printed_without_markup(vitascope, trained) -> None:
    """Neither rich's markup nor matplotlib's formulas may eat a name."""
    picture = trained / "photos" / "inner" / "0.png"
    for name in ("scan[final].png", "a:cat:.png", "d[b.png"):
        (trained / "photos" / name).write_bytes(picture.read_bytes())
        assert name in vitascope("predict", "runs/digits", f"photos/{name}").out
    for number in range(8):
        for label in ("a$_$b", "c"):
            (trained / "named" / label).mkdir(parents=True, exist_ok=True)
            (trained / "named" / label / f"{number}.png").write_bytes(picture.read_bytes())
    answer = vitascope(
        "train", "digits", *WORDS, "train.epochs=1", "data.name=named", "train.batch_size=4", "name=named"
    )
    assert answer.code == 0 and "There are no test images" in answer.out
    assert vitascope("evaluate", "runs/named", "--split", "train", "--quick").code == 0


def test_only_a_run_is_deleted(vitascope, trained, monkeypatch) -> None:
    (trained / "thesis").mkdir()
    (trained / "thesis" / "recipe.yaml").write_text("name: mine\n")
    assert "is not a run" in vitascope("runs", "delete", "thesis", "--yes").err and (trained / "thesis").is_dir()
    (trained / "thesis" / "inner").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", None)  # a folder that is no run is not searched: it may be the whole disk
        assert "is not a run" in vitascope("runs", "delete", "thesis", "--yes").err
    (trained / "link").symlink_to(sorted(trained.glob("runs/digits/*"))[0])
    assert "is a link" in vitascope("runs", "delete", "link", "--yes").err
    assert len(json.loads(vitascope("runs", "list", "--runs", ".", "--json").out)) == 2


def test_recording_runs(vitascope, trained) -> None:
    answer = vitascope("record", *map(str, sorted(trained.glob("runs/digits/*"))), "--name", "tiny")
    assert answer.code == 0 and " % (seeds 1, 2), " in answer.out and "tiny: test accuracy" in answer.out
    contents = json.loads((trained / "results" / "tiny.json").read_text())
    assert contents["seeds"] == [1, 2] and len(contents["test_accuracy"]) == 2
    (trained / "PAGE.md").write_text("<!-- results: table tiny -->\n<!-- end results -->\n")
    stale = vitascope("results", "PAGE.md", "--check")
    assert stale.code == 2 and "Out of date with the records: PAGE.md. Run without --check" in stale.err
    assert (
        "1 mark in 1 page, 1 model card: 2 of 2 files updated."
        in vitascope("results", "PAGE.md", "--cards", "cards").out
    )
    assert "from `results/tiny.json`; do not edit" in (trained / "cards" / "tiny.md").read_text()
    checked = vitascope("results", "PAGE.md", "--cards", "cards", "--check")
    assert checked.code == 0 and checked.out == "1 mark in 1 page, 1 model card: up to date.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("evaluate", "runs/digits", "--split", "tset"), "There is no split 'tset'. Did you mean test?"),
        (("evaluate", "runs/digits", "--views", "2"), "this run was trained with data.augment.flip=0"),
        (
            ("evaluate", "runs/digits", "--data", "clothes.npz"),
            "clothes.npz has labels 0 to 10, but the model has 10 classes (0 to 9). Use",
        ),
        (("evaluate", "runs/digits", "--data", "parts", "--split", "val"), "parts has no val split. Choose one with"),
        (("evaluate", "runs/digits", "--data", "photos", "--split", "val"), "has no splits. Omit --split"),
        (("evaluate", "runs/digits", "--data", "photos"), "classes unknown to the model: inner"),
        (("evaluate", "runs/digits", "--data", "nothing"), "There is no data set and no folder named 'nothing' in "),
        (("predict", "runs/digits", "nothing.png"), "There is no file or folder nothing.png"),
        (("predict", "runs/digits", "torn.png"), "torn.png cannot be read as an image: unknown image format."),
        (("predict", "runs/digits", "empty"), "The folder empty contains no images"),
        (("predict", "runs/digits", "all-torn"), "No readable image among 1 file,"),
        (("predict", "runs/digits", "photos", "--json", "--csv"), "Choose one of --json and --csv"),
        (("predict", "unfinished", "photos"), "has no model.safetensors. Resume it with: vitascope resume"),
        (("evaluate", "unfinished"), "has no model.safetensors"),
        (("evaluate", "two"), ", or use a finished run: two/2026-01-01_10-00-00-seed1"),
        (("embed", "runs/digits", "photos", "--out", "f.csv"), "Choose an ending: .npz, .parquet"),
        (("embed", "runs/digits", "empty", "--out", "f.npz"), "The folder empty contains no images"),
        (("similar", "runs/digits", "photos/inner/0.png", "--out", "x.doc"), "cannot be written as 'x.doc'"),
        (("similar", "runs/digits", "photos"), "photos is a folder"),
        (("runs", "list", "--runs", "nowhere"), "There is no folder nowhere"),
        (("runs", "compare", "runs/digits"), "Give at least two runs"),
        (("runs", "compare", "runs/digits", "runs/digits"), "The same run is given twice"),
        (("runs", "delete", "photos", "--yes"), "photos is not a run"),
        (("record", "unfinished", "--name", "x"), "is not finished"),
        (("record", "runs/digits", "--name", "a/b"), "cannot be a file name"),
        (("results", "nothing.md"), "There is no file nothing.md"),
        (("results", "odd.md"), "odd.md has 1 results mark that cannot be read"),
        (("results", "kindless.md"), "there is no kind of results ''"),
        (("results", "unknown.md"), "There is no record 'mine' in results. The folder has no records"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_mistake_is_one_line_and_exit_code_2(vitascope, ready, words, sentence) -> None:
    answer = vitascope(*words)
    assert answer.code == 2, answer.out + answer.err
    assert sentence in answer.err and answer.err.count("\n") == 1, answer.err


@pytest.fixture
def ready(made, tmp_path, monkeypatch):
    """A copy of a folder with everything a mistake needs."""
    import shutil

    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    import shutil

    import numpy as np

    place = tmp_path_factory.mktemp("mistakes")
    run = shared_run(place / "runs", **{"train.epochs": 1})
    shutil.copytree(run.path, place / "unfinished")
    (place / "unfinished" / "model.safetensors").unlink()
    for number, name in enumerate(("2026-01-01_10-00-00-seed1", "2026-01-01_11-00-00-seed2")):
        shutil.copytree(place / "unfinished" if number else run.path, place / "two" / name)
    for folder in ("empty", "all-torn", "photos/inner", "parts/train/0", "parts/test/0"):
        (place / folder).mkdir(parents=True)
    for file in ("torn.png", "all-torn/x.jpg"):
        (place / file).write_bytes(b"no image")
    for file in ("photos/inner/0.png", "parts/train/0/0.png", "parts/test/0/0.png"):
        Image.new("L", (8, 8)).save(place / file)
    (place / "odd.md").write_text("<!--results: table-->\n<!-- end results -->")
    (place / "kindless.md").write_text("<!-- results:  -->\n<!-- end results -->")
    (place / "unknown.md").write_text("<!-- results: table mine -->\n<!-- end results -->")
    images, labels = np.zeros((22, 8, 8), np.uint8), np.arange(22) % 11
    np.savez(place / "clothes.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    return place
