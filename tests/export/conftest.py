"""A tiny trained run, and exports without the shape checks that cannot be traced."""

import pytest

from tests.training.tiny import tiny_run
from vitascope.export import verify


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("exported"), **{"train.epochs": 15})


@pytest.fixture(autouse=True)
def traceable(unchecked_shapes, monkeypatch) -> None:
    monkeypatch.setattr(verify, "MAX_SECONDS", 0.0)
