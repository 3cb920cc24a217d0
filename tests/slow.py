"""Parameters of a test of which only some belong to `make test`; `make test-slow` runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """The values for `pytest.mark.parametrize`; those that are not in `fast` are marked slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
