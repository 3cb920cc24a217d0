"""Start-up: which modules a command may import. Time is not measured here, so the machine's load does not matter.

Imports are most of a short command: PyTorch takes one to three seconds, its compiler `torch._dynamo` as long again,
scikit-learn one to two, matplotlib half a second.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.training.tiny import shared_run

ROOT = Path(__file__).parents[2]
SLOW = (
    "torch", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "triton", "sympy", "torchvision", "timm",
    "transformers", "sklearn", "scipy", "matplotlib", "tensorboard", "omegaconf", "optuna", "sqlalchemy", "pandas",
    "onnx", "onnxruntime", "huggingface_hub", "jinja2",
)  # fmt: skip
LIST_IMPORTS = f"""
import json, sys
sys.argv = ["vitascope", *sys.argv[1:]]
try:
    from vitascope.cli import main
    main()
except SystemExit:
    pass
finally:
    print("\\n" + json.dumps([name for name in {SLOW!r} if name in sys.modules]))
"""


def list_imports(code: str, *words: str, cwd: Path = ROOT) -> set[str]:
    """Which of the slow modules a fresh process has imported when it ends."""
    command, environment = [sys.executable, "-c", code, *words], os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd, env=environment)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code", ["import vitascope", "from vitascope import ModelConfig; ModelConfig()"], ids=["import", "config"]
)
def test_modules_that_need_no_torch_do_not_import_it(code: str) -> None:
    listing = f"import json, sys\n{code}\nprint(json.dumps([name for name in {SLOW!r} if name in sys.modules]))"
    assert list_imports(listing) == set()


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("--help", ()),
        ("train --help", ()),
        ("anatomy cifar10", ("omegaconf",)),
        ("runs list --runs no-such-folder", ("omegaconf",)),
    ],
)
def test_a_command_that_computes_nothing_imports_no_torch(words: str, allowed: tuple[str, ...]) -> None:
    assert list_imports(LIST_IMPORTS, *words.split()) <= set(allowed)


def test_training_and_predicting_import_neither_the_compiler_nor_unused_packages(tmp_path) -> None:
    words = ["train", "digits", "train.epochs=1", "train.device=cpu", "--runs", "runs"]
    assert list_imports(LIST_IMPORTS, *words, cwd=tmp_path) == {"torch", "omegaconf", "tensorboard", "matplotlib"}
    [image] = (ROOT / "docs/images").glob("positions.png")
    assert list_imports(LIST_IMPORTS, "predict", "runs/digits", str(image), cwd=tmp_path) == {"torch"}


def test_predicting_imports_nothing_of_training(tmp_path) -> None:
    shared_run(tmp_path, **{"train.epochs": 1})
    Image.new("L", (8, 8)).save(tmp_path / "digit.png")
    listed = f"name for name in {SLOW!r} if name in sys.modules"
    assert listed in LIST_IMPORTS
    code = LIST_IMPORTS.replace(listed, "name for name in sys.modules if name.startswith('vitascope.')")
    modules = list_imports(code, "predict", "digits", "digit.png", cwd=tmp_path)
    assert "vitascope.inference.classifier" in modules
    assert not {name for name in modules if name.startswith("vitascope.training")}


def test_self_supervised_training_imports_no_compiler(tmp_path) -> None:
    """Its linear probe is fitted by PyTorch's L-BFGS."""
    words = ["train", "digits-mae", "train.epochs=1", "train.device=cpu", "model.depth=1", "--runs", "runs"]
    assert "torch._dynamo" not in list_imports(LIST_IMPORTS, *words, cwd=tmp_path)
