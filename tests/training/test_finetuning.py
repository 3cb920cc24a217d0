"""Learning from pretrained weights: what learns, what stays, what is saved, how it goes on."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file

import vitascope
from tests.training.tiny import TINY, shared_run, tiny_run, untimed
from tests.weights.test_pretrained import build_small_timm
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.data.open_data import load_train_and_validation_data
from vitascope.model.attention_variants import add_lora, make_lora_merged_state_dict
from vitascope.recipe.reading import read_recipe
from vitascope.recipe.train import TrainConfig
from vitascope.run.checkpoint import read_model_info
from vitascope.run.directory import Run
from vitascope.training import loop, rate_finder, train
from vitascope.training.engines.single_run import EagerEngine
from vitascope.training.initial_weights import load_and_adapt_pretrained_weights
from vitascope.training.optim.build import (
    count_trainable_and_all_parameters,
    make_optimizers,
    set_train_mode_except_frozen,
    set_trainable_and_add_lora,
)
from vitascope.training.prepare import find_class_names

CONFIG = ModelConfig(img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=3, num_heads=2, num_classes=5)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A run to start from."""
    return shared_run(tmp_path_factory.mktemp("start"), **{"train.epochs": 6})


def learning(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_a_linear_probe_teaches_the_head_alone() -> None:
    model = VisionTransformer(CONFIG)
    set_trainable_and_add_lora(model, TrainConfig(tune="head"))
    assert learning(model) == {"head.weight", "head.bias"}
    groups = make_optimizers(model, TrainConfig(optimizer="muon"))[0].param_groups
    assert sum(len(group["params"]) for group in groups) == 2


def test_frozen_blocks_and_the_embedding_stay() -> None:
    model = VisionTransformer(CONFIG)
    set_trainable_and_add_lora(model, TrainConfig(freeze=2))
    assert all(name.startswith(("blocks.2.", "norm.", "head.")) for name in learning(model))
    assert "blocks.2.attn.qkv.weight" in learning(model)
    lora = VisionTransformer(CONFIG)
    set_trainable_and_add_lora(lora, TrainConfig(tune="lora", freeze=2))
    assert learning(lora) == {"head.weight", "head.bias", *(f"blocks.2.attn.qkv.lora_{x}" for x in ("down", "up"))}
    with pytest.raises(UserError, match="freeze=4 is too large: the model has 3 blocks"):
        set_trainable_and_add_lora(model, TrainConfig(freeze=4))


def test_lora_starts_as_the_model_was_and_only_its_own_learns() -> None:
    model, images = VisionTransformer(CONFIG).eval(), torch.randn(2, 1, 8, 8)
    before = model(images)
    set_trainable_and_add_lora(model, TrainConfig(tune="lora", lora_rank=4))
    assert torch.equal(model(images), before)
    assert learning(model) == {
        "head.weight", "head.bias", *(f"blocks.{n}.attn.qkv.lora_{part}" for n in range(3) for part in ("down", "up")),
    }  # fmt: skip
    added = count_trainable_and_all_parameters(model)[0] - 5 * 33
    assert added == 3 * 4 * 4 * 32  # 4 r D a layer: queries and values, up and down
    model(images).sum().backward()
    first = model.blocks[0].attn.qkv
    assert first.lora_up.grad.abs().sum() > 0 and first.lora_down.grad.abs().sum() == 0  # B = 0 at the start


def test_lora_touches_queries_and_values_and_merges_to_the_same_answers() -> None:
    model, images = VisionTransformer(CONFIG).eval(), torch.randn(2, 1, 8, 8)
    plain = {name: weight.clone() for name, weight in model.state_dict().items()}
    add_lora(model, 4, 8.0)
    projection = model.blocks[1].attn.qkv
    torch.nn.init.normal_(projection.lora_up)
    up, down = projection.lora_up.detach(), projection.lora_down.detach()
    state = make_lora_merged_state_dict(model)
    assert state.keys() == plain.keys()
    change = state["blocks.1.attn.qkv.weight"] - plain["blocks.1.attn.qkv.weight"]
    torch.testing.assert_close(change[:32], 2.0 * up[0] @ down[0], atol=1e-6, rtol=1e-5)
    assert (change[32:64] == 0).all()
    torch.testing.assert_close(change[64:], 2.0 * up[1] @ down[1], atol=1e-6, rtol=1e-5)
    merged = VisionTransformer(CONFIG).eval()
    merged.load_state_dict(state)
    torch.testing.assert_close(merged(images), model(images), atol=1e-6, rtol=0)


@pytest.mark.parametrize("tune", ["full", "head", "lora"])
def test_a_run_that_starts_from_a_run_learns_and_is_an_ordinary_run(start, tune, tmp_path) -> None:
    run = tiny_run(tmp_path, weights=start.path, **{"train.tune": tune, "train.epochs": 2, "train.optimizer": "muon"})
    before, after = (load_file(path.get_path("model.safetensors")) for path in (start, run))
    assert before.keys() == after.keys()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    if tune == "head":
        assert changed == {"head.weight", "head.bias"}
    elif tune == "lora":
        assert changed == {"head.weight", "head.bias"} | {name for name in before if name.endswith("attn.qkv.weight")}
    else:
        assert len(changed) == len(before)
    assert run.metrics[0]["train_loss"] < start.metrics[0]["train_loss"]
    report = json.loads(run.get_path("adaptation.json").read_text())
    assert report["resampled"] == [] and report["kept"] == len(before)
    assert run.recipe.weights == str(start.path.resolve())
    assert vitascope.load(run).predict(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)).labels


