"""The sheets: what they say of shapes is computed, of training is measured, and a second call repeats nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.study.test_study import fake
from tests.training.tiny import shared_run
from vitascope import UserError, load
from vitascope.coursework.sheets import a, b, c, d, e
from vitascope.coursework.sheets import initial_weights as starts
from vitascope.coursework.sheets.claims import (
    EPOCHS_TO_TARGET,
    FINAL_ACCURACY,
    LARGEST_DROP,
    MEASURES,
    Claim,
    format_accuracy_gain,
)
from vitascope.coursework.sheets.experiments import SheetExperiments, compute_time_to_accuracy, hash_run_settings
from vitascope.coursework.sheets.figures import draw_sinusoidal_positions, make_additive_causal_mask
from vitascope.coursework.sheets.report import SheetReport, run_sheet_and_write_report
from vitascope.study import workers as running
from vitascope.study.design import parse_and_check_design
from vitascope.study.results import CombinationResults

QUIET = Console(quiet=True)


def make_report(letter: str, folder: Path) -> SheetReport:
    return SheetReport(letter, "a test", True, folder)


def get_report_text(report: SheetReport) -> str:
    page = report.write_pages(["Box"], "abc")
    return page.with_suffix(".md").read_text()


def test_an_unknown_sheet_and_no_seeds_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="There is no sheet F"):
        run_sheet_and_write_report("F", tmp_path, console=QUIET)
    with pytest.raises(UserError, match="--seeds 0"):
        run_sheet_and_write_report("A", tmp_path, num_seeds=0, console=QUIET)
    with pytest.raises(UserError, match="--batch-runs 0"):
        run_sheet_and_write_report("A", tmp_path, max_batched_runs=0, console=QUIET)


def test_a_quick_report_does_not_take_a_full_ones_place(tmp_path) -> None:
    SheetReport("B", "a test", False, tmp_path).write_pages(["Box"])
    with pytest.raises(UserError, match=r"B\.md is a full report"):
        run_sheet_and_write_report("b", tmp_path, quick=True, console=QUIET)


def test_sheet_b_corrects_the_shapes(tmp_path) -> None:
    report = make_report("B", tmp_path)
    b._seed_and_add_attention_shape_tables(report)
    text = get_report_text(report)
    assert "softmax(Kᵀ Q / √768): 6 × 6" in text and "V · map: 768 × 6" in text
    for shape in ("1 × 12 × 5 × 5", "1 × 5 × 12 × 64"):
        assert text.count(shape) >= 2  # the sheet's and ours


def test_sheet_c_finds_the_weights_of_query_key_and_value(tmp_path) -> None:
    report = make_report("C", tmp_path)
    c._seed_and_add_weight_shapes_section(report)
    text = get_report_text(report)
    assert re.search(r"W_v \| 256 × 256 \| 256 × 256", text) and "of 2304 × 768" in text
    assert float(re.search(r"largest difference is ([\d.e-]+)\.", text)[1]) < 1e-5
    assert make_additive_causal_mask(5).tolist()[1] == [0, 0, -10_000, -10_000, -10_000]


def test_sheet_e_compares_with_pytorchs_layers(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("vitascope.model.attention.attend_fused", None)  # what is written out is compared
    report = make_report("E", tmp_path)
    e._seed_and_add_torch_comparison_section(report)
    apart = [float(number) for number in re.findall(r"\b\de[-+]\d\d\b", get_report_text(report))]
    assert len(apart) == 14 and max(apart) < 1e-12
    points = [row[1] for row in report.tables[0]["rows"]]
    assert sum(int(part) for cell in points if cell for part in cell.split(" + ")) == 14  # the other 6 are accuracies


def test_sheet_d_measures_what_the_sheet_claims(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("vitascope.model.attention_cost.TOKEN_COUNTS", (64, 128, 256))
    report = make_report("D", tmp_path)
    experiments = SheetExperiments(tmp_path / "D-quick", 1, True, QUIET, "cpu")
    fits = d._add_attention_cost_and_return_exponents(experiments, report)
    cost = report.measurements["cost"]
    assert [one["tokens"] for one in cost["costs"]] == [64, 64, 128, 128, 256, 256]
    assert set(cost["parts"]) == {
        "the four projections", "maps and gathering written out", "maps and gathering fused",
    }  # fmt: skip
    monkeypatch.setattr(d, "_measure_attention_cost", None)  # once is enough
    assert d._add_attention_cost_and_return_exponents(experiments, make_report("D", tmp_path / "again")) == fits
    d._try_28_pixel_image_and_add_section(report)
    text = get_report_text(report)
    assert set(fits) == {"written out", "fused"} and "uses 32.7 % of the pixels" in text
    assert "projections cost 34.1 million operations" in text and "does not divide" in text
    assert (tmp_path / "D-cost.png").is_file() and (tmp_path / "D.html").read_text().count("data:image/png") == 1
    assert len(draw_sinusoidal_positions([(10, 8)]).axes) == 2


def test_a_claim_of_the_best_holds_or_not_by_the_seeds() -> None:
    best, well = Claim("6 are best", "6"), Claim("6 end well", "6", allows_ties=True)
    ahead = fake({"4": [0.90, 0.91, 0.92], "6": [0.95, 0.96, 0.971]})
    assert best.evaluate(ahead) == ("holds", "96.03 ± 2.61 %, the best; all others are significantly worse")
    behind = fake({"4": [0.95, 0.96, 0.971], "6": [0.90, 0.91, 0.92]})
    assert best.evaluate(behind)[0] == well.evaluate(behind)[0] == "does not hold"
    assert "depth=4 has 96.03" in best.evaluate(behind)[1]
    level = fake({"4": [0.95, 0.92, 0.90], "6": [0.90, 0.93, 0.91]})
    assert (best.evaluate(level)[0], well.evaluate(level)[0]) == (
        "no significant difference",
        "no significant difference",
    )
    level = fake({"6": [0.95, 0.92, 0.90], "4": [0.90, 0.93, 0.91]})
    assert (best.evaluate(level)[0], well.evaluate(level)[0]) == ("no significant difference", "holds")
    assert best.evaluate(fake({"4": [0.9], "6": [0.95]}))[0] == "one seed"


def test_a_claim_about_a_measure_is_tested_in_pairs_of_seeds() -> None:
    """By hand: differences of accuracy 4, 4, 5 points have the mean 4.33 and the deviation 0.577; t(2) is 4.303."""
    results = fake({"2": [0.90, 0.92, 0.94], "6": [0.94, 0.96, 0.99]})
    more, less = (Claim("x", "6", FINAL_ACCURACY, expects_higher=more) for more in (True, False))
    assert more.evaluate(results) == (
        "holds",
        "final accuracy in %: 96.33; difference to the mean of the others: +4.33 ± 1.43",
    )
    assert less.evaluate(results)[0] == "the opposite holds"
    assert more.evaluate(results, num_comparisons=40)[0] == "no significant difference"
    curves = {"steep": [0.2, 0.95, 0.9], "slow": [0.1, 0.3, 0.9], "never": [0.1, 0.2, 0.3]}
    epochs, falls = ({name: MEASURES[what]({"curves": {"val_accuracy": curve}}) for name, curve in curves.items()}
                     for what in (EPOCHS_TO_TARGET, LARGEST_DROP))  # fmt: skip
    assert epochs == {"steep": pytest.approx(1 + 0.7 / 0.75), "slow": pytest.approx(3), "never": 4}
    assert falls == {"steep": pytest.approx(5), "slow": 0, "never": 0}


def test_the_gain_of_a_change_is_corrected_for_all_changes() -> None:
    plain, changed = fake({"1": [0.90, 0.92, 0.94], "2": [0.94, 0.96, 0.99]}).combinations
    assert (
        format_accuracy_gain(plain, changed, 1) == ("+4.33 ± 1.43", "helps")
        and format_accuracy_gain(changed, plain, 1)[1] == "hurts"
    )
    assert format_accuracy_gain(plain, changed, 40)[1] == "no significant difference"
    assert format_accuracy_gain(*fake({"1": [0.9], "2": [0.94]}).combinations, 1) == (
        "+4.00",
        "one seed",
    )
    assert (
        format_accuracy_gain(*fake({"1": [0.5, 0.6], "2": [0.625, 0.725]}).combinations, 1)[1] == "not testable"
    )  # no spread


def test_sheet_b_tries_input_sizes(tmp_path) -> None:
    report = make_report("B", tmp_path)
    b._seed_and_add_input_sizes_section(report)
    rows = {row[0]: row[1:] for row in report.tables[0]["rows"]}
    assert rows["ViT, unchanged (it checks the size)"] == ["1 × 10", "rejected", "rejected"]
    assert rows["ViT built for the size, learned positions"] == ["1 × 10", "rejected", "rejected"]
    assert rows["ViT built for the size, rotary positions"] == rows["CNN, global pooling"] == ["1 × 10"] * 3
    assert rows["ViT built for the size, sinusoidal positions"] == ["1 × 10"] * 3
    assert rows["CNN, flattened last map"] == ["1 × 10", "rejected", "rejected"]
    assert rows["attention alone"] == ["1 × 64 × 32", "1 × 100 × 32", "1 × 256 × 32"]


def test_three_initializations_are_compared_or_the_missing_weights_are_named(tmp_path, monkeypatch) -> None:
    """On digits, with a small run's weights for ImageNet's."""
    weights = shared_run(tmp_path / "weights").path
    monkeypatch.setattr(starts, "MNIST_OVERRIDES", ["data.name=digits", "model.in_chans=1"])
    monkeypatch.setattr(starts, "ORIGINAL_SIZE_OVERRIDES", ["model.img_size=8", "model.patch_size=2"])
    monkeypatch.setattr(starts, "RESIZED_OVERRIDES", ["model.img_size=16", "model.patch_size=4"])
    monkeypatch.setattr(starts, "QUICK_OVERRIDES", ["train.epochs=1", "train.batch_size=64"])
    report = make_report("D", tmp_path)
    experiments = SheetExperiments(tmp_path / "D", 1, True, QUIET, "cpu", None, str(weights))
    starts.run_or_skip_initialization_comparison(experiments, report, starts.try_to_open_weights(experiments))
    assert len(report.measurements["starts"]) == 3 and get_report_text(report).count(" patches instead of ") == 1
    assert len(list((tmp_path / "D").rglob("model.safetensors"))) == 3
    report = make_report("D", tmp_path)
    starts.run_or_skip_initialization_comparison(experiments, report, UserError("out of reach."))
    assert "Not run, because the weights are missing" in get_report_text(report) and "starts" not in report.measurements
    for wrong, why in (("nowhere.safetensors", "There is no file"), ("a,b.safetensors", "a comma")):
        with pytest.raises(UserError, match=why):
            run_sheet_and_write_report("D", tmp_path / "none", weights_ref=wrong, console=QUIET)
    assert not (tmp_path / "none").exists()  # before anything ran
    with pytest.raises(UserError, match="--weights is only for sheet D"):
        run_sheet_and_write_report("A", tmp_path, weights_ref="x.safetensors", console=QUIET)


def test_when_an_accuracy_is_reached() -> None:
    def result(*curve):
        return {"accuracy": curve[-1], "curves": {"val_accuracy": list(curve), "seconds": [2.0, 5.0, 7.5, 10.0]}}

    time_to_accuracy = compute_time_to_accuracy(
        CombinationResults({}, {1: result(0.1, 0.5, 0.8, 0.9), 2: result(0.6, 0.7, 0.7, 0.7)}), 0.5
    )
    assert (
        time_to_accuracy.epochs == [2, 1]
        and time_to_accuracy.seconds == [5.0, 2.0]
        and time_to_accuracy.num_seeds_not_reached == 0
    )
    time_to_accuracy = compute_time_to_accuracy(
        CombinationResults({}, {1: result(0.1, 0.5, 0.8, 0.9), 2: result(0.6, 0.7, 0.7, 0.7)}), 0.8
    )
    assert str(time_to_accuracy) == "epoch 3, 7.5 s (not reached by 1 of 2 seeds)"
    assert str(compute_time_to_accuracy(CombinationResults({}, {1: result(0.1)}), 0.8)) == "not reached in 1 epochs"


def test_a_value_reached_only_at_the_end_is_not_called_converged() -> None:
    def cell(*curve):
        return CombinationResults({}, {1: {"accuracy": curve[-1], "curves": {"val_accuracy": list(curve)}}})

    rising = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.702]  # within 0.5 points from epoch 7 of 8 on
    assert a._describe_first_epoch_near_final_accuracy(cell(*rising)) == "not converged in 8 epochs"
    early = [0.1, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.702]
    assert (
        a._describe_first_epoch_near_final_accuracy(cell(*early))
        == "within 0.5 points of the final value from epoch 2 on"
    )


def test_every_experiment_of_a_sheet_has_a_number_and_a_title(tmp_path) -> None:
    experiments = SheetExperiments(tmp_path, 1, True, QUIET, study_titles=d.EXPERIMENTS)
    assert experiments.format_study_title("patch") == "Experiment 2 of 11: patch size"
    assert experiments.format_study_title("few-drop_path_rate") == (
        "Experiment 10 of 11: a thousand images, without and with stochastic depth 0.1"
    )


def test_the_screen_gives_the_number_of_images_of_each_fraction(tmp_path, capsys) -> None:
    experiments = SheetExperiments(tmp_path, 1, True, Console(width=200))
    design = parse_and_check_design("digits", ["data.fraction=0.1,0.5", "data.validation=0.2"], 1)
    experiments._print_image_counts(design, torch.arange(1000) % 10)
    assert capsys.readouterr().out.splitlines() == [
        "data.fraction=0.1: 80 training images",
        "data.fraction=0.5: 400 training images",
    ]


@pytest.mark.slow
def test_sheet_a_is_run_answered_and_not_repeated(tmp_path, monkeypatch) -> None:
    """On the digits that come with scikit-learn, which are as many tokens."""
    digits = ["data.name=digits", "model.img_size=8", "model.patch_size=4,2", "train.batch_size=64"]
    monkeypatch.setattr(a, "QUICK_OVERRIDES", [*digits, "data.fraction=0.1,0.5", "train.epochs=2"])
    alone = [word.replace("4,2", "4") for word in digits]  # one of them, and so made already
    monkeypatch.setattr(a, "SINGLE_RUN_QUICK_OVERRIDES", [*alone, "data.fraction=0.5", "train.epochs=2"])
    times: list[list[int]] = []
    for again in range(3):
        if again == 2:  # the study's storage is lost, not what it made
            next((tmp_path / "A-quick").rglob("study.db")).unlink()
        page = run_sheet_and_write_report(
            "a", tmp_path, num_seeds=1, quick=True, device="cpu", git_commit="abc", console=QUIET
        )
        runs = sorted((tmp_path / "A-quick").rglob("model.safetensors"))
        times.append([run.stat().st_mtime_ns for run in runs])
    assert len(times[0]) == 4 and times[0] == times[1] == times[2]
    text = page.with_suffix(".md").read_text()
    assert "94.61 % after 1,000 epochs" in text and "Shortened" in text and "17 × 17" in text
    for asked in ("Q, K and V", "softmax", "attention map, what", "self-attention?", "graph network", "residual"):
        assert asked in text
    assert all((tmp_path / name).is_file() for name in re.findall(r"\]\(([\w-]+\.png)\)", text))
    sheet = json.loads((tmp_path / "A.json").read_text())
    assert len(sheet["accuracy"]) == 1 and sheet["written_on"]["commit"] == "abc" and sheet["quick"] is True
    assert sheet["command"] == "vitascope sheet A --quick" and sheet["seeds"] == 1
    cells = [cell for table in sheet["tables"] for row in table["rows"] for cell in row]
    assert cells and all(cell.strip() in text for cell in cells), "every number on the page is in the record"


@pytest.mark.slow
def test_a_run_of_several_studies_is_trained_once(tmp_path) -> None:
    """In the same sheet and in another, though judged otherwise; and again where it is gone."""
    tiny = ["model.embed_dim=16", "model.depth=1", "model.num_heads=2", "train.batch_size=64", "data.fraction=0.2"]

    def study(letter, name, *words, judge="val"):
        return SheetExperiments(tmp_path / letter, 2, True, QUIET, "cpu").run_study(
            name, "digits", [*tiny, *words], eval_split=judge
        )

    def runs(*place):
        return {path.parent for path in tmp_path.joinpath(*place).rglob("model.safetensors")}

    lengths = study("B", "lengths", "train.epochs=1,3")
    assert len(runs()) == 4
    rates = study("B", "rates", "train.epochs=3", "train.lr=4e-3,1e-3")
    assert len(runs("B", "rates")) == 2  # digits' own rate is 4e-3
    assert rates.combinations[0].accuracies == lengths.combinations[1].accuracies
    judged = study("E", "judged", "train.epochs=3", judge="test")
    assert not runs("E")
    wanted = [load(run).evaluate().accuracy for run in _of(lengths.combinations[1], tmp_path)]
    assert judged.combinations[0].accuracies == wanted
    gone, torn = _of(lengths.combinations[0], tmp_path)
    shutil.rmtree(gone)
    (torn / "metrics.jsonl").unlink()
    study("E", "again", "train.epochs=1", judge="test")
    assert len(runs("E", "again")) == 2


def test_results_are_kept_when_their_runs_are_deleted_but_weights_are_not(tmp_path) -> None:
    """One machine makes the runs; another, with runs.jsonl alone, writes the report."""
    words = ["model.embed_dim=16", "model.depth=1", "train.batch_size=64", "data.fraction=0.2", "train.epochs=1"]

    def study(judge="val", weights=False):
        results = SheetExperiments(tmp_path / "B", 2, True, QUIET, "cpu").run_study(
            "all", "digits", words, eval_split=judge, needs_weights=weights
        )
        return results, len(list(tmp_path.rglob("model.safetensors")))

    first, made = study()
    for line in (tmp_path / "runs.jsonl").read_text().splitlines():
        assert json.loads(line)["recipe"] == "digits" and not Path(json.loads(line)["run"]).is_absolute()
    shutil.rmtree(tmp_path / "B")
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"key": "torn by a ki')
    again, left = study()
    assert (made, left) == (2, 0)
    for one, other in zip(first.combinations[0].results.values(), again.combinations[0].results.values(), strict=True):
        assert one | {"run": ""} == other | {"run": ""}
    shutil.rmtree(tmp_path / "B")
    assert study(judge="test")[1] == 2  # judged otherwise, nobody knows
    shutil.rmtree(tmp_path / "B")
    assert study(weights=True)[1] == 2  # to be looked into


def test_the_key_of_a_run_does_not_depend_on_the_path_of_its_weights(tmp_path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(b"some")
    (tmp_path / "other.safetensors").write_bytes(b"others")

    def key(place):
        return hash_run_settings(
            parse_and_check_design("digits", [f"weights={tmp_path / place}"], 1, allow_no_variation=True), {}, 1
        )

    assert key("here/weights.safetensors") == key("there/weights.safetensors") != key("other.safetensors")


def test_a_single_run_does_not_reuse_a_batched_run(tmp_path) -> None:
    words = ["model.embed_dim=16", "model.depth=1", "train.batch_size=64", "data.fraction=0.2", "train.epochs=1"]
    words.append("model.drop_path_rate=0")
    for letter, together, made in (("B", 2, 2), ("C", None, 0), ("E", 1, 2)):
        SheetExperiments(tmp_path / letter, 2, True, QUIET, "cpu", together).run_study("all", "digits", words)
        assert len(list((tmp_path / letter).rglob("model.safetensors"))) == made


def _of(cell, folder):
    return [folder / "B" / "lengths" / "runs" / result["run"] for result in cell.results.values()]


@pytest.mark.slow
def test_missing_data_is_reported_first_and_a_failed_run_is_repeated(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        a,
        "QUICK_OVERRIDES",
        ["data.name=nowhere.npz", "model.patch_size=4,2", "data.fraction=0.1,0.5", "train.epochs=1"],
    )
    with pytest.raises(UserError, match=r"nowhere\.npz"):
        run_sheet_and_write_report("a", tmp_path, quick=True, device="cpu", console=QUIET)
    assert not (tmp_path / "A-quick").exists()
    digits = ["data.name=digits", "model.img_size=8", "model.patch_size=4,2"]
    digits += ["data.fraction=0.1,0.5", "train.epochs=1"]
    monkeypatch.setattr(a, "QUICK_OVERRIDES", digits)
    alone = [word.replace("4,2", "4").replace("0.1,0.5", "0.5") for word in digits]
    monkeypatch.setattr(a, "SINGLE_RUN_QUICK_OVERRIDES", alone)
    real = running.train_recipe
    monkeypatch.setattr(running, "train_recipe", lambda *_: (_ for _ in ()).throw(UserError("the disk is full")))
    with pytest.raises(UserError, match="the disk is full"):
        run_sheet_and_write_report("a", tmp_path, num_seeds=1, quick=True, device="cpu", console=QUIET)
    monkeypatch.setattr(running, "train_recipe", real)
    assert run_sheet_and_write_report("a", tmp_path, num_seeds=1, quick=True, device="cpu", console=QUIET).is_file()
