"""Learning from pretrained weights: what learns, what stays, what is saved, how it goes on."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vitascope
from tests.training.tiny import TINY, tiny_run
from tests.weights.test_pretrained import small_timm
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.data.training_data import open_training_data
from vitascope.model.lora import add_lora, plain_state
from vitascope.recipe.train import TrainConfig
from vitascope.run.weights import read_facts
from vitascope.training.optimizers import make_optimizers
from vitascope.training.pretrained import pretrained
from vitascope.training.train import names_of
from vitascope.training.tuning import count_learning, set_learning

CONFIG = ModelConfig(img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=3, num_heads=2, num_classes=5)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A run to start from."""
    return tiny_run(tmp_path_factory.mktemp("start"), **{"train.epochs": 6})


def learning(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_a_linear_probe_teaches_the_head_alone() -> None:
    model = VisionTransformer(CONFIG)
    set_learning(model, TrainConfig(tune="head"))
    assert learning(model) == {"head.weight", "head.bias"}
    groups = make_optimizers(model, TrainConfig(optimizer="muon"))[0].param_groups
    assert sum(len(group["params"]) for group in groups) == 2


def test_frozen_blocks_and_the_embedding_stay() -> None:
    model = VisionTransformer(CONFIG)
    set_learning(model, TrainConfig(freeze=2))
    assert all(name.startswith(("blocks.2.", "norm.", "head.")) for name in learning(model))
    assert "blocks.2.attn.qkv.weight" in learning(model)
    with pytest.raises(UserError, match="freeze=4: the model has 3 blocks"):
        set_learning(model, TrainConfig(freeze=4))


def test_lora_starts_as_the_model_was_and_only_its_own_learns() -> None:
    model, images = VisionTransformer(CONFIG).eval(), torch.randn(2, 1, 8, 8)
    before = model(images)
    set_learning(model, TrainConfig(tune="lora", lora_rank=4))
    assert torch.equal(model(images), before)
    assert learning(model) == {
        "head.weight", "head.bias", *(f"blocks.{n}.attn.qkv.lora_{part}" for n in range(3) for part in ("down", "up")),
    }  # fmt: skip
    added = count_learning(model)[0] - 5 * 33
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
    state = plain_state(model)
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
    before, after = (load_file(path.file("model.safetensors")) for path in (start, run))
    assert before.keys() == after.keys()
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    if tune == "head":
        assert changed == {"head.weight", "head.bias"}
    elif tune == "lora":
        assert changed == {"head.weight", "head.bias"} | {name for name in before if name.endswith("attn.qkv.weight")}
    else:
        assert len(changed) == len(before)
    assert run.metrics[0]["train_loss"] < start.metrics[0]["train_loss"]
    report = json.loads(run.file("adaptation.json").read_text())
    assert report["resampled"] == [] and report["kept"] == len(before)
    assert run.recipe.weights == str(start.path.resolve())
    assert vitascope.load(run).predict(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)).labels


def test_a_pretrained_network_of_another_shape_keeps_its_own(start, tmp_path) -> None:
    run = tiny_run(tmp_path, weights=start.path, **{"model.depth": 5, "model.patch_size": 4, "train.epochs": 1})
    assert run.recipe.model.depth == start.recipe.model.depth and run.recipe.model.patch_size == 4
    assert json.loads(run.file("adaptation.json").read_text())["grid_after"] == [2, 2]


@pytest.mark.parametrize("tune", ["head", "lora"])
def test_a_stopped_fine_tuning_goes_on_exactly(start, tune, tmp_path, monkeypatch) -> None:
    settings = {"weights": start.path, "train.tune": tune, "train.epochs": 4, "train.ema": 0.9}
    whole = tiny_run(tmp_path / "whole", **settings)

    from vitascope.training import loop, train

    real = loop.finish_epoch

    def stop_after_two(session, *rest):
        if session.epoch == 3:
            raise KeyboardInterrupt
        return real(session, *rest)

    monkeypatch.setattr(loop, "finish_epoch", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path / "stopped", **settings)
    monkeypatch.setattr(loop, "finish_epoch", real)
    monkeypatch.setattr(train, "pretrained", lambda recipe: pytest.fail("the weights are not needed any more"))
    run = vitascope.resume(next((tmp_path / "stopped").glob("*/*")), quiet=True)
    first, second = (load_file(path.file("model.safetensors")) for path in (whole, run))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_keeping_weights_needs_weights_to_keep() -> None:
    for words in ({"train.tune": "head"}, {"train.freeze": 1}):
        with pytest.raises(UserError, match=r"there are none to keep\. Give weights"):
            vitascope.train("digits", quiet=True, **(TINY | words))
    with pytest.raises(UserError, match="There are no weights 'nowhere'"):
        vitascope.train("digits", quiet=True, **(TINY | {"weights": "nowhere"}))


def test_images_are_normalised_as_the_weights_are_used_to_also_when_it_goes_on(tmp_path) -> None:
    save_file(small_timm().state_dict(), tmp_path / "w.safetensors")
    run = tiny_run(tmp_path / "runs", weights=tmp_path / "w.safetensors", **{"train.epochs": 1, "model.patch_size": 2})
    prepared = read_facts(run).preparation
    assert prepared.mean == pytest.approx((0.449,), abs=1e-3) and prepared.std == pytest.approx((0.226,), abs=1e-3)
    (run.path / "model.safetensors").unlink()
    (run.path / "resume.pt").unlink()  # as if stopped before the first checkpoint
    vitascope.resume(run.path, quiet=True)
    assert read_facts(run).preparation == prepared and run.metrics[0]["train_loss"] < 2.6


def test_other_classes_of_the_same_number_get_a_new_classifier(start, tmp_path) -> None:
    for number in range(10):
        folder = tmp_path / "photos" / f"thing{number}"
        folder.mkdir(parents=True)
        for picture in range(4):
            Image.new("L", (8, 8), 20 * number + picture).save(folder / f"{picture}.png")
    settings = {"data.name": str(tmp_path / "photos"), "train.epochs": 1, "train.batch_size": 16}
    run = tiny_run(tmp_path / "runs", weights=start.path, **settings)
    report = json.loads(run.file("adaptation.json").read_text())
    assert report["new"] == ["head.weight", "head.bias"] and "other classes, such as" in report["dropped"][0]
    report = json.loads(tiny_run(tmp_path / "runs", weights=start.path).file("adaptation.json").read_text())
    assert not report["new"] and not report["notes"]


def test_data_without_names_keeps_the_classifier_and_says_so(start) -> None:
    recipe = replace(start.recipe, weights=str(start.path))
    made = pretrained(recipe)
    assert not made.report.new and "nothing tells what the data's classes are called" in made.report.notes[-1]
    data = open_training_data(start.recipe.data, start.recipe.model.image_shape, 1, 0)
    assert names_of(data) == data.classes
    assert names_of(replace(data, source=replace(data.source, named=False))) is None
