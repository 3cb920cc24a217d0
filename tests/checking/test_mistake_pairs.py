"""Code with two mistakes never passes, and both mistakes are named if they can be distinguished."""

from itertools import combinations

import pytest
import torch
from checking.wrong_attention import FeaturesB, JoinA, LeftA, LeftB, OverHeadsA, Parted, SwappedB, UntransposedA, WidthA
from checking.wrong_models import (
    AfterA,
    Block,
    ColumnsC,
    EndA,
    NormA,
    PlaceA,
    PlaceB,
    ResidualA,
    ResidualB,
    ViT,
)

import vitascope
from tests.slow import slow_except

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # thousands of tiny computations
STEPS = ("project", "split", "maps", "join", "forward")


class NoScale(Parted):
    def maps(self, q, k):
        return torch.softmax(q @ k.transpose(-2, -1), dim=-1)


class Power(Parted):
    def maps(self, q, k):
        return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1], dim=-1)


class OverQueries(Parted):
    def maps(self, q, k):
        return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-2)


ATTENTIONS = {
    NoScale: "missing-scale",
    Power: "scale-not-sqrt",
    WidthA: "scale-by-width",
    OverQueries: "softmax-over-queries",
    OverHeadsA: "softmax-over-heads",
    UntransposedA: "weight-not-transposed",
    SwappedB: "query-key-swapped",
    LeftA: "heads-not-transposed",
    LeftB: "heads-not-transposed",
    JoinA: "heads-joined-wrongly",
    FeaturesB: "feature-attention",
}


def combine_classes(one: type, other: type, steps: tuple[str, ...]) -> type | None:
    """Return a class with the changed steps of both, or None if both change the same step."""
    changed = [{step for step in steps if step in vars(kind)} for kind in (one, other)]
    if changed[0] & changed[1]:
        return None
    return type(
        "Both", (one, other), {step: vars(kind)[step] for kind in (other, one) for step in steps if step in vars(kind)}
    )


PAIRS = [
    (a, b, combined) for a, b in combinations(ATTENTIONS, 2) if (combined := combine_classes(a, b, STEPS)) is not None
]


@pytest.mark.parametrize(("one", "other", "combined"), PAIRS, ids=lambda kind: kind.__name__)
def test_two_mistakes_in_an_attention_are_named_together(one: type, other: type, combined: type) -> None:
    report = vitascope.check(combined, "multi-head-attention")
    assert not report.passed
    if FeaturesB in (one, other):  # its forward replaces the other's steps
        assert "feature-attention" in report.mistakes
    elif (one, other) == (LeftB, JoinA):  # split and joined in the same wrong order: one mistake
        assert report.mistakes == ["heads-not-transposed"]
    else:
        assert set(report.mistakes) == {ATTENTIONS[one], ATTENTIONS[other]}


@pytest.mark.parametrize("wrong", [ResidualA, ResidualB, AfterA, NormA], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "inner", slow_except([NoScale, WidthA, JoinA, OverHeadsA], [NoScale]), ids=lambda kind: kind.__name__
)
def test_a_wrong_attention_in_a_wrong_block_is_named_with_the_block_s_mistake(wrong: type, inner: type) -> None:
    class MyBlock(wrong):
        def __init__(self, embed_dim, num_heads, mlp_ratio=4):
            super().__init__(embed_dim, num_heads, mlp_ratio)
            self.attn = inner(embed_dim, num_heads)

        def attend(self, x):
            return self.attn(x)

    names = {ResidualA: "missing-residual", ResidualB: "missing-residual", AfterA: "norm-after", NormA: "missing-norm"}
    report = vitascope.check(MyBlock, "transformer-block")
    assert set(report.mistakes) == {names[wrong], ATTENTIONS[inner]}


def test_two_mistakes_in_a_model_are_named_together() -> None:
    class Mine(PlaceA):
        patches = ColumnsC.patches

    report = vitascope.check(Mine, "vit")
    assert set(report.mistakes) == {"position-misplaced", "patches-in-column-order"}


@pytest.mark.slow
@pytest.mark.parametrize(("outer", "inner"), [(EndA, ResidualA), (PlaceB, AfterA), (ViT, AfterA)], ids=str)
def test_a_wrong_block_in_a_model_is_named(outer: type, inner: type) -> None:
    class Mine(outer):
        def __init__(self, img_size, patch_size, in_chans, num_classes, embed_dim, depth, num_heads):
            super().__init__(img_size, patch_size, in_chans, num_classes, embed_dim, depth, num_heads)
            self.blocks = torch.nn.Sequential(*(inner(embed_dim, num_heads) for _ in range(depth)))

    names = {ResidualA: "missing-residual", AfterA: "norm-after", EndA: "class-token-at-end"}
    outer_mistakes = [names[outer]] if outer is EndA else ["position-misplaced"] if outer is PlaceB else []
    assert set(vitascope.check(Mine, "vit").mistakes) == {names[inner], *outer_mistakes}


def test_the_failing_example_shows_every_mistake() -> None:
    def attention(q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-2) @ v

    report = vitascope.check(attention)
    assert report.mistakes == ["missing-scale", "softmax-over-queries"]
    assert report.example[0] == "2 tokens of width 2", "with width 1, a missing scale changes nothing"


def test_an_unknown_mistake_is_reported_with_evidence() -> None:
    def attention(q, k, v):
        return torch.sigmoid(q @ k.transpose(-2, -1)) @ v

    report = vitascope.check(attention)
    assert report.mistakes == ["unknown"]
    assert "✗ the rows of the attention weights sum to 1" in report.evidence
    assert "✓ doubling the values doubles the output" in report.evidence
    assert report.format_headline() == "✗ attention (attention): wrong (cause not recognised)"


def test_a_function_that_should_be_a_module_gets_a_fitting_hint() -> None:
    def attention(q, k, v):
        return q.transpose(-2, -1) @ k @ v

    for part in ("vit", "transformer-block"):
        report = vitascope.check(attention, part)
        assert report.verdict == "could not be checked"
        assert report.hints == [f"attention is a function; the part {part} needs a class or an nn.Module."]


def test_an_ignored_mask_is_reported() -> None:
    def attention(q, k, v, mask=None):
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v

    report = vitascope.check(attention)
    assert report.mistakes == ["unknown"] and report.evidence == ["The mask has no effect on the output."]
    assert "mask = [[1, 0], [1, 1]]" in report.example and "weights expected [[[1, 0]," in "\n".join(report.example)
    text = str(report)
    assert "no combination of one or two" not in text, "the mistake is explained"
    assert "Smallest failing example (the mask has no effect):" in text and "Where does your code use the mask?" in text


def test_the_correct_base_classes_pass() -> None:
    assert vitascope.check(Parted, "multi-head-attention").passed
    assert vitascope.check(Block, "transformer-block").passed
