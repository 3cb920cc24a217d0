"""The shipped table of kernels: every shape of a recipe once, merged and sorted; refused without a GPU."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import kernel_table
from vitascope import ModelConfig, UserError, VisionTransformer
from vitascope.inference.fast import SMALL_BATCH_SIZE
from vitascope.inference.kernel_choice import KernelWorkload, LayerCall
from vitascope.model.attention import SelfAttention
from vitascope.recipe.reading import read_recipe

SMALL = ["model.embed_dim=64", "model.depth=1", "model.num_heads=2", "train.batch_size=12", "train.precision=float32"]


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU that is none: parts are told without one, and every measurement says 'own'."""
    measured = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(VisionTransformer, "cuda", lambda self: self)
    monkeypatch.setattr(kernel_table, "choose_or_check_device", lambda asked: asked)

    def tell_parts(model, use):
        tokens = torch.zeros(use.batch_size, model.config.num_tokens, model.config.embed_dim)
        parts = {"attention": LayerCall(model.blocks[0].attn, tokens)}
        return parts if use.compiled else parts | {"norm": LayerCall(model.blocks[0].norm1, tokens)}

    def measure(part, use):
        measured.append((part, use))
        return "default" if "own" not in part.module.KERNELS else "own"

    monkeypatch.setattr(kernel_table, "make_layer_calls_for_kernel_choice", tell_parts)
    monkeypatch.setattr(kernel_table, "measure_fastest_kernel", measure)
    return measured


def test_every_shape_of_training_and_fast_inference_is_measured_once_and_merged_sorted(
    fake_gpu, monkeypatch, tmp_path
) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"zzz": "own"}))
    words = ["kernel_table", "--recipes", "cifar10-94", "--set", *SMALL, "--out", str(table)]
    monkeypatch.setattr(sys, "argv", words)
    kernel_table.main()
    uses = [(type(part.module), use.batch_size, use.training) for part, use in fake_gpu]
    assert len(uses) == len(set(uses)) == 5
    attention = [(batch, training) for kind, batch, training in uses if kind is SelfAttention]
    assert attention[:3] == [(12, True), (1, False), (SMALL_BATCH_SIZE, False)] and attention[3][0] > SMALL_BATCH_SIZE
    contents = json.loads(table.read_text())
    assert list(contents) == sorted(contents) and len(contents) == 6 and contents["zzz"] == "own"
    assert sum(", training, of " in key for key in contents) == 2
    kernel_table.main()
    assert len(fake_gpu) == 5, "what the table has is not measured again"
    monkeypatch.setattr(sys, "argv", [*words, "--again"])
    kernel_table.main()
    assert len(fake_gpu) == 10 and json.loads(table.read_text()) == contents


def test_the_measured_uses_are_those_that_training_looks_up(fake_gpu) -> None:
    recipe = read_recipe("cifar10-dino", ["train.batch_size=6"])
    model = VisionTransformer(ModelConfig(embed_dim=64, depth=1, num_heads=2))
    uses = [use for _, use in kernel_table.list_kernel_uses(read_recipe("cifar10-94", SMALL), model) if use.training]
    assert uses == [KernelWorkload(12, torch.float32, training=True, compiled=compiled) for compiled in (False, True)]
    assert kernel_table.make_training_workload(recipe, 1000, torch.float32, compiled=False).batch_size == 12, (
        "two large crops each"
    )


def test_without_a_gpu_or_without_a_model_it_is_refused(monkeypatch, capsys) -> None:
    with pytest.raises(UserError, match="takes its model from timm:deit_tiny"):
        kernel_table.measure_kernel_choices(read_recipe("cifar10-finetune", []), {})
    staged = read_recipe("cifar10-ssl", [])
    assert kernel_table.find_model_config(staged) == staged.model
    assert kernel_table.find_model_config(replace(staged, model=ModelConfig())) == read_recipe("cifar10-dino", []).model
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["kernel_table", "--recipes", "cifar10-94"])
        with pytest.raises(SystemExit):
            kernel_table.main()
        assert "The device cuda is not available" in capsys.readouterr().err
