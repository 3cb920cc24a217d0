"""Every Triton kernel against its plain-PyTorch twin, forward and backward: interpreted on a CPU, for real on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from vitascope import kernels
from vitascope.model.attention import SelfAttention
from vitascope.model.mlp import Mlp
from vitascope.model.norm import LayerNorm, RMSNorm
from vitascope.model.positions import make_rotary_table, rotate_heads

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not on this system")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # products in bfloat16 end the process on some CPUs
CLOSE = 8e-3 if DEVICE == "cuda" else 1e-6
ROUNDED = 8e-3  # bfloat16 keeps 8 bits


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The length of the difference beside the length of what was wanted."""
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def ready_plainly(qkv, weights, table, heads: int):
    """Queries, keys and values per head, in float32, written with PyTorch's parts."""
    query, key, value = qkv.float().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if weights:
        query, key = (F.rms_norm(x, x.shape[-1:], w, 1e-6) for x, w in zip((query, key), weights, strict=True))
    if table is not None:
        query, key = rotate_heads(query, table), rotate_heads(key, table)
    return query, key, value


def attend_plainly(qkv, weights, table, heads: int):
    return F.scaled_dot_product_attention(*ready_plainly(qkv, weights, table, heads)).transpose(1, 2).flatten(2)


EVERY_KIND = pytest.mark.parametrize(
    ("grid", "prefix", "width", "norm", "turned"),
    [
        ((4, 4), 0, 32, True, "alike"),
        ((3, 4), 0, 32, False, "alike"),  # 12 tokens in a tile of 16
        ((3, 4), 0, 32, True, "each its own way"),
        ((4, 4), 1, 64, True, ""),  # 17 tokens in a tile of 32
        ((3, 3), 0, 32, False, ""),
        ((8, 8), 1, 32, True, "alike"),  # 65 tokens in a tile of 128
    ],
)


def drawn(grid, prefix, width, norm, turned):
    """Two images' packed projections for two heads, weights of the norms, a rotation table."""
    heads, tokens = 2, grid[0] * grid[1] + prefix
    qkv = torch.randn(2, tokens, 3 * heads * width, device=DEVICE).bfloat16().requires_grad_()
    weights = [(torch.rand(width, device=DEVICE) + 0.5).requires_grad_() for _ in range(2)] if norm else []
    table = make_rotary_table(grid, width, 100.0, prefix).to(DEVICE) if turned else None
    if turned == "each its own way":  # as of images whose patches are not the same ones
        table = torch.stack([table, table[:, torch.randperm(tokens)]], dim=1)[:, :, None]
    return qkv, weights, table, heads


@EVERY_KIND
def test_short_attention_is_attention(grid, prefix, width, norm, turned: str) -> None:
    from vitascope.kernels.short_attention import short_attention

    qkv, weights, table, heads = drawn(grid, prefix, width, norm, turned)
    found = short_attention(qkv, *(weights or [None, None]), table, heads, 1e-6)
    wanted = attend_plainly(qkv, weights, table, heads)
    above = torch.randn_like(wanted).bfloat16()
    assert apart(found, wanted) < ROUNDED
    ours = torch.autograd.grad(found, [qkv, *weights], above)
    theirs = torch.autograd.grad(wanted, [qkv, *weights], above.float())
    assert apart(ours[0], theirs[0]) < ROUNDED
    assert all(apart(our, their) < max(CLOSE, 1e-5) for our, their in zip(ours[1:], theirs[1:], strict=True))


@EVERY_KIND
def test_ready_heads_are_normalised_and_turned(grid, prefix, width, norm, turned: str, monkeypatch) -> None:
    from vitascope.kernels import qk_norm_rope as kernel

    monkeypatch.setattr(
        kernel, "TOKENS_PER_PROGRAM", 16
    )  # so that there are several programs, and the last is not full
    qkv, weights, table, heads = drawn(grid, prefix, width, norm, turned)
    found = kernel.qk_norm_rope(qkv, *(weights or [None, None]), table, heads, 1e-6)
    wanted = ready_plainly(qkv, weights, table, heads)
    above = [torch.randn_like(part).bfloat16() for part in found]
    for ours, theirs in zip(found, wanted, strict=True):
        assert apart(ours.transpose(1, 2), theirs) < ROUNDED
    ours = torch.autograd.grad(found, [qkv, *weights], above)
    theirs = torch.autograd.grad(wanted, [qkv, *weights], [part.transpose(1, 2).float() for part in above])
    assert apart(ours[0], theirs[0]) < ROUNDED
    assert all(apart(our, their) < max(CLOSE, 1e-5) for our, their in zip(ours[1:], theirs[1:], strict=True))


def test_an_image_s_tokens_gather_from_no_other_image() -> None:
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
    here = torch.randn(2, tokens, width, device=DEVICE, requires_grad=True)
    answers = {}
    for kernel in Mlp.KERNELS:
        mlp.kernel = kernel
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            out = mlp(here)
            with torch.no_grad():
                answers[kernel, "only forward"] = mlp(here)
        answers[kernel] = out, *torch.autograd.grad(out.float().square().sum(), [here, *mlp.parameters()])
    for found, wanted in zip(answers["fused"], answers["default"], strict=True):
        assert apart(found, wanted) < 2 * CLOSE
    assert apart(answers["fused", "only forward"], answers["default"][0]) < CLOSE


