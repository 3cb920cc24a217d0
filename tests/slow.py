"""Mark some parameters of a test as slow: `make test` skips them, `make test-slow` runs them."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return the values for `pytest.mark.parametrize`; those that are not in `fast` are marked slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
