"""Triton kernels compared with PyTorch, forward and backward: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from vitascope import kernels
from vitascope.model.attention import SelfAttention
from vitascope.model.mlp import Mlp
from vitascope.model.norm import LayerNorm, RMSNorm
from vitascope.model.positions import apply_rotary_positions, make_rotary_table

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not on this system")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # products in bfloat16 end the process on some CPUs
TOLERANCE = 8e-3 if DEVICE == "cuda" else 1e-6
BFLOAT16_TOLERANCE = 8e-3  # bfloat16 keeps 8 bits


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference divided by the norm of the expected values."""
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def normalize_and_rotate_in_pytorch(qkv, weights, table, heads: int):
    """Return queries, keys and values per head, in float32, computed with PyTorch."""
    query, key, value = qkv.float().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if weights:
        query, key = (F.rms_norm(x, x.shape[-1:], w, 1e-6) for x, w in zip((query, key), weights, strict=True))
    if table is not None:
        query, key = apply_rotary_positions(query, table), apply_rotary_positions(key, table)
    return query, key, value


def attend_in_pytorch(qkv, weights, table, heads: int):
    return (
        F.scaled_dot_product_attention(*normalize_and_rotate_in_pytorch(qkv, weights, table, heads))
        .transpose(1, 2)
        .flatten(2)
    )


ALL_VARIANTS = pytest.mark.parametrize(
    ("grid", "prefix", "width", "norm", "rotation_kind"),
    [
        ((4, 4), 0, 32, True, "shared"),
        ((3, 4), 0, 32, False, "shared"),  # 12 tokens in a tile of 16
        ((3, 4), 0, 32, True, "per image"),
        ((4, 4), 1, 64, True, ""),  # 17 tokens in a tile of 32
        ((3, 3), 0, 32, False, ""),
        ((8, 8), 1, 32, True, "shared"),  # 65 tokens in a tile of 128
    ],
)


def draw_inputs(grid, prefix, width, norm, rotation_kind):
    """Return packed projections of two images and two heads, norm weights, a rotary table, and the number of heads."""
    heads, tokens = 2, grid[0] * grid[1] + prefix
    qkv = torch.randn(2, tokens, 3 * heads * width, device=DEVICE).bfloat16().requires_grad_()
    weights = [(torch.rand(width, device=DEVICE) + 0.5).requires_grad_() for _ in range(2)] if norm else []
    table = make_rotary_table(grid, width, 100.0, prefix).to(DEVICE) if rotation_kind else None
    if rotation_kind == "per image":  # as in MAE, where images have different visible patches
        table = torch.stack([table, table[:, torch.randperm(tokens)]], dim=1)[:, :, None]
    return qkv, weights, table, heads


@ALL_VARIANTS
def test_short_attention_equals_pytorchs(grid, prefix, width, norm, rotation_kind: str) -> None:
    from vitascope.kernels.short_attention import short_attention

    qkv, weights, table, heads = draw_inputs(grid, prefix, width, norm, rotation_kind)
    result = short_attention(qkv, *(weights or [None, None]), table, heads, 1e-6)
    expected = attend_in_pytorch(qkv, weights, table, heads)
    grad_output = torch.randn_like(expected).bfloat16()
    assert relative_error(result, expected) < BFLOAT16_TOLERANCE
    grads = torch.autograd.grad(result, [qkv, *weights], grad_output)
    expected_grads = torch.autograd.grad(expected, [qkv, *weights], grad_output.float())
    assert relative_error(grads[0], expected_grads[0]) < BFLOAT16_TOLERANCE
    assert all(
        relative_error(grad, expected_grad) < max(TOLERANCE, 1e-5)
        for grad, expected_grad in zip(grads[1:], expected_grads[1:], strict=True)
    )


