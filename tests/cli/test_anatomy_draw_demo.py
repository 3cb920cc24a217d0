"""`vitascope anatomy`, `draw`, `doctor` and `--version`, as a user types them."""

import json

import pytest
from PIL import Image

import vitascope as package


def test_json_is_only_json_with_the_promised_keys(vitascope) -> None:
    answer = vitascope("anatomy", "embed_dim=768", "num_heads=12", "--tokens", "5", "--json")
    stages = json.loads(answer.out)["stages"]
    assert all(set(stage) == {"name", "axes", "shape", "parameters", "flops", "bytes"} for stage in stages)
    shapes = [stage["shape"] for stage in stages]
    assert [1, 5, 768] in shapes and [1, 12, 5, 64] in shapes and [1, 12, 5, 5] in shapes
    assert (answer.code, answer.err) == (0, "")


def test_the_table_shows_one_block_and_summarises_the_others(vitascope) -> None:
    sizes = ("img_size=32", "patch_size=4", "embed_dim=256", "depth=8", "num_heads=4", "num_classes=10")
    text = vitascope("anatomy", *sizes).out
    assert text.startswith("From image to logits: ViT-Base with img_size=32, patch_size=4")
    assert vitascope("anatomy", "digits", "--tokens", "10").out.startswith("From tokens to logits: digits")
    assert "blocks.0.attn.maps" in text and "blocks.1 … blocks.7" in text and "6,350,602" in text
    assert "blocks.7.attn.maps" in vitascope("anatomy", *sizes, "--all").out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("anatomy", "cifar10", "patch_size=5"), "model.patch_size=5 does not divide model.img_size=32"),
        (("anatomy", "cifar10", "num_heads=7"), "model.num_heads=7 does not divide model.embed_dim=256"),
        (("anatomy", "cifer10"), "Did you mean cifar10?"),
        (("anatomy", "cifar10", "dept=3"), "Did you mean model.depth?"),
        (("anatomy", "cifar10", "train.epochs=2"), "train.epochs has no effect on the anatomy"),
        (("anatomy", "cifar10", "--tokens", "0"), "must be at least 1"),
        (("draw", "positions", "--kind", "sinus"), "Did you mean sinusoidal?"),
        (("draw", "positions", "--grid", "8", "--kind", "rotary"), "is not a grid"),
        (("draw", "positions", "--grid", "²x2", "--kind", "rotary"), "is not a grid"),
        (("draw", "positions", "--grid", "4x4"), "--grid is only for --kind sincos2d and --kind rotary."),
        (("draw", "positions", "--length", "9", "--kind", "rotary"), "--length is only for --kind sinusoidal."),
        (("draw", "story", "digits", "in_chans=2"), "draw story needs an image model"),
        (("draw", "shifted", "--patch-size", "1"), "choose 2, 4, 8 or 16"),
        (("draw", "fewer", "nowhere", "photo.jpg"), "There is no run nowhere"),
        (("anatomy", "depth=4", "cifar10"), "The recipe must come first"),
        (("draw", "positions", "--width", "7"), "must be even"),
        (("draw", "mask", "--out", "mask.txt2"), "Choose an ending"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(vitascope, words, sentence) -> None:
    answer = vitascope(*words)
    assert answer.code == 2
    assert sentence in answer.err and answer.err.count("\n") == 1 and "Traceback" not in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("positions",),
        ("positions", "--kind", "sincos2d"),
        ("positions", "--kind", "rotary", "--grid", "4x6"),
        ("mask",),
        ("shifted", "--patch-size", "8"),
    ],
    ids=" ".join,
)
def test_figures_are_drawn(vitascope, words, tmp_path) -> None:
    path = tmp_path / "deep" / "picture.png"
    answer = vitascope("draw", *words, "--out", str(path))
    assert answer.code == 0 and str(path) in answer.out
    with Image.open(path) as picture:
        assert min(picture.size) > 400


def test_the_mask_is_printed_as_numbers(vitascope, tmp_path) -> None:
    lines = vitascope("draw", "mask", "--tokens", "3", "--out", str(tmp_path / "mask.png")).out.splitlines()
    assert [line.split() for line in lines[:3]] == [["0", "−10,000", "−10,000"], ["0", "0", "−10,000"], ["0", "0", "0"]]


@pytest.mark.filterwarnings("ignore:.*profiler.*:UserWarning")
def test_measuring_fits_exponents_and_draws(vitascope, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("vitascope.model.attention_cost.TOKEN_COUNTS", (32, 64, 128))
    answer = vitascope("anatomy", "digits", "--measure", "--json", "--out", str(tmp_path / "cost.png"))
    measured = json.loads(answer.out)["measured"]
    assert set(measured["exponents"]) == {"written out", "fused"}
    assert (tmp_path / "cost.png").stat().st_size > 10_000
    text = vitascope("anatomy", "digits", "--measure", "--out", str(tmp_path / "cost.png")).out
    assert "explicit: time" in text and "log-log slope from 64 to 128 tokens" in text


def test_version_and_doctor(vitascope) -> None:
    assert vitascope("--version").out == f"vitascope {package.__version__}\n"
    answer = vitascope("doctor")
    assert answer.code == 0 and "torch" in answer.out and "cpu" in answer.out


def test_doctor_lists_missing_packages(vitascope, monkeypatch) -> None:
    monkeypatch.setattr("vitascope.run.machine.REQUIRED_PACKAGES", ("torch", "no-such-package"))
    answer = vitascope("doctor")
    assert answer.code == 1 and "pip install no-such-package" in answer.out


def test_a_missing_package_is_one_line(vitascope, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "omegaconf", None)
    answer = vitascope("anatomy", "cifar10")
    assert answer.code == 2 and "omegaconf is not installed" in answer.err


def test_the_demo_trains_evaluates_and_compares_with_timm(vitascope, tmp_path) -> None:
    answer = vitascope("demo", "train.epochs=2", "model.depth=1", "--runs", str(tmp_path))
    assert answer.code == 0, answer.err
    assert (
        "test accuracy" in answer.out
        and "untrained test models: largest absolute difference" in answer.out
        and answer.out.count("curves.png") == 1
        and "vitascope evaluate" not in answer.out
    )


def test_a_forward_pass_is_drawn(vitascope, tmp_path) -> None:
    answer = vitascope("draw", "story", "digits", "depth=1", "--out", str(tmp_path / "story.png"))
    assert answer.code == 0
    with Image.open(tmp_path / "story.png") as picture:
        assert picture.width > 1500
