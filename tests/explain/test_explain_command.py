"""`vitascope explain` as a user meets it: a run, a timm model, a weights file, wrong words."""

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.training.tiny import shared_run, tiny_run
from vitascope import UserError, open_model
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.draw.explanation import draw_heat_maps_over_image
from vitascope.draw.images import draw_gallery
from vitascope.explain.maps import PatchPosition, TokenLayout
from vitascope.explain.methods import METHODS
from vitascope.explain.model_figures import (
    MAX_IMAGES,
    _choose_evenly_spaced_indices,
    _describe_image_count_and_subsampling,
    try_to_load_run_images,
)
from vitascope.recipe.train import TrainConfig
from vitascope.weights.model_info import make_imagenet_or_numeric_class_names

PHOTOS = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return shared_run(tmp_path_factory.mktemp("explained"))


@pytest.fixture
def images(tmp_path) -> list[str]:
    pixels = open_builtin_digits().load_split("test").images[:2, 0]
    for number, image in enumerate(pixels):
        Image.fromarray(image.numpy()).save(tmp_path / f"digit{number}.png")
    return [str(tmp_path / f"digit{number}.png") for number in range(2)]


def test_all_figures_and_numbers_are_written(vitascope, run, images, tmp_path) -> None:
    out = tmp_path / "out"
    answer = vitascope("explain", str(run.path), *images, "--out", str(out))
    assert answer.code == 0, answer.err
    assert "Explaining, method 4 of 7: attention-gradient\n" in answer.err
    assert "Drawing image 2 of 2: digit1\nMeasuring faithfulness, method 1 of 8: attention\n" in answer.err
    assert (
        "Faithfulness of the methods, best first (2 images)" in answer.out
        and "occlusion" in answer.out
        and "random" in answer.out
    )
    for stem in (
        "explanations-digit0",
        "heads-digit1",
        "faithfulness",
        "analysis-blocks",
        "analysis-colours",
        "analysis-tsne",
    ):
        assert (out / f"{stem}.png").stat().st_size > 5000 and (out / f"{stem}.svg").is_file()
    contents = json.loads((out / "explanations.json").read_text())
    assert len(contents["images"]) == 2 and len(contents["images"][0]["heat"]["relevance"]) == 4
    assert "attention-gradient   gradient-weighted attention: attention × gradient of the logit" in answer.out
    assert {row["method"] for row in contents["evidence"]} == {*METHODS, "random"}, "the names in JSON stay"
    assert "relevance            attention × gradient of the logit" in answer.out
    assert json.loads((out / "analysis.json").read_text())["lens"][-1] == 1.0  # after the last block: the answer itself


