"""Every known mistake is named, in at least two differently written variants."""

from pathlib import Path

import pytest
from checking import wrong_attention, wrong_models

import vitascope
from vitascope.coursework.checker.report import MISTAKES

VARIANTS = [
    (name, part, user_code)
    for bank in (wrong_attention.WRONG, wrong_models.WRONG)
    for name, variants in bank.items()
    for part, user_code in variants
]


@pytest.mark.parametrize(("name", "part", "user_code"), VARIANTS, ids=lambda value: getattr(value, "__name__", value))
def test_exactly_the_mistake_in_the_code_is_named(
    name: str, part: str, user_code: object, request: pytest.FixtureRequest
) -> None:
    if part in ("vit", "transformer-block"):  # many computations
        request.getfixturevalue("unchecked_shapes")
    report = vitascope.check(user_code, part)
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
