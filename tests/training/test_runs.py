"""Whole runs: repeatable, resumable bit by bit, honest about the test set, safe against mishaps."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import vitascope
from tests.training.killing import kill_after_epoch
from tests.training.tiny import EVERYTHING, TINY, shared_run, tiny_run, untimed
from vitascope import UserError
from vitascope.data.open_data import load_train_and_validation_data
from vitascope.data.sources.arrays import open_builtin_digits
from vitascope.recipe.choices import complete_augmentation_for_objective
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.schema import format_recipe_yaml
from vitascope.run.directory import Run, create_run_folder, open_run_or_newest
from vitascope.training.loop import EpochRecord, train_and_checkpoint_remaining_epochs
from vitascope.training.prepare import make_console, seed_and_build_train_state
from vitascope.training.train import resume_run_if_unfinished

FILES = {
    "recipe.yaml",
    "machine.json",
    "metrics.jsonl",
    "curves.png",
    "model.safetensors",
    "best.safetensors",
    "config.json",
    "resume.pt",
    "resume.previous.pt",
}


def same_weights(one: Run, other: Run, name: str = "model.safetensors") -> bool:
    ours, theirs = load_file(one.get_path(name)), load_file(other.get_path(name))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_run_leaves_everything_in_its_directory_and_can_be_run_again_from_it(tmp_path) -> None:
    run = tiny_run(tmp_path)
    assert {file.name for file in run.path.iterdir() if "tfevents" not in file.name} == FILES
    assert run.path.parent == tmp_path / "digits" and run.path.name.endswith("-seed0")
    machine = json.loads(run.get_path("machine.json").read_text())
    assert machine["versions"]["torch"] == torch.__version__.split("+")[0] or machine["versions"]["torch"]
    assert machine["hardware"]["device"] == "cpu" and machine["data_hash"]
    assert [row["epoch"] for row in run.metrics] == [1, 2, 3]
    assert set(run.metrics[0]) >= {"step", "lr", "train_loss", "train_accuracy", "val_loss", "val_accuracy", "seconds"}
    again = vitascope.train(str(run.get_path("recipe.yaml")), runs=tmp_path, quiet=True)
    assert untimed(again) == untimed(run) and same_weights(again, run) and again.path != run.path


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path) -> None:
    one, same, other = (tiny_run(tmp_path, **EVERYTHING, **{"train.seed": seed}) for seed in (1, 1, 2))
    assert untimed(one) == untimed(same) and same_weights(one, same)
    assert untimed(one) != untimed(other)


def build_state_and_run(folder: Path, **settings):
    words = [f"{key}={value}" for key, value in (TINY | settings).items()]
    recipe = read_recipe("digits", words)
    objective = recipe.train.objective
    recipe = replace(
        recipe,
        data=replace(
            recipe.data, augment=complete_augmentation_for_objective(recipe.data.augment, "digits", 1, objective)
        ),
    )
    data = load_train_and_validation_data(recipe.data, (8, 8), 1, recipe.train.seed)
    return seed_and_build_train_state(recipe, data), create_run_folder(recipe, folder)


def check_goes_on_after_a_stop(folder: Path, **settings) -> Run:
    """Left after two epochs and resumed: the weights of a run that was not stopped, which comes back."""
    whole = shared_run(folder / "whole", **settings)
    state, run = build_state_and_run(folder / "cut", **(settings | {"train.save_seconds": 1000}))
    records = train_and_checkpoint_remaining_epochs(state, run)
    while state.epoch < 2:
        next(records)
    records.close()
    assert not run.is_finished
    resume_run_if_unfinished(run, make_console(quiet=True))
    assert same_weights(run, whole)
    return whole


def check_refused(recipe: str, word: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        read_recipe(recipe, [word])
    assert text in str(error.value)


@pytest.mark.parametrize("epochs_before", [0, 1, 2])
@pytest.mark.parametrize("settings", [TINY, EVERYTHING], ids=["plain", "everything"])
def test_an_abandoned_run_goes_on_as_if_it_had_not_been(tmp_path, epochs_before, settings) -> None:
    """Left in the middle of an epoch: with averaging, Muon, mixing, dropout; also when saving is rare."""
    whole = shared_run(tmp_path / "whole", **settings)
    state, run = build_state_and_run(tmp_path / "cut", **(settings | {"train.save_seconds": 1000}))
    records = train_and_checkpoint_remaining_epochs(state, run)
    for _ in range(epochs_before):
        while not isinstance(next(records), EpochRecord):
            pass
    records.close()
    torch.manual_seed(99)  # another process would not share our generator either
    resume_run_if_unfinished(run, make_console(quiet=True))
    assert untimed(run) == untimed(whole)
    assert same_weights(run, whole) and same_weights(run, whole, "best.safetensors")


@pytest.mark.parametrize("lines_before", [1, 2])
def test_a_run_killed_without_warning_is_resumed_bit_by_bit(tmp_path, lines_before) -> None:
    settings = EVERYTHING | {"train.epochs": 4, "train.threads": 1}
    words = [f"{key}={value}" for key, value in settings.items()]
    kill_after_epoch(lines_before, "train", "digits", "--runs", str(tmp_path / "cut"), *words)
    run = open_run_or_newest(tmp_path / "cut" / "digits")
    assert not run.is_finished and len(run.metrics) == lines_before
    torch.set_num_threads(1)
    vitascope.resume(run, quiet=True)
    whole = shared_run(tmp_path / "whole", **settings)
    assert untimed(run) == untimed(whole) and same_weights(run, whole)
    steps = [event.step for event in tensorboard_events(run, "train/loss")]
    assert steps == [row["step"] for row in run.metrics]


def tensorboard_events(run: Run, tag: str):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.path))
    accumulator.Reload()
    return accumulator.Scalars(tag)


def test_a_torn_or_foreign_checkpoint_is_refused_and_nothing_is_lost(tmp_path) -> None:
    state, run = build_state_and_run(tmp_path, **{"train.save_seconds": 1000})  # so there is one checkpoint
    records = train_and_checkpoint_remaining_epochs(state, run)
    next(records)
    records.close()
    whole = run.get_path("resume.pt").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"hello"):
        run.get_path("resume.pt").write_bytes(content)
        with pytest.raises(UserError, match="Nothing was changed"):
            vitascope.resume(run, quiet=True)
        assert run.get_path("resume.pt").read_bytes() == content
    torch.save({"model": {}}, run.get_path("resume.pt"))
    with pytest.raises(UserError, match="not written by this version"):
        vitascope.resume(run, quiet=True)


def test_a_loss_that_is_not_a_number_stops_names_the_step_and_keeps_the_state(tmp_path, monkeypatch) -> None:
    from vitascope.training.objectives import classify as module

    state, run = build_state_and_run(tmp_path)
    real, bad = module.cross_entropy, state.steps_per_epoch + 3
    monkeypatch.setattr(module, "cross_entropy", lambda *a: real(*a) * (float("nan") if state.step == bad else 1))
    with pytest.raises(UserError, match=rf"The loss became NaN or infinite at step {bad + 1} \(epoch 2\)") as raised:
        list(train_and_checkpoint_remaining_epochs(state, run))
    advice = str(raised.value)  # the rate may help; gradients are clipped and float32 already
    assert "train.lr below" in advice and "clip_grad" not in advice and "float32" not in advice
    kept = torch.load(run.get_path("resume.pt"), weights_only=True)
    assert kept["epoch"] == 1 and all(tensor.isfinite().all() for tensor in kept["model"].values())


def test_accumulating_gives_the_same_step_in_parts(tmp_path) -> None:
    whole, parts = (
        tiny_run(tmp_path, **{"train.grad_accum_steps": count, "train.epochs": 1, "data.augment.cutmix": 1.0})
        for count in (1, 4)
    )
    ours, theirs = (load_file(run.get_path("model.safetensors")) for run in (whole, parts))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-5, rtol=0)


def test_patience_ends_a_run_that_does_not_get_better(tmp_path) -> None:
    run = tiny_run(tmp_path, **{"train.patience": 2, "train.epochs": 30, "train.lr": 1e-12, "train.muon_lr": 1e-12})
    assert len(run.metrics) == 3 and run.is_finished


def test_the_test_set_is_opened_by_evaluate_only_and_each_opening_is_written_down(tmp_path, monkeypatch) -> None:
    from vitascope.data.sources import arrays as digits

    opened, real = [], digits.load_digits_split
    monkeypatch.setattr(digits, "load_digits_split", lambda split: opened.append(split) or real(split))
    run = tiny_run(tmp_path)
    assert "test" not in opened
    model = vitascope.load(run)
    first, second = model.evaluate(), model.evaluate()
    assert (first.test_use_count, second.test_use_count) == (1, 2) and first.accuracy == second.accuracy
    lines = [json.loads(line) for line in run.get_path("test-openings.jsonl").read_text().splitlines()]
    assert [line["opening"] for line in lines] == [1, 1, 2, 2]
    assert [line.get("accuracy") for line in lines] == [None, first.accuracy, None, first.accuracy]
    assert model.evaluate("val").accuracy == pytest.approx(run.metrics[-1]["val_accuracy"])


def test_a_loaded_model_answers_as_the_run_did(tmp_path) -> None:
    run = tiny_run(tmp_path, **{"train.ema": 0.9})
    model = vitascope.load(run)
    assert not model.model.training and model.config == run.recipe.model
    assert vitascope.load(run.path, best=True) is not None


def test_it_learns_digits_by_heart(tmp_path) -> None:
    """With few images and no variation a model must be able to learn every one."""
    still = {f"data.augment.{name}": 0 for name in ("shift", "rotate", "scale", "mixup")}
    settings = {"data.fraction": 0.12, "train.epochs": 60, "train.batch_size": 24, "train.optimizer": "muon"}
    run = tiny_run(tmp_path, **still, **settings, **{"model.embed_dim": 32, "train.label_smoothing": 0})
    assert run.metrics[-1]["train_accuracy"] > 0.98


@pytest.mark.parametrize("balance", ["loss", "sampling"])
def test_balancing_helps_a_rare_class(tmp_path, balance) -> None:
    import numpy as np
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
    common, rare = np.flatnonzero(y == 1), np.flatnonzero(y == 7)
    chosen = np.concatenate([common[:150], rare[:8]])
    labels = (y[chosen] == 7).astype(np.int64)
    np.savez(tmp_path / "rare.npz", x_train=x[chosen], y_train=labels)
    settings = {
        "data.name": str(tmp_path / "rare.npz"),
        "data.validation": 0,
        "train.epochs": 4,
        "train.batch_size": 32,
    }
    settings |= {"data.augment.flip": 0, "data.augment.cutmix": 0, "train.lr": 3e-3}
    plain, balanced = (tiny_run(tmp_path, **settings, **{"data.balance": kind}) for kind in ("none", balance))
    images = torch.from_numpy(x[rare[8:]])[:, None]
    recalls = []
    for run in (plain, balanced):
        model = vitascope.load(run)
        recalls.append(model(model.info.preparation(images)).softmax(1)[:, 1].mean().item())
    assert recalls[1] > recalls[0] + 0.1


def test_a_complete_recipe_survives_writing_and_reading(tmp_path) -> None:
    recipe = read_recipe("cifar10", ["train.betas=[0.8,0.9]", "model.img_size=[32,32]", "train.track=[wandb]"])
    (tmp_path / "again.yaml").write_text(format_recipe_yaml(recipe))
    assert read_recipe(str(tmp_path / "again.yaml")) == recipe


def test_images_of_another_size_and_kind_are_fitted_to_the_model(tmp_path) -> None:
    run = tiny_run(tmp_path, **{"model.img_size": 12, "model.patch_size": 4, "model.in_chans": 3, "train.epochs": 1})
    assert vitascope.load(run)(torch.randn(1, 3, 12, 12)).shape == (1, 10)


class FakeTracker(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.rows, self.closed = [], False

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, row, step) -> None:
        self.rows.append((step, row["epoch"]))

    def finish(self) -> None:
        self.closed = True


def test_wandb_is_told_only_when_asked(tmp_path, monkeypatch) -> None:
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = tiny_run(tmp_path, **{"train.track": ["wandb"]})
    assert [epoch for _, epoch in fake.rows] == [1, 2, 3] and fake.closed and fake.settings["id"] == run.path.name
    tiny_run(tmp_path)
    assert len(fake.rows) == 3


def test_a_tracker_that_is_not_installed_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match="pip install 'vitascope\\[mlflow\\]'"):
        tiny_run(tmp_path, **{"train.track": ["mlflow"]})


def test_an_epoch_that_ends_in_ruin_does_not_overwrite_the_good_state(tmp_path) -> None:
    """Every loss was a number, but the last step threw the weights away."""
    settings = {"train.optimizer": "adamw", "train.lr": 1e30, "train.warmup": 0, "train.batch_size": 2000}
    state, run = build_state_and_run(tmp_path, **settings, **{"train.ema": 0})
    with pytest.raises(UserError, match=r"The (loss|validation loss|weights) became NaN or infinite.* \(epoch 1\)"):
        list(train_and_checkpoint_remaining_epochs(state, run))
    kept = torch.load(run.get_path("resume.pt"), weights_only=True)
    assert kept["epoch"] == 0 and all(tensor.abs().max() < 100 for tensor in kept["model"].values())
    assert run.metrics == []


def test_a_changed_recipe_or_changed_images_are_not_gone_on_with(tmp_path, monkeypatch) -> None:
    from vitascope.data.sources import arrays as digits_file

    state, run = build_state_and_run(tmp_path)
    records = train_and_checkpoint_remaining_epochs(state, run)
    next(records)
    records.close()
    recipe = run.get_path("recipe.yaml").read_text()
    run.get_path("recipe.yaml").write_text(recipe.replace("label_smoothing: 0.1", "label_smoothing: 0.2"))
    with pytest.raises(UserError, match=r"recipe\.yaml has changed"):
        vitascope.resume(run, quiet=True)
    run.get_path("recipe.yaml").write_text(recipe)
    real = digits_file.load_digits_split
    monkeypatch.setattr(digits_file, "load_digits_split", lambda split: real(split).select(torch.arange(898).flip(0)))
    with pytest.raises(UserError, match="training images have changed"):
        vitascope.resume(run, quiet=True)


def test_classes_that_have_changed_are_not_scored(tmp_path, monkeypatch) -> None:
    from vitascope.data import open_data as opening

    run = tiny_run(tmp_path)
    monkeypatch.setattr(
        opening,
        "open_builtin_digits",
        lambda: replace(open_builtin_digits(), classes=[f"other {n}" for n in range(10)]),
    )
    with pytest.raises(UserError, match="The classes of digits have changed"):
        vitascope.load(run).evaluate()


def test_a_torn_config_is_told(tmp_path) -> None:
    run = tiny_run(tmp_path, **{"train.epochs": 1})
    for content in ("{", "{}", "[]"):
        run.get_path("config.json").write_text(content)
        with pytest.raises(UserError, match="is incomplete"):
            vitascope.load(run)


def test_a_run_gives_the_threads_back(tmp_path) -> None:
    before = torch.get_num_threads()
    tiny_run(tmp_path, **{"train.threads": before + 1, "train.epochs": 1})
    assert torch.get_num_threads() == before


def test_a_copy_over_an_old_one_is_a_copy(tmp_path) -> None:
    """As a deep copy, and nothing of it is the state's own; a state of another structure is copied anew."""
    state, run = build_state_and_run(tmp_path, **(EVERYTHING | {"train.epochs": 3}))
    fresh = state.copy_state()
    records, kept = train_and_checkpoint_remaining_epochs(state, run), fresh
    for record in records:
        if isinstance(record, EpochRecord):
            before, kept = kept, state.copy_state(kept)
            wanted, result = flat(state.copy_state()), flat(kept)
            assert result.keys() == wanted.keys()
            assert all(torch.equal(value, wanted[name]) for name, value in result.items() if torch.is_tensor(value))
            assert all(value == wanted[name] for name, value in result.items() if not torch.is_tensor(value))
    places = {value.data_ptr() for value in flat(state.state_dict()).values() if torch.is_tensor(value)}
    assert not places & {value.data_ptr() for value in flat(kept).values() if torch.is_tensor(value)}
    assert kept["model"]["head.weight"].data_ptr() == before["model"]["head.weight"].data_ptr()
    assert fresh["optimizers"][0]["state"] == {}