@ALL_VARIANTS
def test_heads_are_normalised_and_rotated(grid, prefix, width, norm, rotation_kind: str, monkeypatch) -> None:
    from vitascope.kernels import qk_norm_rope as kernel

    monkeypatch.setattr(
        kernel, "TOKENS_PER_PROGRAM", 16
    )  # so that there are several programs, and the last is not full
    qkv, weights, table, heads = draw_inputs(grid, prefix, width, norm, rotation_kind)
    result = kernel.qk_norm_rope(qkv, *(weights or [None, None]), table, heads, 1e-6)
    expected = normalize_and_rotate_in_pytorch(qkv, weights, table, heads)
    grad_output = [torch.randn_like(part).bfloat16() for part in result]
    for grads, expected_grads in zip(result, expected, strict=True):
        assert relative_error(grads.transpose(1, 2), expected_grads) < BFLOAT16_TOLERANCE
    grads = torch.autograd.grad(result, [qkv, *weights], grad_output)
    expected_grads = torch.autograd.grad(
        expected, [qkv, *weights], [part.transpose(1, 2).float() for part in grad_output]
    )
    assert relative_error(grads[0], expected_grads[0]) < BFLOAT16_TOLERANCE
    assert all(
        relative_error(grad, expected_grad) < max(TOLERANCE, 1e-5)
        for grad, expected_grad in zip(grads[1:], expected_grads[1:], strict=True)
    )


def test_tokens_attend_only_within_their_image() -> None:
    from vitascope.kernels.short_attention import short_attention

    qkv = torch.randn(3, 9, 96, device=DEVICE).bfloat16()
    together = short_attention(qkv, None, None, None, 1, 0.0)
    qkv[1] = 0
    assert torch.equal(short_attention(qkv, None, None, None, 1, 0.0)[[0, 2]], together[[0, 2]])


@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "bias"), [(7, 64, 128, True), (150, 128, 256, True), (9, 64, 256, False)]
)
def test_the_fused_mlp_is_the_mlp(tokens, width, hidden, bias) -> None:
    mlp = Mlp(embed_dim=width, hidden_width=hidden, activation="relu2", bias=bias, drop_rate=0.0).to(DEVICE)
    tokens_in = torch.randn(2, tokens, width, device=DEVICE, requires_grad=True)
    results = {}
    for kernel in Mlp.KERNELS:
        mlp.kernel = kernel
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            out = mlp(tokens_in)
            with torch.no_grad():
                results[kernel, "only forward"] = mlp(tokens_in)
        results[kernel] = out, *torch.autograd.grad(out.float().square().sum(), [tokens_in, *mlp.parameters()])
    for result, expected in zip(results["fused"], results["default"], strict=True):
        assert relative_error(result, expected) < 2 * TOLERANCE
    assert relative_error(results["fused", "only forward"], results["default"][0]) < TOLERANCE


def test_the_fused_mlp_is_used(monkeypatch) -> None:
    from vitascope.kernels import relu2_mlp

    called = []
    monkeypatch.setattr(relu2_mlp, "relu2_mlp", lambda tokens, *_: called.append(tokens.shape) or tokens)
    mlp = Mlp(embed_dim=64, hidden_width=128, activation="relu2", bias=True, drop_rate=0.5).to(DEVICE, PLAIN)
    mlp.kernel = "fused"
    tokens = torch.randn(1, 2, 64, device=DEVICE, dtype=PLAIN)
    mlp.train()(tokens)
    assert not called  # the kernel has no dropout
    mlp.eval()(tokens)
    assert called == [(1, 2, 64)]


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("shape", [(2, 37, 96), (5, 64), (3, 1, 300)])
def test_the_fused_norm_is_the_norm(kind, shape, monkeypatch) -> None:
    from vitascope.kernels import norm as kernel

    monkeypatch.setattr(kernel, "MAX_PROGRAMS", 2)  # so that one program processes many rows
    norm = kind(shape[-1], eps=1e-6).to(DEVICE)
    for weight in norm.parameters():
        torch.nn.init.uniform_(weight, 0.5, 1.5)
    tokens_in = (3 * torch.randn(shape, device=DEVICE) + 1).requires_grad_()
    grad_output = torch.randn(shape, device=DEVICE)
    results = []
    for norm.kernel in ("default", "fused"):
        out = norm(tokens_in)
        results.append((out, *torch.autograd.grad(out, [tokens_in, *norm.parameters()], grad_output)))
    for expected, result in zip(*results, strict=True):
        assert relative_error(result, expected) < 1e-5