def test_the_state_before_the_first_block_is_named_and_explained(vitascope, run, images, tmp_path, monkeypatch) -> None:
    drawn = {}

    def record_maps(*arguments, **options):
        drawn["lens"] = (list(arguments[1]), arguments[3])
        return draw_heat_maps_over_image(*arguments, **options)

    def record_gallery(*arguments):
        drawn["colours"] = arguments[1], arguments[3]
        return draw_gallery(*arguments)

    monkeypatch.setattr("vitascope.explain.figures.draw_heat_maps_over_image", record_maps)
    monkeypatch.setattr("vitascope.explain.model_figures.draw_gallery", record_gallery)
    answer = vitascope("explain", str(run.path), images[0], "--methods", "attention", "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.err
    names, caption = drawn["lens"]
    assert names == ["before block 1", *(f"after block {block}" for block in range(1, len(names)))]
    assert "Before block 1, a token holds only its patch embedding plus position embedding, because" in caption
    names, caption = drawn["colours"]
    assert (
        names[:2] == ["image", "before block 1"]
        and "Before block 1: patch embedding plus position embedding." in caption
    )


@pytest.mark.slow
def test_a_folder_s_pictures_that_explain_wrote_are_not_explained_again(vitascope, run, images, tmp_path) -> None:
    for _ in range(2):
        answer = vitascope("explain", str(run.path), str(tmp_path), "--out", str(tmp_path), "--methods", "attention")
        assert answer.code == 0, answer.err
        contents = json.loads((tmp_path / "explanations.json").read_text())
        assert len(contents["images"]) == len(images) and any("analysis-tsne" in file for file in contents["files"])


def test_probes_can_be_about_test_images(vitascope, run, images, tmp_path) -> None:
    subject = open_model(str(run.path))
    run_images = try_to_load_run_images(subject, "test")
    wanted = open_builtin_digits().load_split("test").select_evenly(MAX_IMAGES)
    assert run_images is not None and run_images[1:] == (wanted.labels.tolist(), "test")
    assert torch.equal(run_images[0], subject.preprocessing(wanted.images))
    answer = vitascope("explain", str(run.path), images[0], "--split", "tset", "--out", str(tmp_path / "out"))
    assert answer.code == 2 and "There is no split 'tset'" in answer.err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_kept_weights_is_shown_over_time(vitascope, images, tmp_path) -> None:
    run = tiny_run(tmp_path, **{"train.epochs": 5, "train.weight_snapshots": 3})
    kept = sorted(path.name for path in run.get_path("kept").iterdir())
    assert kept == [f"epoch-000{epoch}.safetensors" for epoch in (1, 3, 5)]
    last, kept_last = load_file(run.get_path("model.safetensors")), load_file(run.get_path("kept") / kept[-1])
    assert all(torch.equal(last[name], kept_last[name]) for name in last)
    out = tmp_path / "out"
    assert vitascope("explain", str(run.path), images[0], "--methods", "attention", "--out", str(out)).code == 0
    with Image.open(out / "over-time.gif") as animation:
        assert animation.n_frames == 3
    assert (out / "over-time-strip.png").is_file() and (out / "over-time-analysis.svg").is_file()
    (run.get_path("kept") / kept[1]).write_text("x")
    damaged = vitascope("explain", str(run.path), images[0], "--methods", "attention", "--out", str(out))
    assert damaged.code == 2 and f"{kept[1]} is incomplete or does not match its config.json" in damaged.err


@pytest.mark.parametrize(("keep", "epochs", "wanted"), [(0, 9, set()), (1, 9, {9}), (2, 9, {1, 9}), (3, 9, {1, 5, 9})])
def test_kept_epochs_are_the_first_the_last_and_evenly_between(keep, epochs, wanted) -> None:
    assert TrainConfig(weight_snapshots=keep, epochs=epochs).snapshot_epochs == wanted


def test_more_copies_than_epochs_are_refused() -> None:
    with pytest.raises(UserError, match=r"train\.weight_snapshots=4 must be at most train\.epochs=3"):
        TrainConfig(weight_snapshots=4, epochs=3)


def test_json_holds_the_requested_methods(vitascope, run, images, tmp_path) -> None:
    words = [
        "--methods",
        "rollout,attention-gradient",
        "--blocks",
        "2",
        "--heads",
        "1",
        "--query",
        "1,2",
        "--target",
        "3",
    ]
    answer = vitascope("explain", str(run.path), images[0], "--out", str(tmp_path), *words, "--no-analysis", "--json")
    report = json.loads(answer.out)
    assert set(report["images"][0]["heat"]) == {"rollout", "gradient"} and report["images"][0]["explained"] == "3"
    assert {row["method"] for row in report["evidence"]} == {"rollout", "gradient", "random"}
    assert not any("analysis-" in path for path in report["files"])
    assert "NaN" not in answer.out and report["evidence"][0]["deletion_error"] is None, (
        "one image has no standard error"
    )


def test_captions_name_the_patch_from_1_and_only_what_is_drawn() -> None:
    from vitascope.explain.figures import _format_attention_caption, _format_explanation_caption

    plain, registers = (
        TokenLayout(0, 4, 4, reads_class_token=False),
        TokenLayout(3, 4, 4, reads_class_token=True, registers=2),
    )
    assert _format_attention_caption(plain, PatchPosition(0, 2)).startswith(
        "Attention from the patch in row 1, column 3 (framed)"
    )
    assert "Attention each patch receives" in _format_attention_caption(plain, None)
    assert "tokens" not in _format_attention_caption(plain, None)
    assert "Attention to the class token is not shown" in _format_attention_caption(
        TokenLayout(1, 4, 4, reads_class_token=True), None
    )
    assert "Attention to the class and register tokens is not shown" in _format_attention_caption(registers, None)
    assert "Uniform attention would be 0.0526." in _format_attention_caption(registers, None)
    assert ", at least 0.125 (twice uniform attention). " in _format_attention_caption(plain, None)
    assert (
        _describe_image_count_and_subsampling(64, 90) == "64 of the 90"
        and _describe_image_count_and_subsampling(64, 64) == "64"
    )
    assert _describe_image_count_and_subsampling(MAX_IMAGES, MAX_IMAGES) == f"a selection of {MAX_IMAGES}"
    chosen = _choose_evenly_spaced_indices(60).tolist()
    assert len(set(chosen)) == 32 and chosen[0] == 0 and chosen[-1] == 59, "images of all classes of a sorted folder"
    heat = torch.rand(4, 4)
    text = _format_explanation_caption("7", 0.5, {"rollout": heat, "relevance": heat, "occlusion": heat - 0.5})
    assert "Not specific to the class: rollout." in text
    assert "blue patches decrease it: the probability (occlusion)." in text and "In the others, yellow" in text
    signed = _format_explanation_caption("7", 0.5, {"integrated-gradients": heat - 0.5, "occlusion": heat - 0.5})
    assert "the logit (integrated-gradients), the probability (occlusion)" in signed
    assert _format_explanation_caption("7", 0.5, {"relevance": heat}).endswith("own scale. Yellow is most important.")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--query", "5,1"), "There is no patch in row 5, column 1: the grid has rows 1 to 4"),
        (("--query", "1,0"), "There is no patch in row 1, column 0"),
        (("--no-probes",), "--no-probes was renamed to --no-analysis."),
        (("--query", "1"), "must be ROW,COLUMN"),
        (("--query", "a,b"), "must be whole numbers"),
        (("--blocks", "3"), "There is no block 3: the model has blocks 1 to 2."),
        (("--heads", "0"), "There is no head 0: the model has heads 1 to 2."),
        (("--target", "cat"), "There is no class 'cat'. Classes: 0, 1, 2"),
        (("--methods", "rolout"), "Did you mean rollout?"),
    ],
)
def test_a_wrong_word_gets_one_sentence(vitascope, run, images, tmp_path, words, sentence) -> None:
    answer = vitascope("explain", str(run.path), images[0], "--out", str(tmp_path), *words)
    assert answer.code == 2 and sentence in answer.err and answer.err.count("\n") == 1


