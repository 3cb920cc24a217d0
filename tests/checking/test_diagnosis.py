"""Every mistake is named; PyTorch's own layers are right; two mistakes are never called right."""

from pathlib import Path

import pytest
from checking import wrong_attention, wrong_models

import vitascope
from vitascope.coursework.checker.mistakes import MISTAKES

VARIANTS = [
    (name, part, thing)
    for bank in (wrong_attention.WRONG, wrong_models.WRONG)
    for name, variants in bank.items()
    for part, thing in variants
]


@pytest.mark.parametrize(("name", "part", "thing"), VARIANTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_mistake_is_named_and_nothing_else(
    name: str, part: str, thing: object, request: pytest.FixtureRequest
) -> None:
    if part in ("vit", "transformer-block"):  # many computations
        request.getfixturevalue("unchecked_shapes")
    report = vitascope.check(thing, part)
    assert report.mistakes == [name]
    assert not report.passed and report.hints == [MISTAKES[name].hint]
    assert report.first_difference or name == "dropout-in-eval"


def test_the_documentation_lists_every_mistake() -> None:
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    for name, mistake in MISTAKES.items():
        assert f"| `{name}` | {mistake.description} |" in page, name


def test_every_id_has_two_differently_written_variants() -> None:
    for name in set(MISTAKES) - {"unknown"}:
        assert sum(name == other for other, _, _ in VARIANTS) >= 2, name