def test_the_fused_mlp_is_used(monkeypatch) -> None:
    from vitascope.kernels import relu2_mlp

    called = []
    monkeypatch.setattr(relu2_mlp, "relu2_mlp", lambda tokens, *_: called.append(tokens.shape) or tokens)
    mlp = Mlp(embed_dim=64, hidden_width=128, activation="relu2", bias=True, drop_rate=0.5).to(DEVICE, PLAIN)
    mlp.kernel = "fused"
    tokens = torch.randn(1, 2, 64, device=DEVICE, dtype=PLAIN)
    mlp.train()(tokens)
    assert not called  # it knows no dropout
    mlp.eval()(tokens)
    assert called == [(1, 2, 64)]


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("shape", [(2, 37, 96), (5, 64), (3, 1, 300)])
def test_the_fused_norm_is_the_norm(kind, shape, monkeypatch) -> None:
    from vitascope.kernels import norm as kernel

    monkeypatch.setattr(kernel, "MAX_PROGRAMS", 2)  # so that one goes through many rows
    norm = kind(shape[-1], eps=1e-6).to(DEVICE)
    for weight in norm.parameters():
        torch.nn.init.uniform_(weight, 0.5, 1.5)
    here = (3 * torch.randn(shape, device=DEVICE) + 1).requires_grad_()
    above = torch.randn(shape, device=DEVICE)
    answers = []
    for norm.kernel in ("default", "fused"):
        out = norm(here)
        answers.append((out, *torch.autograd.grad(out, [here, *norm.parameters()], above)))
    for wanted, found in zip(*answers, strict=True):
        assert apart(found, wanted) < 1e-5


def in_float32(real):
    return lambda *parts, **more: real(*(x if x is None else x.float() for x in parts), **more).bfloat16()


@pytest.mark.parametrize("shape", [(0, 2, 32), (3, 5), (256, 16), (257, 7), (700, 2, 20)])
def test_shares_are_summed(shape) -> None:
    """To float32's rounding, which grows with what is summed; more than 256 in two rounds."""
    from vitascope.kernels.reduce import sum_partial_gradients

    shares = torch.randn(shape, device=DEVICE)
    wanted = shares.double().sum(0)
    assert ((sum_partial_gradients(shares) - wanted).abs() <= 2e-7 * shares.double().abs().sum(0)).all()


class Rounded(torch.nn.Linear):
    """A projection whose products are made in float32 and given out as bfloat16, as a GPU's would be."""

    def forward(self, tokens):
        return super().forward(tokens.float()).bfloat16()


@pytest.mark.parametrize("side", [4, 12])  # 16 tokens: all in one kernel; 144: the heads made ready
@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_module_attends_the_same_with_and_without_the_kernel(qk_norm, side, unchecked_shapes, monkeypatch) -> None:
    from vitascope.kernels import qk_norm_rope, short_attention

    used = []
    for kernel in (qk_norm_rope, short_attention):
        name = kernel.__name__.rsplit(".", 1)[-1]
        real = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *given, name=name, real=real: used.append(name) or real(*given))
    attention = SelfAttention(64, 2, qk_norm=qk_norm, norm="rmsnorm", output_projection=False).to(DEVICE)
    exact = attention.qkv
    attention.qkv = Rounded(64, 192).to(DEVICE)
    attention.qkv.load_state_dict(exact.state_dict())
    tokens, table = torch.randn(2, side**2, 64, device=DEVICE), make_rotary_table((side, side), 32, 100.0).to(DEVICE)
    attention.kernel = "own"
    if DEVICE == "cpu" and side == 12:  # PyTorch's attention in bfloat16 would end the process on some CPUs
        monkeypatch.setattr(F, "scaled_dot_product_attention", in_float32(F.scaled_dot_product_attention))
    found = attention(tokens, rotation=table)
    assert found.dtype == torch.bfloat16 and used == ["short_attention" if side == 4 else "qk_norm_rope"]
    attention.qkv = exact
    assert apart(found, attention(tokens, rotation=table)) < 2 * ROUNDED  # float32: not the kernel's, so the plain way


def test_what_does_not_fit_goes_the_plain_way() -> None:
    fitting = torch.zeros(1, 64, 96, dtype=torch.bfloat16, device=DEVICE)
    assert kernels.can_fuse_attention(fitting, 32)
    assert not kernels.can_fuse_attention(fitting.float(), 32)
    assert not kernels.can_fuse_attention(fitting, 16)
    assert kernels.can_use_short_attention(fitting) and not kernels.can_use_short_attention(fitting.repeat(1, 3, 1))
    masked = SelfAttention(64, 2)
    masked.kernel = "own"
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    tokens = torch.randn(1, 5, 64)
    assert torch.allclose(masked(tokens, mask), masked.mix(masked.maps(tokens, mask), tokens), atol=1e-5)


@pytest.mark.parametrize("kernel", SelfAttention.KERNELS)
def test_every_named_kernel_attends(kernel) -> None:
    attention = SelfAttention(64, 2).to(DEVICE).eval()
    tokens = torch.randn(2, 10, 64, device=DEVICE)
    wanted = attention(tokens)
    attention.kernel = kernel
    assert apart(attention(tokens), wanted) < 1e-5
