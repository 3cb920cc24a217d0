"""Correct code passes: PyTorch's layers, five styles, hundreds of random solutions."""

import math
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import vit_pytorch
from checking import wrong_models
from checking.correct_solutions import SOURCE_WRITERS, STYLES, write_random_solution
from torch import nn
from torch.nn import functional as F

import vitascope
from tests.slow import slow_except
from vitascope.coursework.checker.check import check_object_or_report_error
from vitascope.coursework.checker.recognition import recognize_part
from vitascope.coursework.checker.reference import (
    QueryKeyValue,
    attend_with_simulated_mistakes,
    run_reference_multi_head_attention_variant,
)
from vitascope.coursework.checker.report import CheckReport, CheckRow, FileReport
from vitascope.coursework.checker.sandbox_worker import enter_folder_and_import_file
from vitascope.model.block import Block
from vitascope.model.config import ModelConfig

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # thousands of tiny computations


def check_source(source: str, name: str, part: str, folder: Path) -> str:
    path = folder / "mine.py"
    path.write_text(source, encoding="utf-8")
    module = enter_folder_and_import_file(path)
    assert recognize_part(name, getattr(module, name)) == part
    report = check_object_or_report_error(name, getattr(module, name))
    return "correct" if report.passed else f"{report}\n{source}"


@pytest.fixture(autouse=True)
def restore_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())
    monkeypatch.syspath_prepend("")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("part", ["attention", "multi-head-attention", "feed-forward", "transformer-block", "vit"])
def test_solutions_in_five_styles_pass(part: str, style: str, tmp_path: Path) -> None:
    for seed in range(4):
        _, source, name = write_random_solution(seed, part, style)
        assert check_source(source, name, part, tmp_path) == "correct"


@pytest.mark.parametrize("start", slow_except(range(0, 240, 40), [0]))
def test_240_random_correct_solutions_pass(start: int, tmp_path: Path) -> None:
    parts = set()
    for seed in range(start, start + 40):
        part, source, name = write_random_solution(seed)
        assert check_source(source, name, part, tmp_path) == "correct", seed
        parts.add(part)
    assert len(parts) >= 6 and parts <= set(SOURCE_WRITERS)


class Tutorial(nn.Module):
    """PyTorch's tutorial: tokens first."""

    def __init__(self, d_model, dropout=0.1, max_len=5000):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        angles = torch.arange(max_len)[:, None] * torch.exp(
            torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model)
        )
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2], pe[:, 0, 1::2] = torch.sin(angles), torch.cos(angles)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[: x.size(0)])


class Linears(nn.Module):
    """Four layers whose names do not show their role; three inputs."""

    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.linears = h, nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            layer(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
            for layer, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        return self.linears[-1]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def native(query, key, value, attn_mask=None):
    return F.scaled_dot_product_attention(query, key, value, attn_mask)


@pytest.mark.parametrize(
    ("user_code", "part"),
    [
        (native, "attention"),
        (nn.MultiheadAttention, "multi-head-attention"),
        (nn.MultiheadAttention(8, 2), "multi-head-attention"),
        (nn.MultiheadAttention(8, 4, batch_first=True, bias=False), "multi-head-attention"),
        (nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True), "transformer-block"),
        (nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, activation="gelu"), "transformer-block"),
        (vitascope.attend, "attention"),
        (vitascope.SelfAttention, "multi-head-attention"),
        (vitascope.SelfAttention2d, "self-attention-2d"),
        (vitascope.causal_mask, "causal-mask"),
        (vitascope.patchify, "patchify"),
        (Block(ModelConfig(embed_dim=12, num_heads=3)), "transformer-block"),
        (
            vitascope.VisionTransformer(
                ModelConfig(img_size=12, patch_size=4, embed_dim=12, num_heads=3, depth=2, num_classes=5)
            ),
            "vit",
        ),
        (vit_pytorch.ViT, "vit"),
        (vit_pytorch.SimpleViT, "vit"),
        (timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=5, depth=2), "vit"),
        (torchvision.models.VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=5), "vit"),
        (timm.layers.Mlp, "feed-forward"),
        (Tutorial, "sinusoidal-positions"),
        (Linears, "multi-head-attention"),
        (wrong_models.ViT, "vit"),
        (wrong_models.Block, "transformer-block"),
        (wrong_models.Mlp, "feed-forward"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_layers_of_pytorch_timm_and_vitascope_pass(user_code: object, part: str, unchecked_shapes: None) -> None:
    report = vitascope.check(user_code, part)
    assert report.passed, report


def test_the_reference_computes_the_same_as_pytorch(unchecked_shapes: None) -> None:
    """The written-out reference, which simulates mistakes, equals PyTorch's layers."""
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    written_out = attend_with_simulated_mistakes(q, k, v, allowed, {"softmax": -1})
    torch.testing.assert_close(written_out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    native = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    wq, wk, wv = native.in_proj_weight.chunk(3)
    bq, bk, bv = native.in_proj_bias.chunk(3)
    weights = {"wq": wq, "wk": wk, "wv": wv, "bq": bq, "bk": bk, "bv": bv}
    weights |= {"wo": native.out_proj.weight, "bo": native.out_proj.bias}
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    reference_result = run_reference_multi_head_attention_variant(
        QueryKeyValue(x, x, x), weights, 3, allowed, {"softmax": -1}
    )
    torch.testing.assert_close(reference_result, native(x, x, x, attn_mask=~allowed)[0])


def test_checking_a_module_does_not_change_it() -> None:
    layer = nn.MultiheadAttention(8, 2).train()
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    assert vitascope.check(layer).passed
    assert layer.training
    assert all(torch.equal(weight, before[name]) for name, weight in layer.state_dict().items())


def test_the_report_lists_assumptions() -> None:
    def attention(values, queries, keys, attn_mask=None):
        scores = queries @ keys.transpose(-2, -1) / keys.shape[-1] ** 0.5
        return (scores if attn_mask is None else scores.masked_fill(attn_mask, -1e9)).softmax(-1) @ values

    report = vitascope.check(attention)
    assert report.passed
    assert "in a boolean mask, True means masked out, as in nn.MultiheadAttention" in report.assumptions


def test_a_report_has_text_and_html_for_notebooks() -> None:
    def attention(q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    report = vitascope.check(attention)
    assert "wrong: missing-scale" in repr(report) and "expected" in repr(report)
    assert "<table>" in report._repr_html_() and "missing-scale" in report._repr_html_()


def test_text_like_markup_in_a_report_for_notebooks_stays_text() -> None:
    rows = [CheckRow("<b>check</b>", False, "<script>alert(1)</script>")]
    report = CheckReport("attention", "<img src=x>", False, hints=["a&b"], table=rows)
    html = FileReport([report], error="SyntaxError: <string>")._repr_html_()
    assert "<script" not in html and "<img" not in html and "<b>check" not in html and "&lt;string&gt;" in html
    assert "Hint: a&amp;b" in html and "&lt;img src=x&gt; (attention)" in html


def test_a_detached_gradient_fails() -> None:
    def attention(q, k, v):
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1).detach() @ v

    report = vitascope.check(attention)
    assert report.mistakes == ["unknown"]
    assert any("gradient" in line for line in report.evidence)
