"""Shared fixtures: checked tensor shapes, few threads, fixed random state, the command line as a function."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import jaxtyping
import pytest
import torch
from hypothesis import settings

from tests.shaped import find_shaped_modules

if find_spec("beartype"):  # before anything imports the modules; a GPU machine may not have it
    jaxtyping.install_import_hook(find_shaped_modules(), "typechecking.checked")

settings.register_profile("vitascope", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=25)
settings.load_profile("vitascope")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports a kernel: they then run on the CPU, slowly

_CACHE = TemporaryDirectory(prefix="vitascope-cache-")  # of statistics and kernel choices, new for every process
os.environ["XDG_CACHE_HOME"] = os.environ["LOCALAPPDATA"] = _CACHE.name

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


@pytest.fixture(autouse=True)
def fixed_random_state() -> Iterator[None]:
    """Set the same random seed before every test, and restore the number of threads after it."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """For tests that compile or export: the compiler cannot trace the shape checks."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def vitascope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`vitascope("anatomy", "depth=2")` runs the command line in this process."""

    def run_command(*arguments: str) -> Answer:
        from vitascope.cli import main

        monkeypatch.setattr(sys, "argv", ["vitascope", *arguments])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run_command
