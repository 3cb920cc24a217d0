"""A compiled step learns what the plain one learns: variation, model, loss, and all of them for many models."""

import json
import subprocess
import sys

import pytest
from torch import nn

from vitascope.recipe.reading import read_recipe
from vitascope.training import hardware


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("compiled")
    command = [sys.executable, "-m", "tests.training.compiled_steps", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("classify", {"prepare", "VisionTransformer", "judged"}),
        ("mae", {"prepare"}),
        ("dino", {"prepare"}),
        ("together", {"_given", "_losses", "_update"}),
    ],
)
def test_a_compiled_step_learns_what_the_plain_one_learns(steps, way, parts) -> None:
    found = steps[way]
    assert parts <= set(found["parts"])
    assert found["compiled"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["plain"][0] != found["plain"][-1]


@pytest.mark.parametrize(
    ("recipe", "epochs", "models", "pays"),
    [("cifar10", 100, 1, True), ("cifar10", 2, 1, False), ("sheet-c", 50, 1, False), ("sheet-c", 50, 5, True)],
)
def test_compiling_is_chosen_where_it_pays(monkeypatch, recipe, epochs, models, pays) -> None:
    monkeypatch.setattr(hardware, "choose_device", lambda _: "cuda")
    said = read_recipe(recipe, ["train.precision=bfloat16", f"train.epochs={epochs}"])
    assert hardware.choose_hardware(said, nn.Identity(), epochs * 45_000, models).compiled is pays
