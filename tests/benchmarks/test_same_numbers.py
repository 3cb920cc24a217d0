"""The proof that a refactoring changed no number: it finds the smallest difference, and only a real one."""

import json
import math
import re
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.same_numbers import __main__ as same_numbers
from benchmarks.same_numbers.compare import Comparison, MetricNames, compare_metrics, compare_runs, compare_weights
from benchmarks.same_numbers.settings import (
    CUDA_BATCH,
    CUDA_PASSES,
    CUDA_STEPS,
    NUM_IMAGES,
    SETTINGS,
    write_random_images,
)
from benchmarks.same_numbers.worker import (
    RUN,
    Job,
    Rename,
    Result,
    call_with_accepted_names,
    read_job,
    run_job,
    train_setting,
    write_job,
)
from benchmarks.trees import name_tree
from vitascope.errors import UserError
from vitascope.recipe.reading import read_recipe

ROW = {"epoch": 1, "train_loss": 2.25, "val_loss": math.nan, "seconds": 1.5}
TINY = replace(
    SETTINGS["cpu"][0],
    settings=SETTINGS["cpu"][0].settings | {"model.depth": 1, "train.epochs": 1, "data.fraction": 0.2},
)
STUDY = next(setting for setting in SETTINGS["cpu"] if setting.kind == "study")