def test_a_pretrained_network_of_another_shape_keeps_its_own(start, tmp_path) -> None:
    run = tiny_run(tmp_path, weights=start.path, **{"model.depth": 5, "model.patch_size": 4, "train.epochs": 1})
    assert run.recipe.model.depth == start.recipe.model.depth and run.recipe.model.patch_size == 4
    assert json.loads(run.get_path("adaptation.json").read_text())["grid_after"] == [2, 2]


def stopped_run(folder: Path, monkeypatch, epoch: int, **settings) -> Run:
    """Broken off while this epoch, counted from 1, is judged."""
    real = loop.log_epoch_and_keep_best

    def stop(state, *rest):
        if state.epoch == epoch:
            raise KeyboardInterrupt
        return real(state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "log_epoch_and_keep_best", stop)
        with pytest.raises(KeyboardInterrupt):
            tiny_run(folder, **settings)
    return Run(next(folder.glob("*/*")))


def assert_same(first: Run, second: Run) -> None:
    """Bit by bit."""
    weights, others = (load_file(run.get_path("model.safetensors")) for run in (first, second))
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    assert untimed(first) == untimed(second) and read_model_info(first) == read_model_info(second)


@pytest.mark.parametrize("tune", ["head", "lora"])
def test_a_stopped_fine_tuning_goes_on_exactly(start, tune, tmp_path, monkeypatch) -> None:
    settings = {"weights": start.path, "train.tune": tune, "train.epochs": 4, "train.ema": 0.9}
    settings |= {"model.drop_path_rate": 0.3, "model.proj_drop_rate": 0.1}
    whole = tiny_run(tmp_path / "whole", **settings)
    run = stopped_run(tmp_path / "stopped", monkeypatch, 3, **settings)
    monkeypatch.setattr(
        train, "load_and_adapt_pretrained_weights", lambda recipe: pytest.fail("the weights are not needed any more")
    )
    assert_same(vitascope.resume(run.path, quiet=True), whole)


def test_keeping_weights_needs_weights_to_keep() -> None:
    for words in ({"train.tune": "head"}, {"train.freeze": 1}):
        with pytest.raises(UserError, match=r"freezes pretrained weights, but there are none\. Set weights"):
            vitascope.train("digits", quiet=True, **(TINY | words))
    with pytest.raises(UserError, match="There are no weights 'nowhere'"):
        vitascope.train("digits", quiet=True, **(TINY | {"weights": "nowhere"}))


@pytest.mark.parametrize("kept", [True, False], ids=["checkpoint", "no checkpoint"])
def test_images_are_normalised_as_the_weights_are_used_to_also_when_it_goes_on(kept, tmp_path, monkeypatch) -> None:
    save_file(build_small_timm().state_dict(), tmp_path / "w.safetensors")
    settings = {"weights": tmp_path / "w.safetensors", "train.epochs": 2, "model.patch_size": 2}
    whole = tiny_run(tmp_path / "whole", **settings)
    prepared = read_model_info(whole).preparation
    assert prepared.mean == pytest.approx((0.449,), abs=1e-3) and prepared.std == pytest.approx((0.226,), abs=1e-3)
    run = stopped_run(tmp_path / "stopped", monkeypatch, 2, **settings)
    if not kept:
        for checkpoint in run.path.glob("resume*.pt"):  # as if killed before the first one
            checkpoint.unlink()
    assert_same(vitascope.resume(run.path, quiet=True), whole)


def test_drop_rates_are_the_recipe_s_not_the_weights(start) -> None:
    rates = {"model.drop_path_rate": 0.3, "model.proj_drop_rate": 0.1, "model.drop_rate": 0.2}
    words = [f"{key}={value}" for key, value in (TINY | rates | {"weights": start.path}).items()]
    config = load_and_adapt_pretrained_weights(read_recipe("digits", words)).info.model
    assert (config.drop_path_rate, config.proj_drop_rate, config.drop_rate) == (0.3, 0.1, 0.2)
    assert start.recipe.model.drop_path_rate == 0 and config.embed_dim == start.recipe.model.embed_dim


DROPS = {"pos_drop_rate": 0.5, "proj_drop_rate": 0.5, "attn_drop_rate": 0.5, "drop_path_rate": 0.5}


