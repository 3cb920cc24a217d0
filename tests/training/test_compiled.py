"""A compiled step learns what the plain one learns: variation, model, loss, and all of them for many models."""

import json
import subprocess
import sys

import pytest


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