def test_unreadable_input_is_reported(vitascope, run, images, tmp_path) -> None:
    text = tmp_path / "text.png"
    text.write_text("not an image")
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"torn")
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, other)
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, sentence in (
        ((str(run.path), str(text)), "cannot be read as an image"),
        ((str(empty), images[0]), "is not a run"),
        ((str(torn), images[0]), "is not a complete safetensors file"),
        ((str(other), images[0]), "does not have the parameter names of a ViT of timm"),
        ((str(tmp_path / "none.pth"), images[0]), "There is no file"),
        (("timm:vit_tinny", images[0]), "timm has no model 'vit_tinny'"),
    ):
        answer = vitascope("explain", *words, "--out", str(tmp_path / "out"))
        assert answer.code == 2 and sentence in answer.err and answer.err.count("\n") == 1, answer.err


def test_a_timm_model_is_opened_with_its_own_preparation(monkeypatch) -> None:
    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: real(name, pretrained=False))
    subject = open_model("timm:vit_tiny_patch16_224")
    assert subject.stored_shape == (3, 224, 224) and subject.preprocessing.mean == (0.5, 0.5, 0.5)
    assert (
        len(subject.classes) == 1000 and subject.classes[1] == "goldfish" and subject.find_class_index("goldfish") == 1
    )


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_weights_file_s_sizes_come_from_its_shapes(tmp_path, pool) -> None:
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=7, depth=2, global_pool=pool, reg_tokens=2
    ).eval()
    torch.nn.init.normal_(theirs.head.weight)
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    torch.save({"model": theirs.state_dict()}, tmp_path / "w.pth")
    pixels = torch.randn(2, 3, 32, 32)
    for name in ("w.safetensors", "w.pth"):
        subject = open_model(str(tmp_path / name))
        with torch.no_grad():
            torch.testing.assert_close(subject.model(pixels), theirs(pixels), atol=1e-4, rtol=1e-4)
    assert make_imagenet_or_numeric_class_names(3) == ["0", "1", "2"]


@pytest.mark.slow
def test_real_pretrained_weights_look_at_the_animal(vitascope, tmp_path) -> None:
    weights = PHOTOS / "weights" / "deit_tiny_patch16_224.safetensors"
    photos = sorted((PHOTOS / "photos" / "imagenet").glob("*.JPEG"))[:1]
    if not weights.is_file() or not photos:
        pytest.skip("../shared/data is not on this machine")
    out = tmp_path / "out"
    less = ["--methods", "relevance", "--blocks", "12", "--no-analysis"]
    answer = vitascope("explain", str(weights), str(photos[0]), *less, "--out", str(out), "--json")
    report = json.loads(answer.out)
    assert report["images"][0]["probability"] > 0.2 and len(report["images"][0]["heat"]["relevance"]) == 14
