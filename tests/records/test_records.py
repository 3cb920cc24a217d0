"""Records: one thing per record, machines apart, the first look counts, pages agree."""

import json
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import vitascope
from tests.training.tiny import shared_run, tiny_run
from vitascope import UserError
from vitascope.data.config import resolve_augmentation
from vitascope.recipe.reading import read_recipe
from vitascope.records.ablation import (
    compare_arms_with_baselines,
    estimate_residual_noise,
    format_mean_difference_or_values,
    format_percent_mean_or_values,
)
from vitascope.records.pages import make_model_card_of_record, read_page_and_fill_results_marks
from vitascope.records.record import (
    _get_test_seconds_on_machine,
    check_record_name,
    evaluate_and_make_record,
    read_record,
    write_record_per_machine,
)
from vitascope.records.tables import RESULT_FORMATTERS, TRAINING_RECORD_KINDS, compute_train_flops_per_image
from vitascope.run.directory import create_run_folder, open_run_or_newest
from vitascope.run.listing import (
    compare_runs,
    find_differing_settings,
    flatten_comparable_settings,
    format_shortest_train_command,
)
from vitascope.run.metrics import sum_epoch_seconds, sum_seconds_without_setup
from vitascope.run.test_set_log import EvalLogEntry

ROOT = Path(__file__).parent.parent.parent
ONE = {"train.epochs": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two seeds of one recipe."""
    folder = tmp_path_factory.mktemp("pair")
    return [tiny_run(folder, **ONE, **{"train.seed": seed, "data.validation": 0}) for seed in (1, 2)]


def on_machine(record, name):
    return replace(record, machine={"cpu": f"{name}, 4 cores, 2 threads", "system": "Linux x86_64"})


def test_a_record_is_complete_and_agrees_with_the_runs(pair, tmp_path) -> None:
    record = evaluate_and_make_record(pair, "tiny", commit=None)
    path = write_record_per_machine(record, tmp_path)
    result = json.loads(path.read_text())
    assert {"name", "recipe", "data", "track", "params", "tokens", "images_seen", "views", "seeds"} <= set(result)
    assert {"test_accuracy", "seconds", "cold_seconds", "machine", "versions", "commit", "command"} <= set(result)
    assert (
        result["seeds"] == [1, 2]
        and result["track"] == "pure"
        and result["data"] == "digits"
        and result["tokens"] == 16
    )
    model = vitascope.load(pair[0])
    assert result["params"] == sum(weight.numel() for weight in model.model.parameters())
    assert result["images_seen"] == 896 and result["training_images"] == 898 and result["openings"] == [1, 1]
    assert result["test_accuracy"][0] == model.evaluate().accuracy
    assert "root" not in json.dumps(result["settings"]) and str(pair[0].path.parent) not in path.read_text()
    assert read_record(path) == record
    again = evaluate_and_make_record(pair, "tiny")
    assert again.test_accuracy == record.test_accuracy and again.openings == [1, 1], "the first look counts"


def test_a_gpus_first_batch_counts_in_the_cold_seconds_only() -> None:
    result = {"accuracy": 0.9, "seconds": 0.5, "set_up_seconds": 2.0}
    opening = EvalLogEntry(1, 1, "digits", "test", 1, "last", "Box", None, result)
    assert (
        _get_test_seconds_on_machine(opening, "Box") == 0.5
        and _get_test_seconds_on_machine(opening, "Box", include_setup=True) == 2.5
    )
    assert _get_test_seconds_on_machine(opening, "Another", include_setup=True) == 0.0
    older = replace(opening, result={"accuracy": 0.9, "seconds": 0.5})
    assert _get_test_seconds_on_machine(older, "Box", include_setup=True) == 0.5


def test_the_command_of_a_record_trains_the_same_recipe(tmp_path) -> None:
    words = ["train.epochs=7", "model.depth=3", "data.augment.shift=0", "train.betas=[0.8,0.9]", "train.compile=never"]
    recipe = read_recipe("digits", [*words, "train.seed=5"])
    augment = resolve_augmentation(recipe.data.augment, "digits")
    recipe = replace(recipe, data=replace(recipe.data, root="/somewhere", augment=augment))
    call = shlex.split(format_shortest_train_command(recipe, [5]))
    assert call[:3] == ["vitascope", "train", "digits"] and set(call[3:]) == {*words, "train.seed=5"}
    again = read_recipe(call[2], call[3:])
    again = replace(again, data=replace(again.data, augment=resolve_augmentation(again.data.augment, "digits")))
    assert flatten_comparable_settings(again) == flatten_comparable_settings(recipe)
    assert format_shortest_train_command(recipe, [5, 6]).startswith("for seed in 5 6; do vitascope train digits ")


def test_the_command_of_a_user_recipe_starts_from_a_built_in_recipe() -> None:
    recipe = read_recipe("digits", ["name=deep", "model.depth=9", "data.name=/home/me/my photos", "model.in_chans=1"])
    augment = resolve_augmentation(recipe.data.augment, recipe.data.name, 1, image_size=recipe.model.image_shape)
    call = shlex.split(format_shortest_train_command(replace(recipe, data=replace(recipe.data, augment=augment)), [5]))
    assert call[:3] == ["vitascope", "train", "digits"]
    assert set(call[3:]) == {"name=deep", "model.depth=9", "data.name=/path/to/my photos", "train.seed=5"}


def test_seconds_of_test_logits_count_only_where_the_run_was_trained(pair, tmp_path) -> None:
    run = changed(pair[0], tmp_path)
    evaluate_and_make_record([run], "x")
    lines = [json.loads(line) for line in run.get_path("test-openings.jsonl").read_text().splitlines()]
    before = sum_seconds_without_setup(run.metrics)
    for machine, extra in ((lines[0]["machine"], 500.0), ("A laptop", 0.0)):
        lines[0]["machine"], lines[1]["seconds"] = machine, 500.0
        run.get_path("test-openings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert evaluate_and_make_record([run], "x").seconds == pytest.approx([before + extra], abs=0.01)


def test_a_run_evaluated_by_an_older_version_is_not_evaluated_again(pair, tmp_path) -> None:
    run = changed(pair[0], tmp_path)
    old = [{"opening": 1, "when": "2026", "images": 899}, {"opening": 1, "accuracy": 0.5, "loss": 1.0}]
    run.get_path("test-openings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    with pytest.raises(UserError, match="evaluated by an older version"):
        evaluate_and_make_record([run], "x")
    assert len(run.get_path("test-openings.jsonl").read_text().splitlines()) == 2


def test_only_settings_that_differ_are_listed() -> None:
    one, two = read_recipe("digits", ["model.depth=2"]), read_recipe("digits", ["model.depth=3", "data.root=/x"])
    assert find_differing_settings([one, two]) == {"model.depth": [2, 3]}
    assert find_differing_settings([one, one]) == {}


def test_runs_on_folders_are_compared_with_their_paths_and_named_without(tmp_path) -> None:
    recipe = read_recipe("digits")
    runs = [
        create_run_folder(replace(recipe, data=replace(recipe.data, name=name)), tmp_path)
        for name in ("/images/one/tiny10", "/images/two/tiny10", "digits")
    ]
    comparison = compare_runs(runs)
    assert comparison.differing_settings["data.name"] == ["/images/one/tiny10", "/images/two/tiny10", "digits"]
    assert compare_runs(runs[1:]).short_unique_run_names == ["name=tiny10", "name=digits"]


def test_records_of_one_name_from_different_machines_are_kept_apart(pair, tmp_path) -> None:
    record = evaluate_and_make_record(pair, "tiny")
    first = write_record_per_machine(on_machine(record, "Old box"), tmp_path)
    second = write_record_per_machine(on_machine(record, "New box"), tmp_path)
    again = write_record_per_machine(replace(on_machine(record, "Old box"), date="2099-01-01"), tmp_path)
    assert first == again == tmp_path / "tiny.json" and second == tmp_path / "tiny.new-box-4-cores.json"
    assert read_record(first).date == "2099-01-01" and read_record(second).machine_name == "New box, 4 cores"
    (tmp_path / "page.md").write_text("<!-- results: table tiny -->\n<!-- end results -->\n")
    text, _ = read_page_and_fill_results_marks(tmp_path / "page.md", tmp_path)
    assert text.count("[tiny](./tiny") == 2 and "Old box, 4 cores" in text and "New box, 4 cores" in text


def test_threads_do_not_make_another_machine(pair) -> None:
    record = evaluate_and_make_record(pair, "tiny")
    other = replace(record, machine=record.machine | {"cpu": record.machine["cpu"].rsplit(",", 1)[0] + ", 99 threads"})
    assert other.machine_name == record.machine_name


def changed(run, folder, **facts):
    """A copy of the run that says something else of itself."""
    import shutil

    from vitascope.run.directory import Run

    copy = Run(folder / run.path.name)
    shutil.copytree(run.path, copy.path)
    machine_info = json.loads(copy.get_path("machine.json").read_text())
    copy.get_path("machine.json").write_text(json.dumps(machine_info | facts))
    return copy


def test_runs_that_differ_in_more_than_the_seed_are_rejected(pair, tmp_path) -> None:
    first, second = pair
    bf16 = second.machine["hardware"] | {"precision": "bfloat16"}
    refusals = [
        ([first, first], "Seed 1 is given more than once"),
        ([first, changed(second, tmp_path / "a", machine={"cpu": "Other, 1 cores"})], "different machines"),
        ([first, changed(second, tmp_path / "b", commit="abc")], "different commits"),
        ([first, changed(second, tmp_path / "c", versions={"torch": "1.0"})], "different versions of torch"),
        ([first, changed(second, tmp_path / "d", whole_data_hash="0")], "different training images"),
        ([first, changed(second, tmp_path / "e", hardware=bf16)], "different values of precision"),
        (
            [first, changed(second, tmp_path / "f", resumed=[{**second.machine, "commit": "x"}])],
            "was resumed on another machine",
        ),
    ]
    for runs, sentence in refusals:
        with pytest.raises(UserError, match=sentence):
            evaluate_and_make_record(runs, "mixed")
    other = shared_run(tmp_path, **ONE, **{"train.seed": 3, "data.validation": 0, "model.depth": 1})
    with pytest.raises(UserError, match=r"The runs differ in model\.depth"):
        evaluate_and_make_record([first, other], "mixed")


def test_a_commit_is_accepted_without_git_and_rejected_if_the_run_has_another(pair, tmp_path) -> None:
    gitless = [changed(run, tmp_path / "gitless", commit=None) for run in pair]
    assert evaluate_and_make_record(gitless, "x", commit="feed").commit == "feed"
    assert evaluate_and_make_record(gitless, "x").commit is None
    known = [changed(run, tmp_path / "known", commit="beef") for run in pair]
    assert evaluate_and_make_record(known, "x").commit == "beef"
    with pytest.raises(UserError, match="made at commit beef"):
        evaluate_and_make_record(known, "x", commit="feed")


def test_an_unfinished_run_and_an_odd_name_are_refused(pair, tmp_path) -> None:
    run = changed(pair[0], tmp_path)
    run.get_path("model.safetensors").unlink()
    with pytest.raises(UserError, match="is not finished"):
        evaluate_and_make_record([run], "x")
    for name in ("../x", "", "a b", ".hidden"):
        with pytest.raises(UserError, match="cannot be a file name"):
            check_record_name(name)


def test_a_batched_run_is_not_recorded(pair, tmp_path) -> None:
    run = changed(pair[0], tmp_path)
    row = run.metrics[-1] | {"together": 4}
    run.get_path("metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="was trained in one batch of 4 runs"):
        evaluate_and_make_record([run], "x")


def test_steady_seconds_exclude_the_set_up_of_the_first_epoch() -> None:
    rows = [{"seconds": seconds} for seconds in (40.0, 2.0, 3.0, 2.0)]
    assert sum_seconds_without_setup(rows) == 9.0 and sum_epoch_seconds(rows) == 47.0
    assert sum_seconds_without_setup([{"seconds": 1.0}, {"seconds": 2.0}]) == 3.0, "never more than was measured"
    assert sum_seconds_without_setup(rows[:1]) == 40.0
    stages = [{"seconds": seconds} for seconds in (30.0, *[1.0] * 4, *[2.0] * 5)]
    assert sum_seconds_without_setup(stages) == 15.0, (
        "smaller images at first: like the epochs that follow, not like the last"
    )


def test_a_card_has_the_numbers_of_the_record(pair) -> None:
    record = replace(evaluate_and_make_record(pair, "tiny"), test_accuracy=[0.9, 0.92], commit="feed")
    text = make_model_card_of_record(record, "res/tiny.json").format_markdown()
    assert "**90.00, 92.00 %** (both seeds" in text and "| 1 | 90.00 %" in text and "commit `feed`" in text
    assert (
        "None"
        not in make_model_card_of_record(
            replace(record, recall=record.recall | {"0": [None, None]}), "tiny.json"
        ).format_markdown()
    )
    assert "Generated by `vitascope results` from `res/tiny.json`" in text and "top-5" in text
    five_classes = dict(list(record.recall.items())[:5])  # top-5 accuracy is always 100 %
    assert "top-5" not in make_model_card_of_record(replace(record, recall=five_classes), "tiny.json").format_markdown()
    assert f"{record.params:,}" in text and "for seed in 1 2; do vitascope train digits" in text
    assert "tokens (pure ViT)" in text and "only on digits images of 8×8 pixels" in text
    assert "seconds with set-up" in text and "cold" not in text.lower()


def test_marks_are_filled_within_a_line_over_lines_and_in_recipes(pair, tmp_path) -> None:
    record = replace(on_machine(evaluate_and_make_record(pair, "tiny"), "Box"), test_accuracy=[0.9, 0.92])
    results = tmp_path / "results"
    write_record_per_machine(record, results)
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    line, table = "accuracy tiny -->stale<!-- end results", "table -->\n\nstale\n<!-- end results"
    page.write_text(f"It is <!-- results: {line} -->.\n<!-- results: {table} -->")
    text, marks = read_page_and_fill_results_marks(page, results)
    assert marks == 2
    assert "It is <!-- results: accuracy tiny -->90.00, 92.00 %<!-- end results -->.\n" in text
    assert "stale" not in text and "(../results/tiny.json)" in text
    page.write_text(text)
    assert read_page_and_fill_results_marks(page, results) == (text, 2)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("# About.\n# Recorded: x\n#   more\ndata:\n  name: digits\n")
    result, _ = read_page_and_fill_results_marks(recipe, results)
    assert result.startswith("# About.\n# Recorded: 90.00, 92.00 % test accuracy on digits (2 seeds, last epoch")
    assert "x\n" not in result and "more" not in result
    assert result.endswith("data:\n  name: digits\n")
    (tmp_path / "other.yaml").write_text("# Recorded: wishes\n")
    assert read_page_and_fill_results_marks(tmp_path / "other.yaml", results) == ("# Recorded: not yet.\n", 1)
    for mark, sentence in (("tabel", "Did you mean table?"), ("table tinny", "no record 'tinny'")):
        page.write_text(f"<!-- results: {mark} -->\n<!-- end results -->")
        with pytest.raises(UserError, match=sentence):
            read_page_and_fill_results_marks(page, results)


@pytest.mark.parametrize("kind", [*RESULT_FORMATTERS])
def test_a_training_record_fills_a_mark_or_is_refused_in_a_sentence(vitascope, kind, tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- results: {kind} digits -->\n<!-- end results -->")
    answer = vitascope("results", str(page), "--results", str(ROOT / "results"))
    if kind in TRAINING_RECORD_KINDS and kind != "targets":
        assert answer.code == 0 and "%" in page.read_text() + "%" * (kind in ("cards", "work"))
    else:
        assert answer.code == 2 and f"KIND {kind} needs " in answer.err and answer.err.count("\n") == 1


@pytest.mark.parametrize("kind", ["cost", "growth", "features", "speedrun"])
def test_a_benchmark_of_another_kind_is_refused(kind, tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- results: {kind} odd-size -->\n<!-- end results -->")
    with pytest.raises(UserError, match=f"KIND {kind} needs another kind of record than odd-size"):
        read_page_and_fill_results_marks(page, ROOT / "results")


def test_the_help_lists_the_kinds_of_marks(vitascope) -> None:
    text = " ".join(vitascope("results", "--help").out.split())
    assert all(f" {kind}: " in text for kind in TRAINING_RECORD_KINDS)
    others = ", ".join(kind for kind in RESULT_FORMATTERS if kind not in TRAINING_RECORD_KINDS)
    assert f"own pages: {others}." in text and "<!-- results: KIND NAME… -->" in text


def test_two_values_are_in_the_order_of_their_seeds() -> None:
    assert format_percent_mean_or_values([0.9761, 0.9759]) == "97.61, 97.59 %"
    assert format_mean_difference_or_values([0.02, -0.01], 0.1, 100) == "+2.00, −1.00"


def test_gpu_benchmarks_and_scaling_exponents_are_formatted_from_their_records(tmp_path) -> None:
    row = {"shape": "256×8", "task": "train", "batch": 10, "images_per_second": 2000.0, "milliseconds": 5.0}
    ours = row | {"who": "ours, compiled, bfloat16, whole step", "times_timm": 2.5, "times_timm_compiled": 1.5}
    rows = [ours | {"share_of_matrix_rate": 0.25}, row | {"who": "timm, bfloat16", "images_per_second": 800.0}]
    rows.append(row | {"who": "transformers, bfloat16", "broken": "stopped by SIGILL"})
    (tmp_path / "b.json").write_text(json.dumps({"rows": rows}))
    result = RESULT_FORMATTERS["races"](tmp_path, ["b"]).splitlines()[2]
    wanted = ["256×8 train, batch 10", "**2,000**", "×2.50", "×1.50", "25 %", "800", "–", "stopped by SIGILL", "–", "–"]
    assert result == "| " + " | ".join(wanted) + " |"
    growth = {"machine": {"cpu": "Box"}, "device": "cpu", "exponents": {"depth": {"milliseconds": 1.02, "flops": 0.99}}}
    growth["rows"] = [{"axis": "depth", "depth": depth} for depth in (2, 8)]
    (tmp_path / "g.json").write_text(json.dumps(growth))
    assert RESULT_FORMATTERS["growth"](tmp_path, ["g"]).splitlines()[2] == "| Box | depth | 2 – 8 | 1.02 | 0.99 |"


def test_every_number_between_marks_in_this_repository_is_its_records(vitascope, monkeypatch) -> None:
    """`make results` was run: README, docs, recipes and cards say what results/*.json says."""
    monkeypatch.chdir(ROOT)
    folders = (("docs", "*.md"), ("src/vitascope/recipes", "*.yaml"))
    pages = [
        "README.md",
        "benchmarks/README.md",
        *(str(p) for folder, ending in folders for p in Path(folder).glob(ending)),
    ]
    answer = vitascope("results", *pages, "--cards", "docs/cards", "--check")
    assert answer.code == 0, answer.err
    files = Path("results").glob("*.json")
    known = {f"{path.stem}.md" for path in files if "seeds" in json.loads(path.read_text())}
    assert {path.name for path in Path("docs/cards").glob("*.md")} == known, "a card without a record, or the reverse"
    records = [read_record(Path("results") / f"{name[:-3]}.json") for name in known]
    assert all(record.commit and not record.commit.endswith("+changes") for record in records)
    assert {"mnist", "fashion-mnist", "cifar10"} <= {record.name for record in records}


def test_published_records_were_made_as_the_rules_say() -> None:
    """All training images, the last epoch, at least three seeds, each from the first look at the test images."""
    for name, bar in (("mnist", 0.995), ("fashion-mnist", 0.945), ("cifar10", 0.95)):
        record = read_record(ROOT / "results" / f"{name}.json")
        assert record.mean_test_accuracy >= bar and len(record.seeds) >= 3 and set(record.openings) == {1}
        assert record.settings["data.validation"] == 0 and record.settings["data.fraction"] == 1
        assert record.track == "pure" and record.machine_name == "NVIDIA H200"


def test_the_gain_of_an_arm_is_computed_in_pairs_of_seeds() -> None:
    """Seeds differ by 2 points, the change is worth 1 in each: pairs tell it, means alone would not."""
    plain = [0.80, 0.82, 0.84]
    rows = [{"arm": "plain", "seed": seed, "accuracy": score} for seed, score in enumerate(plain)]
    rows += [{"arm": "better", "seed": seed, "accuracy": score + 0.01} for seed, score in enumerate(plain)]
    rows += [
        {"arm": "noise", "seed": seed, "accuracy": plain[seed] + change}
        for seed, change in enumerate((0.01, -0.012, 0.004))
    ]
    rows += [{"arm": "once", "seed": 1, "accuracy": 0.9}]
    first, better, noise, once = compare_arms_with_baselines(rows)
    assert (first.difference, first.verdict) == (None, "–")
    assert better.difference.mean_difference == pytest.approx(0.01)
    assert better.difference.ci_half_width == pytest.approx(0, abs=1e-9)
    assert better.verdict == "not testable", "equal in all seeds, as in a study"
    assert noise.verdict == "no significant difference"
    assert noise.difference.ci_half_width == pytest.approx(
        4.3027 * 0.011372 / 3**0.5, rel=1e-3
    )  # Student's t with 2 degrees of freedom
    assert once.difference.mean_difference == pytest.approx(0.08) and once.verdict == "one seed"


def test_the_pooled_noise_is_the_residual_of_arm_and_seed_effects() -> None:
    """By hand for every arm with every seed: what is left of a number is it minus its row's mean minus its column's
    plus the mean of all. Of two arms it gives the paired interval; a seed that one arm alone has adds nothing."""
    table = np.random.default_rng(0).normal(size=(5, 3))
    rows = [{"arm": str(arm), "seed": seed, "accuracy": table[arm, seed]} for arm in range(5) for seed in range(3)]
    left = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
    noise = estimate_residual_noise(rows)
    assert noise.degrees_of_freedom == 8 and noise.std == pytest.approx((left**2).sum() ** 0.5 / 8**0.5)
    assert estimate_residual_noise([*rows, {"arm": "4", "seed": 9, "accuracy": 100.0}]).std == pytest.approx(noise.std)
    assert compare_arms_with_baselines(rows, noise)[1].difference.ci_half_width == pytest.approx(
        2.3060 * noise.std * (2 / 3) ** 0.5, rel=1e-4
    )
    pair = rows[:6]
    assert compare_arms_with_baselines(pair, estimate_residual_noise(pair))[
        1
    ].difference.ci_half_width == pytest.approx(compare_arms_with_baselines(pair)[1].difference.ci_half_width)
    assert estimate_residual_noise(rows[::3]) is None, "one seed"


@pytest.mark.slow
def test_a_record_has_its_track_and_counts_its_previous_stage(tmp_path) -> None:
    """Two stages, two seeds: images and seconds of both stages, and a command that names no place of this machine."""
    from vitascope.records.track import determine_training_track

    first = {"train.objective": "mae", "mae.pictures": 0}
    before = [tiny_run(tmp_path, **(first | {"train.seed": seed})) for seed in (1, 2)]
    runs = [
        tiny_run(tmp_path / "later", **{"weights": stage.path, "train.epochs": 1, "train.seed": seed})
        for stage, seed in zip(before, (1, 2), strict=True)
    ]
    made = evaluate_and_make_record(runs, "two-stages")
    assert made.track == "ssl" == determine_training_track(before[0])
    assert made.images_seen == before[0].metrics[-1]["images_seen"] + runs[0].metrics[-1]["images_seen"]
    assert made.seconds[0] > sum(row["seconds"] for row in before[0].metrics[1:])
    assert made.settings["weights"] == "recipe:digits" and str(tmp_path) not in made.command
    assert not any(key.startswith(("dino.", "mae.")) for key in made.settings)
    assert (
        determine_training_track(create_run_folder(read_recipe("digits", ["model.tokenizer=spt"]), tmp_path))
        == "tokenizer"
    )
    first = create_run_folder(read_recipe("digits"), tmp_path)
    assert (
        determine_training_track(create_run_folder(read_recipe("digits", [f"weights={first.path}"]), tmp_path))
        == "staged"
    )
    other, odd = (shutil.copytree(run.path, tmp_path / "odd" / run.path.name) for run in (before[1], runs[1]))
    for place, old, new in ((other, "mask_ratio: 0.75", "mask_ratio: 0.5"), (odd, str(before[1].path), str(other))):
        text = (place / "recipe.yaml").read_text()
        assert old in text
        (place / "recipe.yaml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=r"The runs differ in mae\.mask_ratio"):
        evaluate_and_make_record([runs[0], open_run_or_newest(odd)], "two-stages")


def test_the_speedrun_table_has_the_gain_of_each_change(tmp_path) -> None:
    """By hand: 1 and 2 points more are 1.5, with a standard error of 0.5. Of 7 values, 4 arms and 3 seeds leave one
    degree of freedom: Student's t is 12.706. A seed without its pair does not count."""
    result = [("as it is", 1, 0.90, 10.0), ("as it is", 2, 0.92, 10.0)]
    result += [("other", 1, 0.91, 12.0), ("other", 2, 0.94, 14.0), ("other", 3, 0.5, 99.0), ("once", 1, 0.89, 9.0)]
    result += [("once, and more", 1, 0.90, 9.5)]
    rows = [dict(zip(("arm", "seed", "accuracy", "steady_seconds"), row, strict=True)) for row in result]
    (tmp_path / "speedrun.json").write_text(json.dumps({"rows": rows}))
    lines = RESULT_FORMATTERS["speedrun"](tmp_path, ["speedrun"]).splitlines()
    assert lines[2] == "| as it is | 2 | 91.00 % | 10.0 | – | – | – |"
    assert lines[3] == "| other | 3 | 78.33 % | 41.7 | as it is | +1.50 ± 6.35 | +3.00 ± 12.71 |"
    assert lines[4] == "| once | 1 | 89.00 % | 9.0 | as it is | −1.00 | −1.00 |"
    assert lines[5] == "| once, and more | 1 | 90.00 % | 9.5 | once | +1.00 | +0.50 |"


def test_the_tuning_table_lists_runs_of_different_length(tmp_path) -> None:
    row = {"arm": "60 passes", "seed": 1, "accuracy": 0.94, "tokens": 64, "images_seen": 2_000_000}
    row |= {"images_per_second": 80_000, "steady_seconds": 25.04, "train_accuracy": 0.9}
    rows = [row, row | {"seed": 2, "accuracy": 0.95, "images_per_second": 82_000, "train_accuracy": 0.91}]
    (tmp_path / "lengths.json").write_text(json.dumps({"rows": rows}))
    line = RESULT_FORMATTERS["tuning"](tmp_path, ["lengths"]).splitlines()[2]
    assert line == "| 60 passes | 64 | 2.0 M | 81,000 | 25.0 | 2 | 90.5 % | 94.50 % |"


def test_a_target_needs_accuracy_time_and_seeds(tmp_path) -> None:
    """By hand: 94, 95 and 96 % have a standard deviation of 1; t(2) / √3 is 2.48. The slowest took 12 s."""
    known = json.loads((Path(__file__).parents[2] / "results" / "cifar10.json").read_text())
    known |= {"name": "fast", "test_accuracy": [0.94, 0.95, 0.96], "seconds": [9.0, 12.0, 10.0]}
    (tmp_path / "fast.json").write_text(json.dumps(known))
    asked = ["fast:95:12:3", "fast:95.1:12:3", "fast:95:11.9:3", "fast:95:12:4"]
    lines = RESULT_FORMATTERS["targets"](tmp_path, asked).splitlines()[2:]
    assert "| **95.00 ± 2.48 %** | **12.0** |" in lines[0]
    assert [line.split(" | ")[-1] for line in lines] == ["yes |", "no |", "no |", "no |"]


def test_training_flops_are_counted(tmp_path) -> None:
    """By hand: a token of width 2 costs 16 for its patch of 4 pixels, 4 · 8 for query, key, value and output, 64 for
    the MLP, and 8 for every token it meets; the head 8; three times. Half of the epochs see 2 of the 4 patches that
    are embedded, or an image of one patch."""
    known = read_record(Path(__file__).parents[2] / "results" / "cifar10.json")
    model = {"img_size": 4, "patch_size": 2, "in_chans": 1, "num_classes": 2, "embed_dim": 2, "num_heads": 1}
    model |= {"depth": 1, "class_token": False, "global_pool": "avg"}
    settings = {f"model.{key}": value for key, value in model.items()} | {"train.epochs": 4, "train.betas": [0.9, 0.99]}
    whole, two = (tokens * (96 + 8 * tokens) + 8 + 16 * patches for tokens, patches in ((4, 4), (2, 4)))
    shares = ({"train.patch_share": 0.5}, two), ({}, whole)
    for more, first in shares:
        record = replace(known, settings=settings | more | {"train.seed": [1, 2]}, images_seen=10)
        assert compute_train_flops_per_image(record) * record.images_seen == pytest.approx(3 * 10 * (first + whole) / 2)
        (tmp_path / "some.json").write_text(json.dumps(asdict(record)))
        assert f"| {(first + whole) * 3 / 2 / 1e9:.2g} |" in RESULT_FORMATTERS["work"](tmp_path, [])


def test_tables_of_pretraining_without_labels(tmp_path) -> None:
    """Three seeds have an interval (by hand: deviation 1, t(2) / √3 is 2.48), two both values, one its value."""
    fine = [
        ("from scratch", 0.1, 0.69),
        ("from scratch", 0.1, 0.71),
        ("from scratch", 1.0, 0.95),
        ("after DINO", 0.1, 0.8),
        *(("after DINO", 1.0, accuracy) for accuracy in (0.94, 0.95, 0.96)),
    ]
    rows: list[dict] = [{"kind": "fine-tuned", "arm": a, "labels": b, "accuracy": c} for a, b, c in fine]
    rows += [
        {"kind": "features", "arm": "after DINO", "knn": knn, "linear": 0.8, "epochs": 40, "seconds": 80}
        for knn in (0.7, 0.72)
    ]
    (tmp_path / "pretraining.json").write_text(json.dumps({"rows": rows}))
    lines = RESULT_FORMATTERS["pretraining"](tmp_path, ["pretraining"]).splitlines()
    head = "accuracy (± 95 % confidence interval of the mean; two seeds: both values)"
    assert lines[0] == f"| {head} | 10 % of the labels | 100 % of the labels |"
    assert lines[2] == "| from scratch | 69.00, 71.00 % | 95.00 % |"
    assert lines[3] == "| after DINO | 80.00 % | 95.00 ± 2.48 % (3 seeds) |"
    assert RESULT_FORMATTERS["features"](tmp_path, ["pretraining"]).splitlines()[2] == (
        "| after DINO | 40 | 2 | 70.00, 72.00 % | 80.00, 80.00 % | 80 |"
    )


def test_chosen_settings_are_compared_with_the_best_of_the_others_seed_by_seed(tmp_path) -> None:
    accuracies = {"chosen": (0.95, 0.96, 0.97), "recipe": (0.8, 0.8, 0.8), "timm script": (0.96, 0.95, 0.96)}
    rows = [
        {"data": "ants", "arm": arm, "seed": seed, "images": 1245, "seconds": 10 * seed, "accuracy": accuracy}
        | {"start": "fine-tuning", "image_size": 224, "passes": 20}
        for arm, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]
    rows.append(rows[0] | {"data": "bees"})
    (tmp_path / "photos.json").write_text(json.dumps({"rows": rows}))
    lines = RESULT_FORMATTERS["photos"](tmp_path, ["photos"]).splitlines()
    assert "| accuracy, recipe | accuracy, timm script | chosen − best of the others, points | verdict |" in lines[0]
    start = "| ants | 1,245 | fine-tuning, 224 px, 20 passes | 96.00 ± 2.48 % | 80.00 ± 0.00 % | 95.67 ± 1.43 % |"
    half_width = 6.2053 * np.std([-1, 1, 1], ddof=1) / np.sqrt(3)  # Student's t, 2 degrees of freedom, 1 - 0.05 / 4
    assert lines[2] == f"{start} +0.33 ± {half_width:.2f} (timm script) | no significant difference | 10 | 10 | 10 |"
    assert lines[3] == "| bees | 1,245 | fine-tuning, 224 px, 20 passes | 95.00 % | – | – | – | – | 0 | – | – |"


def test_the_table_of_faults_adds_up_bad_ends_and_names_what_was_skipped(tmp_path) -> None:
    counts = dict.fromkeys(("tries", "recovered", "refused", "completed", "lost"), 0)
    failures = dict.fromkeys(("tracebacks", "hangs", "wrong_exit_codes"), 0)
    rows = [
        {"fault": "a kill", "result": "The same.", "skipped": ""}
        | counts
        | failures
        | {"tries": 1200, "recovered": 1198, "lost": 2, "hangs": 1, "tracebacks": 3, "wrong_exit_codes": 5},
        {"fault": "a jump", "result": "The same.", "skipped": "no library"} | counts | failures,
    ]
    (tmp_path / "faults.json").write_text(json.dumps({"rows": rows}))
    lines = RESULT_FORMATTERS["faults"](tmp_path, ["faults"]).splitlines()
    assert lines[2] == "| a kill | 1,200 | The same. | 1,198 | 0 | 0 | 2 | 9 |"
    assert lines[3] == "| a jump | skipped | no library | – | – | – | – | – |"
