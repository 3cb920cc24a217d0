"""Every known mistake is named, in at least two differently written variants."""

from pathlib import Path

import pytest
from checking import wrong_attention, wrong_models
from torch import Tensor

import vitascope
from vitascope.coursework.checker.report import ADDITIVE_MASK_HINT, BOOLEAN_MASK_HINT, MISTAKES

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
    assert not report.passed and len(report.hints) == 1 and report.hints[0].startswith(MISTAKES[name].hint)
    assert report.first_difference or name == "dropout-in-eval"


def test_the_hint_on_an_inverted_mask_fits_the_kind_of_mask() -> None:
    def additive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        # The mask is additive: 0 where attention is allowed, -inf elsewhere.
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return scores.masked_fill(mask == 0, -1e9).softmax(-1) @ v

    attention, variants = vitascope.check(additive, "attention"), wrong_models.WRONG["mask-inverted"]
    documented, returned = (vitascope.check(user_code, "causal-mask") for _, user_code in variants)
    for report in (attention, returned):
        assert report.mistakes == ["mask-inverted"] and report.hints[0].endswith(ADDITIVE_MASK_HINT)
    assert documented.hints == [MISTAKES["mask-inverted"].hint]  # its docstring says what True means
    boolean = vitascope.check(wrong_attention.inverted_a, "attention")
    assert boolean.hints[0].endswith(BOOLEAN_MASK_HINT)


def test_a_mask_that_is_added_to_the_scores_is_assumed_additive() -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.3
        scores = scores if mask is None else scores + mask
        return scores.softmax(-1) @ v * 1.1 + 0.01

    report = vitascope.check(wrong, "attention")
    assert report.mistakes == ["unknown"] and any("mask is additive" in line for line in report.assumptions)


def test_the_documentation_lists_every_mistake() -> None:
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    for name, mistake in MISTAKES.items():
        assert f"| `{name}` | {mistake.description} |" in page, name


def test_every_id_has_two_differently_written_variants() -> None:
    for name in set(MISTAKES) - {"unknown"}:
        assert sum(name == other for other, _, _ in VARIANTS) >= 2, name
