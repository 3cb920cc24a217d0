"""An ablation is fair: only what applies and differs is run, and all of it compiled or nothing."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import speedrun
from vitascope import UserError
from vitascope.records.ablation import compare_arms_with_baselines

SEEN = [("long", 1, 0.7), ("short", 1, 0.6), ("long", 2, 0.9)]
COMMON = {"data.validation": 0.1, "data.name": "cifar10", "train.compile": "never"}


def test_arms_without_effect_or_with_invalid_settings_are_left_out_and_named(capsys) -> None:
    names = [
        "unchanged",
        "convolution-like initialization",
        "timm's initialization",
        "no rotary positions",
        "alternating flips",
        "random flips",
    ]
    assert speedrun.select_valid_arms("cifar10-94", COMMON, names, [2]) == [
        "unchanged",
        "timm's initialization",
        "random flips",
    ]
    output = capsys.readouterr().out
    assert "Skipped: convolution-like initialization. The recipe already has this setting." in output
    assert "Skipped: no rotary positions. model.initialize=conv_like needs rotary positions" in output
    assert speedrun.select_valid_arms("cifar10-tokenizer", COMMON, names[1:3], [2]) == [
        "convolution-like initialization"
    ]


def test_every_tuned_part_of_the_fast_recipe_can_be_removed() -> None:
    stages = (Path(speedrun.__file__).parent / "borrowed.sh").read_text()
    back = stages.partition('ARMS="')[2].partition('"')[0].splitlines()
    assert len(back) > 10 and speedrun.select_valid_arms("cifar10-94", COMMON, back, [2]) == back


def test_a_combination_of_changes_is_compared_with_the_combination_it_extends() -> None:
    rows = [{"arm": name, "seed": 1, "accuracy": 0.9} for name in ("unchanged", "lean", "lean, free", "lean, free, 3")]
    bases = [arm.baseline_name for arm in compare_arms_with_baselines(rows)]
    assert bases == ["", "unchanged", "lean", "lean, free"]


def test_a_recipe_with_other_settings_is_named_and_its_arms_are_compared_with_it() -> None:
    names = [speedrun.make_row_name(arm, base) for base in ("60 passes", "unchanged") for arm in ("unchanged", "GELU")]
    assert names == ["60 passes", "60 passes, GELU", "unchanged", "GELU"]
    rows = [{"arm": name, "seed": 1, "accuracy": 0.9} for name in ["first", *names]]
    assert [arm.baseline_name for arm in compare_arms_with_baselines(rows)] == [
        "",
        "first",
        "60 passes",
        "first",
        "first",
    ]


def test_accuracy_over_time_has_a_line_per_arm_and_a_dot_per_record(tmp_path, monkeypatch) -> None:
    rows = [{"arm": arm, "seed": seed, "accuracy": score, "curve": [[1, 0.5], [2, score]]} for arm, seed, score in SEEN]
    (tmp_path / "tuned.json").write_text(json.dumps({"rows": rows}))
    drawn = []
    monkeypatch.setattr(speedrun, "draw_accuracy_over_time", lambda lines, dots: drawn.append((lines, dots)))
    monkeypatch.setattr(speedrun, "save_figure", lambda figure, out: None)
    known = Path(__file__).parents[2] / "results" / "cifar10.json"
    speedrun.draw_speed_records([tmp_path / "tuned.json", known], tmp_path / "way.png")
    [(lines, dots)] = drawn
    assert list(lines) == ["long", "short"] and lines["long"][1] == [2, 0.7], "the first seed of each"
    assert list(dots) == ["cifar10"] and dots["cifar10"] == pytest.approx((64.20, 0.95937, 2), abs=1e-2)


def test_the_default_augmentation_of_the_data_counts_as_part_of_the_recipe() -> None:
    assert speedrun.select_valid_arms(
        "cifar10-tokenizer", COMMON, ["shift filled with zeros", "shift filled by reflection"], [1]
    ) == ["shift filled by reflection"]
    with pytest.raises(UserError, match="views=2 adds the mirror image"):
        speedrun.select_valid_arms("mnist-99", COMMON | {"data.name": "mnist"}, ["unchanged"], [2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compile", "auto"], "choose always or never, because auto would compile only some arms"),
        (["--recipe", "cifar10-93"], "There is no recipe 'cifar10-93'. Did you mean cifar10-9"),
        (["--arms", "GELO"], "There is no arm 'GELO'. Did you mean GELU?"),
        (["--set", "epochs"], "'epochs' is not a setting"),
        (["--recipe", "mnist-99"], "views=2 adds the mirror image"),  # MNIST, not some other data
        (["--draw", "nowhere.json", "--out", "a.png"], "nowhere.json cannot be read as a record"),
        (["--draw", "nowhere.json"], "Give a file for the figure"),
    ],
)
def test_invalid_options_are_refused_in_a_sentence(monkeypatch, capsys, words, message) -> None:
    monkeypatch.setattr(sys, "argv", ["speedrun", *words])
    with pytest.raises(SystemExit) as stopped:
        speedrun.main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_help_names_every_arm_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["speedrun", "--help"])
    with pytest.raises(SystemExit):
        speedrun.main()
    assert " ".join(capsys.readouterr().out.split()).count("final rate 5 %") == 1