def run_in_float32(real):
    return lambda *parts, **more: real(*(x if x is None else x.float() for x in parts), **more).bfloat16()


@pytest.mark.parametrize("shape", [(0, 2, 32), (3, 5), (256, 16), (257, 7), (700, 2, 20)])
def test_partial_gradients_are_summed(shape) -> None:
    """Up to float32 rounding; more than 256 parts are summed in two passes."""
    from vitascope.kernels.norm import sum_partial_gradients

    parts = torch.randn(shape, device=DEVICE)
    expected = parts.double().sum(0)
    assert ((sum_partial_gradients(parts) - expected).abs() <= 2e-7 * parts.double().abs().sum(0)).all()


class Bfloat16Linear(torch.nn.Linear):
    """A projection computed in float32 and returned as bfloat16, as on a GPU."""

    def forward(self, tokens):
        return super().forward(tokens.float()).bfloat16()


@pytest.mark.parametrize("side", [4, 12])  # 16 tokens: short_attention; 144: qk_norm_rope
@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention_is_the_same_with_and_without_the_kernel(qk_norm, side, unchecked_shapes, monkeypatch) -> None:
    from vitascope.kernels import qk_norm_rope, short_attention

    used = []
    for kernel in (qk_norm_rope, short_attention):
        name = kernel.__name__.rsplit(".", 1)[-1]
        real = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *args, name=name, real=real: used.append(name) or real(*args))
    attention = SelfAttention(64, 2, qk_norm=qk_norm, norm="rmsnorm", output_projection=False).to(DEVICE)
    exact = attention.qkv
    attention.qkv = Bfloat16Linear(64, 192).to(DEVICE)
    attention.qkv.load_state_dict(exact.state_dict())
    tokens, table = torch.randn(2, side**2, 64, device=DEVICE), make_rotary_table((side, side), 32, 100.0).to(DEVICE)
    attention.kernel = "own"
    if DEVICE == "cpu" and side == 12:  # PyTorch's attention in bfloat16 would end the process on some CPUs
        monkeypatch.setattr(F, "scaled_dot_product_attention", run_in_float32(F.scaled_dot_product_attention))
    result = attention(tokens, rotation=table)
    assert result.dtype == torch.bfloat16 and used == ["short_attention" if side == 4 else "qk_norm_rope"]
    attention.qkv = exact
    assert (
        relative_error(result, attention(tokens, rotation=table)) < 2 * BFLOAT16_TOLERANCE
    )  # float32: without the kernel


def test_unsupported_inputs_use_pytorch() -> None:
    supported = torch.zeros(1, 64, 96, dtype=torch.bfloat16, device=DEVICE)
    assert kernels.can_use_attention_kernels(supported, 32)
    assert not kernels.can_use_attention_kernels(supported.float(), 32)
    assert not kernels.can_use_attention_kernels(supported, 16)
    assert kernels.fits_short_attention(supported) and not kernels.fits_short_attention(supported.repeat(1, 3, 1))
    masked = SelfAttention(64, 2)
    masked.kernel = "own"
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    tokens = torch.randn(1, 5, 64)
    assert torch.allclose(masked(tokens, mask), masked.mix(masked.maps(tokens, mask), tokens), atol=1e-5)


@pytest.mark.parametrize("kernel", SelfAttention.KERNELS)
def test_every_named_kernel_attends(kernel) -> None:
    attention = SelfAttention(64, 2).to(DEVICE).eval()
    tokens = torch.randn(2, 10, 64, device=DEVICE)
    expected = attention(tokens)
    attention.kernel = kernel
    assert relative_error(attention(tokens), expected) < 1e-5