@pytest.mark.parametrize(
    ("config", "frozen", "embedding_too"),
    [
        (TrainConfig(), 0, False),
        (TrainConfig(tune="head"), 3, True),
        (TrainConfig(freeze=2), 2, True),
        (TrainConfig(tune="lora"), 0, True),
        (TrainConfig(tune="lora", freeze=1), 1, True),
    ],
    ids=["full", "head", "freeze", "lora", "lora and freeze"],
)
def test_what_is_frozen_is_free_of_chance(config, frozen, embedding_too) -> None:
    model, images = VisionTransformer(replace(CONFIG, **DROPS)), torch.randn(16, 1, 8, 8)
    set_trainable_and_add_lora(model, config)
    set_train_mode_except_frozen(model.eval())
    assert [block.training for block in model.blocks] == [number >= frozen for number in range(3)]
    assert all(module.training == block.training for block in model.blocks for module in block.modules())
    assert model.training and model.head.training and model.head_drop.training and model.norm.training
    assert model.pos_drop.training == (not embedding_too)
    first, second = model.compute_pooled_features(images), model.compute_pooled_features(images)
    assert torch.equal(first, second) == (frozen == 3)


def test_every_epoch_of_a_linear_probe_sees_the_same_features(start, tmp_path, monkeypatch) -> None:
    seen, real = [], EagerEngine.start_epoch

    def note_modes_and_start_epoch(engine, epoch, first_step):
        seen.append([block.training for block in engine.state.model.blocks])
        real(engine, epoch, first_step)

    monkeypatch.setattr(EagerEngine, "start_epoch", note_modes_and_start_epoch)
    tiny_run(tmp_path, weights=start.path, **{"train.tune": "head", "model.drop_path_rate": 0.3})
    assert seen == [[False, False]] * 3  # validation between the epochs leaves other modes


def test_how_much_learns_is_told_where_not_everything_does(start, tmp_path, capsys) -> None:
    for words, sentence in (({"train.tune": "head"}, "170 of 6,"), ({"train.freeze": 1}, "3,482 of 6,"), ({}, None)):
        settings = TINY | words | {"weights": start.path, "train.epochs": 1}
        vitascope.train("digits", runs=tmp_path, **settings)
        counts = re.findall(r"(.*) parameters are trained\.", capsys.readouterr().out)
        assert len(counts) == (sentence is not None) and (sentence is None or counts[0].startswith(sentence))


def test_a_rate_is_looked_for_with_the_weights_the_training_starts_from(start, tmp_path, monkeypatch) -> None:
    save_file(build_small_timm().state_dict(), tmp_path / "w.safetensors")
    states, real = [], rate_finder.seed_and_build_train_state
    monkeypatch.setattr(
        rate_finder, "seed_and_build_train_state", lambda *a, **k: states.append(real(*a, **k)) or states[-1]
    )
    monkeypatch.setattr(rate_finder, "NUM_STEPS", 2)
    settings = {"weights": tmp_path / "w.safetensors", "train.tune": "head", "model.patch_size": 2}
    recipe = read_recipe("digits", [f"{key}={value}" for key, value in (TINY | settings).items()])
    rate_finder.measure_learning_rate_curve(recipe, Console(quiet=True))
    [state], adapted = states, load_and_adapt_pretrained_weights(recipe)
    body = {name: weight for name, weight in state.model.state_dict().items() if not name.startswith("head.")}
    assert body and all(torch.equal(weight, adapted.weights[name]) for name, weight in body.items())
    assert state.data.preprocessing == adapted.info.preparation
    assert learning(state.model) == {"head.weight", "head.bias"}
    assert not any(block.training for block in state.model.blocks)


def test_what_the_weights_decide_otherwise_is_told(start, tmp_path, capsys) -> None:
    settings = {"weights": str(start.path), "model.depth": 7, "train.epochs": 1, "train.device": "cpu"}
    vitascope.train("digits", runs=tmp_path, **settings)
    assert "model.depth: 7 → 2" in capsys.readouterr().out


def test_other_classes_of_the_same_number_get_a_new_classifier(start, tmp_path) -> None:
    for number in range(10):
        folder = tmp_path / "photos" / f"thing{number}"
        folder.mkdir(parents=True)
        for picture in range(4):
            Image.new("L", (8, 8), 20 * number + picture).save(folder / f"{picture}.png")
    settings = {"data.name": str(tmp_path / "photos"), "train.epochs": 1, "train.batch_size": 16}
    run = tiny_run(tmp_path / "runs", weights=start.path, **settings)
    report = json.loads(run.get_path("adaptation.json").read_text())
    assert report["new"] == report["dropped"] == ["head.weight", "head.bias"]
    assert report["notes"] == ["head replaced: the weights' classes are 0, 1, …; the data's are thing0, thing1, …"]
    report = json.loads(tiny_run(tmp_path / "runs", weights=start.path).get_path("adaptation.json").read_text())
    assert not report["new"] and not report["notes"]


def test_data_without_names_keeps_the_classifier_and_says_so(start) -> None:
    recipe = replace(start.recipe, weights=str(start.path))
    made = load_and_adapt_pretrained_weights(recipe)
    assert not made.report.new and "because the data has no class names to compare" in made.report.notes[-1]
    data = load_train_and_validation_data(start.recipe.data, start.recipe.model.image_shape, 1, 0)
    assert find_class_names(data) == data.classes
    assert find_class_names(replace(data, source=replace(data.source, has_class_names=False))) is None