def write_run(folder, rows=(ROW,), **weights):
    """Write a run folder with the files that are compared."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"weight": torch.ones(3)} | weights, folder / "model.safetensors")
    return folder


def compare_rows(base, here, **names) -> Comparison:
    result = Comparison()
    compare_metrics(base, here, MetricNames(**names), result)
    return result


def test_equal_runs_are_identical_and_times_and_nan_do_not_count(tmp_path) -> None:
    nan = torch.tensor([math.nan, 1.0])
    one = write_run(tmp_path / "one", bias=nan)
    other = write_run(tmp_path / "other", [ROW | {"seconds": 9.0, "prepared_seconds": 2.0}], bias=nan.clone())
    comparison = compare_runs([one], [other], MetricNames())
    assert (comparison.difference, comparison.rows, comparison.tensors) == ("", 1, 2)


def test_one_flipped_bit_in_a_weight_is_found() -> None:
    weight = torch.linspace(0.1, 1.0, 10)
    flipped = weight.clone()
    flipped.view(torch.int32)[4] ^= 1
    result = Comparison()
    compare_weights({"a": weight, "b": weight}, {"a": weight.clone(), "b": flipped}, result, "model.safetensors")
    assert re.fullmatch(r"model\.safetensors: b: 1 of 10 values, largest difference \d\.\d+e-08", result.difference)
    result = Comparison()
    compare_weights({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}, result)
    assert "1 of 1 values" in result.difference


def test_a_metric_that_changed_in_its_last_digit_is_found() -> None:
    comparison = compare_rows([ROW], [ROW | {"train_loss": math.nextafter(2.25, 3)}])
    assert comparison.difference == "train_loss, epoch 1: 2.25 in the base, 2.2500000000000004 in the working tree"
    assert compare_rows([{"lr": 0.0}], [{"lr": -0.0}]).difference
    assert compare_rows([{"epoch": 1}], [{"epoch": 1.0}]).difference


def test_a_missing_row_run_tensor_or_file_is_found(tmp_path) -> None:
    assert compare_rows([ROW, ROW], [ROW]).difference == "2 metric rows in the base, 1 in the working tree"
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", bias=torch.ones(1))
    difference = compare_runs([one], [other], MetricNames()).difference
    assert difference == "model.safetensors: bias: only in the working tree"
    difference = compare_runs([other], [one], MetricNames()).difference
    assert difference == "model.safetensors: bias: only in the base"
    assert compare_runs([one, one], [one], MetricNames()).difference == "2 runs in the base, 1 in the working tree"
    save_file({"weight": torch.ones(3)}, other / "best.safetensors")
    other_weights = load_file(one / "model.safetensors")
    save_file(other_weights, other / "model.safetensors")
    assert compare_runs([one], [other], MetricNames()).difference == "best.safetensors: only in the working tree"


def test_another_shape_or_number_format_is_a_difference() -> None:
    for other in (torch.zeros(1, 2), torch.zeros(2, dtype=torch.bfloat16)):
        result = Comparison()
        compare_weights({"a": torch.zeros(2)}, {"a": other}, result)
        assert "(2,) in the base" in result.difference


def test_a_metric_that_one_tree_writes_is_a_difference_unless_it_is_listed() -> None:
    more = ROW | {"grad_norm": 1.0}
    assert compare_rows([ROW], [more]).difference == "grad_norm, epoch 1: only in the working tree"
    assert compare_rows([more], [ROW]).difference == "grad_norm, epoch 1: only in the base"
    listed = compare_rows([ROW], [more], added=frozenset({"grad_norm"}))
    assert not listed.difference and listed.notes == {"grad_norm only in the working tree"}
    assert compare_rows([more], [ROW], added=frozenset({"grad_norm"})).difference
    assert not compare_rows([more], [ROW], removed=frozenset({"grad_norm"})).difference


def test_a_renamed_metric_is_compared_under_its_new_name(tmp_path) -> None:
    one = write_run(tmp_path / "one", [{"together": 4}])
    other, wrong = (write_run(tmp_path / str(count), [{"batched_runs": count}]) for count in (4, 5))
    names = MetricNames([Rename("batched_runs", old="together")])
    assert not compare_runs([one], [other], names).difference
    assert compare_runs([one], [wrong], names).difference.startswith("batched_runs, epoch 1: 4 in the base")
    assert compare_runs([one], [other], MetricNames()).difference


def read_settings(names):
    return read_recipe("digits", [f"{key}={value}" for key, value in names.items()])


def test_an_old_name_is_used_only_where_the_new_one_is_unknown() -> None:
    renames = [
        Rename("train.rate", old="train.lr"),
        Rename("train.epochs", old="train.rounds"),
        Rename("model.initialize", old="model.initialize", new_value="conv_like", old_value="mimetic"),
        Rename("model.initialize", old="model.initialize", new_value="quiet", old_value="silent"),
    ]
    names = {"train.epochs": 7, "train.rate": 0.5, "model.initialize": "conv_like"}
    recipe = call_with_accepted_names(read_settings, names, renames, UserError)
    assert (recipe.train.lr, recipe.train.epochs, recipe.model.initialize) == (0.5, 7, "mimetic")


def test_an_unknown_option_of_the_command_line_gets_its_old_name(tmp_path) -> None:
    """Shown by the next mistake: the number of seeds is checked after the options are read."""
    study = replace(STUDY, options={"--new-batch-runs": 4, "--seeds": 0})
    with pytest.raises(
        UserError, match=r"has no option --new-batch-runs.*With old names: .*--seeds 0 must be at least 1"
    ):
        train_setting(study, tmp_path, [Rename("--new-batch-runs", old="--batch-runs")])


def test_an_error_that_no_rename_explains_is_raised() -> None:
    with pytest.raises(UserError, match=r"^There is no setting 'train\.rate'"):
        call_with_accepted_names(read_settings, {"train.rate": 0.5}, [], UserError)
    endless = [Rename("train.rate", old="train.rate")]
    with pytest.raises(UserError, match=r"'train\.rate'.*With old names: There is no setting 'train\.rate'"):
        call_with_accepted_names(read_settings, {"train.rate": 0.5}, endless, UserError)


def test_a_tree_compared_with_itself_is_identical_and_another_seed_is_not(tmp_path) -> None:
    results = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        setting = replace(TINY, settings=TINY.settings | {"train.rate": 0.002, "train.seed": seed})
        (tmp_path / name).mkdir()
        job = Job("", str(tmp_path / name), [setting], [], [Rename("train.rate", old="train.lr")])
        write_job(job, tmp_path / name / "job.json")
        assert read_job(tmp_path / name / "job.json") == job
        run_job(job, results.append)
    assert [result.error for result in results] == ["", "", ""]
    comparison = same_numbers.compare_results(results[0], results[1])
    assert not comparison.difference and comparison.rows == 1 and comparison.tensors > 20
    assert same_numbers.compare_results(results[0], results[2]).difference.startswith("train_loss, epoch 1: ")


def test_a_setting_that_fails_is_different_and_names_the_tree(tmp_path) -> None:
    results = []
    broken = replace(TINY, settings=TINY.settings | {"train.lr": -1})
    needing = replace(TINY, name="later", starts_from="plain")
    run_job(Job("", str(tmp_path), [broken, needing], [], []), results.append)
    assert [result.name for result in results] == ["plain", "later"]
    assert all("train.lr=-1.0 must be greater than 0" in result.error for result in results)
    comparison = same_numbers.compare_results(Result("plain", []), results[0])
    assert comparison.difference.startswith("failed in the working tree: UserError: train.lr")


@pytest.mark.parametrize(
    ("repeated", "outcome"), [("one", "different"), ("other", "not repeatable")], ids=["sure", "unsure"]
)
def test_a_difference_counts_only_where_the_base_repeats_itself(
    tmp_path, monkeypatch, capsys, repeated, outcome
) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", [ROW | {"train_loss": 3.0}])
    results = {run.name: Result("plain", [str(run)]) for run in (one, other)}
    monkeypatch.setattr(same_numbers, "train_with_both_trees", lambda *_: iter([(results["one"], results["other"])]))
    monkeypatch.setattr(same_numbers, "train_base_again", lambda *_: [results[repeated]])
    verdicts = same_numbers.compare_trees(tmp_path, [TINY], None)
    assert verdicts[0].outcome == outcome
    line = f"{outcome}: train_loss, epoch 1: 2.25 in the base, 3.0 in the working tree"
    assert capsys.readouterr().out.split("tensors", 1)[1].strip() == line
    assert (
        same_numbers.summarize_verdicts(verdicts, "abc1234")
        == f"{outcome}: 1 of 1 setting, abc1234 and the working tree"
    )


def test_two_trees_that_skip_the_intended_code_are_not_identical(tmp_path) -> None:
    run = write_run(tmp_path / "one")
    comparison = compare_runs([run], [run], MetricNames())
    same_numbers.check_expected_metric(STUDY, comparison)
    assert comparison.difference == "no metric together: the code that writes it did not run"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--base", "no-such-commit"], "--base no-such-commit is neither a commit of this repository nor a folder"),
        (["--base", "no-such-commit", "--export", "{new}"], "There is no commit no-such-commit"),
        (["--base", "HEAD", "--only", "muno"], "There is no setting muno on cpu. Did you mean muon?"),
        (["--base", "{tree}", "--only", "muon", "--keep", "{tree}"], "is not empty. Name a new or an empty folder."),
    ],
)
def test_a_mistake_is_answered_in_a_sentence_with_exit_code_2(tmp_path, monkeypatch, capsys, words, sentence) -> None:
    package = tmp_path / "tree" / "src" / "vitascope"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    words = [word.format(tree=tmp_path / "tree", new=tmp_path / "new") for word in words]
    monkeypatch.setattr(sys, "argv", ["same_numbers", *words])
    with pytest.raises(SystemExit) as end:
        same_numbers.main()
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


def test_an_exported_tree_keeps_the_short_hash_of_its_commit(tmp_path) -> None:
    (tmp_path / ".exported-commit").write_text("0123456789abcdef\n")
    assert name_tree(tmp_path) == "0123456"
    (tmp_path / ".exported-commit").unlink()
    assert name_tree(tmp_path) == tmp_path.name


def test_the_images_for_a_gpu_make_exactly_twenty_steps(tmp_path) -> None:
    from vitascope.data.sources.arrays import open_npz_data_source

    write_random_images(tmp_path, NUM_IMAGES["cuda"])
    split = open_npz_data_source(tmp_path / "cifar10.npz").load_split("train")
    assert len(split) * CUDA_PASSES == CUDA_STEPS * CUDA_BATCH
    assert split.images.shape[1:] == (3, 32, 32) and split.labels.unique().tolist() == list(range(10))


@pytest.mark.parametrize("device", SETTINGS)
def test_every_setting_is_a_recipe_with_known_names(device) -> None:
    names = [setting.name for setting in SETTINGS[device]]
    assert len(set(names)) == len(names) >= (8 if device == "cpu" else 2)
    for setting in SETTINGS[device]:
        assert not setting.starts_from or setting.starts_from in names
        settings = setting.settings | ({"train.lr": 0.001} if setting.kind == "study" else {})
        read_recipe(setting.recipe, [f"{key}={value}".replace(RUN, "run") for key, value in settings.items()])
