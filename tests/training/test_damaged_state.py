"""State that another version wrote, or that a disk damaged, gives one sentence: never a traceback or a hang."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitascope
from tests.training.tiny import shared_run, tiny_run
from vitascope.errors import UserError, is_out_of_memory
from vitascope.run.checkpoint import save_checkpoint
from vitascope.run.directory import Run
from vitascope.run.listing import compare_runs, find_runs, summarize_run_or_explain
from vitascope.run.metrics import read_metrics
from vitascope.run.test_set_log import read_test_set_log

EPOCH = {"epoch": 1, "step": 3, "images_seen": 192, "seconds": 1.5, "train_loss": 2.0}
DEEP = "[" * 100_000


def make_interrupted_run(folder: Path) -> Run:
    run = shared_run(folder)
    run.get_path("model.safetensors").unlink()
    return run


CHECKPOINT_CHANGES = {
    "a missing key": lambda state: state.pop("rng"),
    "an unknown key": lambda state: state.update(later_version=1),
    "an unknown weight": lambda state: state["model"].update(x=torch.zeros(1)),
    "a weight of another shape": lambda state: state["model"].update({next(iter(state["model"])): torch.zeros(1)}),
    "no weights": lambda state: state.update(model=None),
    "unknown hardware": lambda state: state["hardware"].update(new_setting=1),
    "a damaged precision": lambda state: state["hardware"].update(precision="float7"),
    "more epochs than the recipe": lambda state: state.update(epoch=10**9),
    "a negative epoch": lambda state: state.update(epoch=-1),
    "another number of optimizers": lambda state: state["optimizers"].append({}),
    "a damaged optimizer": lambda state: state["optimizers"].__setitem__(0, 3),
    "a damaged generator": lambda state: state.update(rng=torch.zeros(3)),
    "no identity": lambda state: state.update(identity="x"),
}


@pytest.mark.parametrize("change", CHECKPOINT_CHANGES)
def test_a_checkpoint_of_another_version_is_refused_and_nothing_is_changed(tmp_path, change) -> None:
    run = make_interrupted_run(tmp_path)
    state = torch.load(run.get_path("resume.pt"), weights_only=True)
    CHECKPOINT_CHANGES[change](state)
    save_checkpoint(run, state)
    metrics = run.get_path("metrics.jsonl").read_text()
    with pytest.raises(UserError, match=r"does not fit this version of Vitascope \(.*Nothing was changed"):
        vitascope.resume(run, quiet=True)
    assert run.get_path("metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1]", "is not a JSON object"),
        (DEEP, "is not valid JSON"),
        ('{"epoch": ' + "9" * 5000 + "}", "is not valid JSON"),
        (json.dumps(EPOCH | {"epoch": "one"}), "has no epoch number"),
        (json.dumps(EPOCH | {"seconds": "x"}), "has a 'seconds' that is not a finite number"),
        (json.dumps(EPOCH | {"val_accuracy": float("nan")}), "has a 'val_accuracy' that is not a finite number"),
        (json.dumps(EPOCH | {"val_accuracy": [1]}), "has a 'val_accuracy' that is not a finite number"),
        ('{"epoch": 1}', "has no step"),
    ],
)
def test_a_line_that_is_not_an_epoch_is_named_and_its_run_does_not_hide_the_others(tmp_path, line, problem) -> None:
    damaged, intact, third = (shared_run(tmp_path / name) for name in "abc")
    path = damaged.get_path("metrics.jsonl")
    path.write_text(f"{line}\n{path.read_text()}")
    with pytest.raises(UserError, match=f"line 1 {problem}"):
        read_metrics(path)
    summaries = {summary.run: summary for summary in map(summarize_run_or_explain, find_runs(tmp_path))}
    assert problem in (summaries[str(damaged.path)].remark or "") and summaries[str(intact.path)].remark is None
    comparison = compare_runs([damaged, intact, third])
    assert [item.run for item in comparison.run_summaries] == [str(intact.path), str(third.path)]
    assert [item["remark"] is None for item in comparison.as_dict()["runs"]] == [True, True, False]


def test_odd_values_in_machine_json_are_left_out(tmp_path) -> None:
    run = shared_run(tmp_path)
    intact = dict(run.machine)
    for field, value in {"hardware": [], "data_hash": 5, "resumed": "x", "versions": 3, "machine": [1]}.items():
        run.get_path("machine.json").write_text(json.dumps(intact | {field: value}))
        assert dict(run.machine) == {name: kept for name, kept in intact.items() if name != field}
    for text in (DEEP, "[]", "\xff"):
        run.get_path("machine.json").write_text(text)
        assert run.machine == {} and run.training_precision is None


def test_a_damaged_line_of_the_test_log_counts_as_a_use_without_a_result(tmp_path) -> None:
    run = shared_run(tmp_path)
    lines = ['{"opening": [1], "data": "digits"}', '{"opening": 2, "accuracy": "x"}', DEEP, "[1]"]
    run.get_path("test-openings.jsonl").write_text("\n".join(lines))
    assert [entry.result for entry in read_test_set_log(run)] == [{}] * 4


def change_config(run: Run, **changes) -> None:
    path = run.get_path("config.json")
    config = json.loads(path.read_text())
    for key, value in changes.items():
        section, _, name = key.partition("__")
        (config[section] if name else config).update({name or section: value})
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model__depth": 10**9}, "depth is larger than 10,000"),
        ({"model__depth": 9000}, "a model of these settings has"),
        ({"model__embed_dim": 2**16}, "a model of these settings has"),
        ({"model__img_size": [8, 10**7]}, "img_size is larger than"),
        ({"model__img_size": [65536, 65536]}, "tokens; at most"),
        ({"model__depth": "x"}, "is damaged: depth='x' is not a whole number"),
        ({"preparation__std": [0.0]}, "std must be greater than 0"),
        ({"preparation__std": [float("nan")]}, "mean and std must be numbers"),
        ({"preparation__size": [9, 9]}, "size must be"),
        ({"stored": [1, 10**9, 8]}, "stored must be"),
        ({"classes": list(range(10))}, "classes must be a list of names"),
        ({"classes": ["same"] * 10}, "occurs twice"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused_before_anything_is_built(
    tmp_path, monkeypatch, changes, problem
) -> None:
    run = shared_run(tmp_path)
    change_config(run, **changes)
    monkeypatch.setattr("vitascope.inference.open_model.VisionTransformer", None)
    with pytest.raises(UserError, match=problem):
        vitascope.load(run)


def test_a_model_folder_is_checked_like_a_run(tmp_path) -> None:
    run = shared_run(tmp_path)
    change_config(run, model__depth=9000)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run.get_path(name), folder)
    with pytest.raises(UserError, match="a model of these settings has"):
        vitascope.load(folder)


def test_a_deeply_nested_config_is_refused(tmp_path) -> None:
    run = shared_run(tmp_path)
    run.get_path("config.json").write_text(DEEP)
    with pytest.raises(UserError, match="is incomplete"):
        vitascope.load(run)


@pytest.mark.parametrize(("factor", "problem"), [(float("nan"), "contains NaN"), (1e38, "output of NaN or infinite")])
def test_weights_or_outputs_that_are_no_numbers_are_refused(tmp_path, factor, problem) -> None:
    run = shared_run(tmp_path)
    path = run.get_path("model.safetensors")
    save_file({name: (weight * factor).clamp(-3e38, 3e38) for name, weight in load_file(path).items()}, path)
    with pytest.raises(UserError, match=problem):
        vitascope.load(run).predict(torch.rand(1, 1, 8, 8))


def test_a_run_folder_that_is_deleted_during_training_is_an_error(tmp_path, monkeypatch) -> None:
    def delete_folder(*args, **kwargs) -> None:
        shutil.rmtree(tmp_path / "digits")

    monkeypatch.setattr("vitascope.training.loop.save_weight_snapshot_if_due", delete_folder)
    with pytest.raises(UserError, match="was deleted or moved during the training"):
        tiny_run(tmp_path, **{"train.epochs": 1})


def test_lack_of_memory_is_recognised_on_every_device() -> None:
    on_cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: 4 bytes")
    assert all(map(is_out_of_memory, (on_cpu, MemoryError(), torch.OutOfMemoryError("CUDA out of memory."))))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