def test_a_stop_while_the_state_is_copied_leaves_a_whole_one(tmp_path, monkeypatch) -> None:
    """Ctrl-C when half of the second copy is written: resume.pt has the first, and the run ends as if nothing was."""
    whole = shared_run(tmp_path / "whole", **{"train.epochs": 4})
    state, run = build_state_and_run(tmp_path / "cut", **{"train.epochs": 4, "train.save_seconds": 1000})
    calls, real = [], torch._foreach_copy_

    def stopped(kept, new):
        calls.append(real(kept, new))
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", stopped)
    with pytest.raises(KeyboardInterrupt):
        for _ in train_and_checkpoint_remaining_epochs(state, run):
            pass
    monkeypatch.undo()
    resume_run_if_unfinished(run, make_console(quiet=True))
    left, wanted = (load_file(one.get_path("model.safetensors")) for one in (run, whole))
    assert all(torch.equal(left[name], weight) for name, weight in wanted.items())
    assert untimed(run) == untimed(whole)


def flat(state, name: str = "") -> dict:
    """Every value under its path."""
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else None
    if parts is None:
        return {name: state}
    return {path: value for key, part in parts for path, value in flat(part, f"{name}/{key}").items()}


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (
            {},
            r"too small for 64 images at once\. Try train\.grad_accum_steps=2 \(less memory, same result\) or mod",
        ),
        ({"train.grad_accum_steps": 4}, r"too small for 16 images at once\. Try train\.grad_accum_steps=8 "),
        ({"train.objective": "dino", "dino.local_size": 4, "train.ema": 0}, r"at once\. Try model\.grad_checkpointing"),
    ],
)
def test_a_full_memory_says_what_to_change_and_keeps_the_state(tmp_path, settings, advice) -> None:
    state, run = build_state_and_run(tmp_path, **settings)
    calls, real = [], state.objective.compute_loss_and_metrics

    def raise_in_second_epoch(*given):
        calls.append(given)
        if len(calls) > 15 * state.recipe.train.grad_accum_steps:  # in the second epoch
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*given)

    state.objective.compute_loss_and_metrics = raise_in_second_epoch
    with pytest.raises(UserError, match=advice):
        for _ in train_and_checkpoint_remaining_epochs(state, run):
            pass
    assert run.get_path("resume.pt").is_file() and len(run.metrics) == 1
