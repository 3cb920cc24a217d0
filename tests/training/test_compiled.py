"""A compiled step learns what the plain one learns: variation, model, loss, and all of them for many models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from vitascope.data.config import AugmentConfig, resolve_augmentation
from vitascope.data.preprocessing import Preprocessing
from vitascope.data.sampling import draw_epoch_augmentation_parameters
from vitascope.recipe.reading import read_recipe
from vitascope.training import hardware


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "-m", "tests.training.compiled_steps", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "parts"),
    [
        ("classify", {"augment_batch", "VisionTransformer", "compute_loss_and_accuracy"}),
        ("mae", {"augment_batch", "MaskedAutoencoder"}),
        ("dino", {"augment_batch", "BackboneWithHead"}),
        (
            "together",
            {"_augment_and_mix_batches", "_compute_losses_and_accuracies", "_clip_and_update_weights_and_ema"},
        ),
    ],
)
def test_a_compiled_step_gives_the_losses_of_the_eager_step(steps, variant, parts) -> None:
    losses = steps[variant]
    assert parts <= set(losses["parts"])
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["plain"][0] != losses["plain"][-1]


@pytest.mark.parametrize(
    ("recipe", "epochs", "models", "pays"),
    [("cifar10", 100, 1, True), ("cifar10", 2, 1, False), ("sheet-c", 50, 1, False), ("sheet-c", 50, 5, True)],
)
def test_compilation_is_chosen_if_it_saves_time(monkeypatch, recipe, epochs, models, pays) -> None:
    monkeypatch.setattr(hardware, "choose_or_check_device", lambda _: "cuda")
    long_recipe = read_recipe(recipe, ["train.precision=bfloat16", f"train.epochs={epochs}"])
    assert (
        hardware.choose_hardware_and_set_threads(long_recipe, nn.Identity(), epochs * 45_000, models).compiled is pays
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "asked", [{}, {"randaugment": 2}, {"crop_scale": (0.3, 1.0), "hue": 0.1, "erase": 0.3, "rotate": 10.0}]
)
def test_variation_compiled_on_a_gpu_is_the_plain_one(asked, unchecked_shapes) -> None:
    policy = resolve_augmentation(AugmentConfig(**asked), "cifar10")
    torch.manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, device="cuda")
    labels = torch.randint(0, 10, (64,), device="cuda")
    preparation = Preprocessing((32, 32), (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    compiled = torch.compile(preparation.augment_and_mix)
    for step in range(2):  # other draws, the same compiled code
        draws = {
            name: draw[step].to("cuda")
            for name, draw in draw_epoch_augmentation_parameters(policy, 2, 64, 0, 0).items()
        }
        compiled_batch, target = compiled(images, labels, draws, policy)
        wanted, _ = preparation.augment_and_mix(images, labels, draws, policy)
        assert (
            (compiled_batch - wanted).abs() > 1e-3
        ).float().mean() < 1e-3  # a pixel on the edge of two levels may fall over
        assert (target.labels == labels).all()


def test_a_process_compiles_more_models_than_pytorch_does_by_itself(monkeypatch) -> None:
    """By itself it would run the ninth shape as it is and say so on stderr, while the run says it was compiled."""

    class Widen(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(4, width)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return self.layer(numbers)

    graphs, real = [], torch.compile

    def counted(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda part, **words: real(part, backend=counted, **words))
    compiled = hardware.Hardware("cpu", "float32", compiled=True, captured=False, threads=1)
    limits = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    config = torch._dynamo.config
    with config.patch({name: getattr(config, name) for name in limits}):  # put back afterwards, as monkeypatch cannot
        for width in range(1, 13):
            compiled.compile(Widen(width))(torch.ones(2, 4))
    assert len(graphs) == 12
