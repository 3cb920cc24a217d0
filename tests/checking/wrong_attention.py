"""Wrong attentions as students write them: at least two differently written variants of every mistake."""

import math

import torch
from einops import rearrange
from torch import einsum, nn
from torch.nn import functional as F


# missing-scale
def scale_a(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    return scores.softmax(dim=-1) @ v


def scale_b(queries, keys, values):
    weights = F.softmax(einsum("bqd,bkd->bqk", queries, keys), dim=2)
    return einsum("bqk,bkd->bqd", weights, values)


class Parted(nn.Module):
    """Three layers, one out; the steps are methods that a variant replaces."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.h = num_heads
        self.to_q = nn.Linear(embed_dim, embed_dim)
        self.to_k = nn.Linear(embed_dim, embed_dim)
        self.to_v = nn.Linear(embed_dim, embed_dim)
        self.to_out = nn.Linear(embed_dim, embed_dim)

    def project(self, x):
        return self.to_q(x), self.to_k(x), self.to_v(x)

    def split(self, x):
        b, t, e = x.shape
        return x.view(b, t, self.h, e // self.h).transpose(1, 2)

    def maps(self, q, k):
        return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)

    def join(self, x):
        return x.transpose(1, 2).flatten(2)

    def forward(self, x):
        q, k, v = (self.split(part) for part in self.project(x))
        return self.to_out(self.join(self.maps(q, k) @ v))


class Packed(nn.Module):
    """One layer for all three, einops."""

    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        return self.proj(rearrange(self.mix(q, k, v), "b h t d -> b t (h d)"))

    def mix(self, q, k, v):
        scores = einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        return einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


class ScaleC(Packed):
    def mix(self, q, k, v):
        return einsum("bhqk,bhkd->bhqd", einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


# scale-by-width
class WidthA(Parted):
    def maps(self, q, k):
        return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1] * self.h), dim=-1)


def width_b(x, w_q, w_k, w_v, w_o, n_heads):
    B, T, C = x.shape
    q, k, v = (F.linear(x, w).view(B, T, n_heads, C // n_heads).transpose(1, 2) for w in (w_q, w_k, w_v))
    att = (q @ k.mT) * C**-0.5
    return F.linear((att.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C), w_o)


# scale-not-sqrt
def notsqrt_a(query, key, value, attn_mask=None):
    scores = torch.matmul(query, key.transpose(1, 2)) / query.size(-1)
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)


class NotSqrtB(Packed):
    def mix(self, q, k, v):
        return (q @ k.transpose(-1, -2) / q.shape[-1]).softmax(-1) @ v


# softmax-over-queries
def overqueries_a(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=1) @ v


class OverQueriesB(Packed):
    def mix(self, q, k, v):
        e = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).exp()
        return e / e.sum(dim=2, keepdim=True) @ v


# softmax-over-heads
class OverHeadsA(Parted):
    def maps(self, q, k):
        return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=1)


def overheads_b(q, k, v):
    b, h, t, d = q.shape
    return (einsum("bhid,bhjd->bhij", q, k) / math.sqrt(d)).softmax(dim=1) @ v


# feature-attention
def features_a(q, k, v):
    weights = torch.softmax(q.transpose(-2, -1) @ k / math.sqrt(q.size(-1)), dim=-1)
    return (weights @ v.transpose(-2, -1)).transpose(-2, -1)


class FeaturesB(Parted):
    def forward(self, x):
        q, k, v = (self.split(part) for part in self.project(x))
        weights = F.softmax(einsum("bhtd,bhte->bhde", q, k) / q.shape[-1] ** 0.5, dim=-1)
        return self.to_out(self.join(einsum("bhde,bhte->bhtd", weights, v)))


# weight-not-transposed
class UntransposedA(Parted):
    def project(self, x):
        return tuple(x @ layer.weight + layer.bias for layer in (self.to_q, self.to_k, self.to_v))


def untransposed_b(x, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias, num_heads):
    b, t, e = x.shape
    q, k, v = F.linear(x, in_proj_weight, in_proj_bias).view(b, t, 3, num_heads, e // num_heads).permute(2, 0, 3, 1, 4)
    maps = torch.softmax(q @ k.transpose(-2, -1) / (e // num_heads) ** 0.5, -1)
    return (maps @ v).transpose(1, 2).reshape(b, t, e) @ out_proj_weight + out_proj_bias


def untransposed_c(x, w_q, w_k, w_v, w_o, num_heads):
    b, t, e = x.shape
    q, k, v = x @ w_q.T, x @ w_k, x @ w_v.T
    q, k, v = (part.view(b, t, num_heads, -1).transpose(1, 2) for part in (q, k, v))
    maps = torch.softmax(q @ k.transpose(-2, -1) / (e // num_heads) ** 0.5, -1)
    return (maps @ v).transpose(1, 2).reshape(b, t, e) @ w_o.T


# heads-not-transposed
class LeftA(Parted):
    def split(self, x):
        b, t, e = x.shape
        return x.view(b, t, self.h, e // self.h)

    def join(self, x):
        return x.flatten(2)


class LeftB(Parted):
    def split(self, x):
        b, t, e = x.shape
        return x.reshape(b, self.h, t, e // self.h)


class LeftC(Packed):
    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (part.reshape(b, self.heads, t, e // self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        return self.proj(self.mix(q, k, v).reshape(b, t, e))


# heads-joined-wrongly
class JoinA(Parted):
    def join(self, x):
        b, h, t, d = x.shape
        return x.reshape(b, t, h * d)


def join_b(x, wq, wk, wv, wo, heads):
    """Weights: input × output."""
    q, k, v = (rearrange(x @ w, "b t (h d) -> b h t d", h=heads) for w in (wq, wk, wv))
    maps = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return rearrange(maps @ v, "b h t d -> b t (d h)") @ wo


# missing-output-projection
class NoOutA(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (f(x).view(B, T, self.n_head, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        return ((q @ k.mT / math.sqrt(C // self.n_head)).softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)


class NoOutB(Packed):
    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        return rearrange(self.mix(q, k, v), "b h t d -> b t (h d)")


# mask-inverted
def inverted_a(q, k, v, mask):
    """Attention. In the mask, True means that the query may look at the key."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(mask, -1e9).softmax(-1) @ v


def inverted_b(q, k, v, blocked=None):
    s = einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    if blocked is not None:
        s = torch.where(blocked, s, torch.tensor(float("-inf"), dtype=s.dtype))
    return s.softmax(-1) @ v


# mask-transposed
class TransposedA(Parted):
    """Causal self-attention."""

    def maps(self, q, k):
        t = q.shape[2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return scores.masked_fill(torch.tril(torch.ones(t, t), diagonal=-1) == 1, float("-inf")).softmax(-1)


def transposed_b(q, k, v, mask):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask.transpose(-2, -1), float("-inf")).softmax(-1) @ v


# mask-after-softmax
def after_a(q, k, v, mask=None):
    weights = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
    return (weights if mask is None else weights.masked_fill(mask == 0, 0.0)) @ v


class AfterB(Parted):
    def forward(self, x, mask=None):
        q, k, v = (self.split(part) for part in self.project(x))
        weights = self.maps(q, k)
        if mask is not None:
            weights = weights * mask
        return self.to_out(self.join(weights @ v))


# mask-too-small
def small_a(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -10.0)
    return scores.softmax(-1) @ v


def small_b(q, k, v, mask=None):
    scores = einsum("bqd,bkd->bqk", q, k) / math.sqrt(q.shape[2])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, 1e-9)
    return F.softmax(scores, dim=-1).bmm(v)


class SmallC(Parted):
    def forward(self, x, mask=None):
        q, k, v = (self.split(part) for part in self.project(x))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + (1 - mask.to(x.dtype)) * -100
        return self.to_out(self.join(scores.softmax(-1) @ v))


# dropout-in-eval
class DropA(Packed):
    def mix(self, q, k, v):
        return F.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), 0.2) @ v


class DropB(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.first, self.second = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x):
        hidden = F.gelu(self.first(x))
        keep = (torch.rand_like(hidden) > 0.3).to(hidden.dtype)
        return self.second(hidden * keep / 0.7)


def drop_c(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


# query-key-swapped
def swapped_a(q, k, v):
    return torch.softmax(k @ q.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


class SwappedB(Parted):
    def project(self, x):
        return self.to_k(x), self.to_q(x), self.to_v(x)


# wrong-in-proj-slice
class SliceA(Packed):
    def forward(self, x):
        e = x.shape[-1]
        packed = self.qkv(x)
        q, k, v = packed[..., :e], packed[..., e : 2 * e], packed[..., e : 2 * e]
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", h=self.heads) for part in (q, k, v))
        return self.proj(rearrange(self.mix(q, k, v), "b h t d -> b t (h d)"))


def slice_b(x, in_proj_weight, out_proj_weight, num_heads):
    b, t, e = x.shape
    q, k, v = (x @ in_proj_weight[start::3].T for start in range(3))
    q, k, v = (part.view(b, t, num_heads, -1).transpose(1, 2) for part in (q, k, v))
    maps = torch.softmax(q @ k.transpose(-2, -1) / (e // num_heads) ** 0.5, -1)
    return (maps @ v).transpose(1, 2).reshape(b, t, e) @ out_proj_weight.T


def slice_c(x, in_proj_weight, out_proj_weight, num_heads):
    """Sheet C's: single rows."""
    b, t, e = x.shape
    q, k, v = (x @ in_proj_weight[0], x @ in_proj_weight[1], x @ in_proj_weight[2])
    q, k, v = (part.view(b, t, num_heads, -1).transpose(1, 2) for part in (q, k, v))
    return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).reshape(b, t, e) @ out_proj_weight.T


M = "multi-head-attention"
WRONG = {
    "missing-scale": [("attention", scale_a), ("attention", scale_b), (M, ScaleC)],
    "scale-by-width": [(M, WidthA), (M, width_b)],
    "scale-not-sqrt": [("attention", notsqrt_a), (M, NotSqrtB)],
    "softmax-over-queries": [("attention", overqueries_a), (M, OverQueriesB)],
    "softmax-over-heads": [(M, OverHeadsA), ("attention", overheads_b)],
    "feature-attention": [("attention", features_a), (M, FeaturesB)],
    "weight-not-transposed": [(M, UntransposedA), (M, untransposed_b), (M, untransposed_c)],
    "heads-not-transposed": [(M, LeftA), (M, LeftB), (M, LeftC)],
    "heads-joined-wrongly": [(M, JoinA), (M, join_b)],
    "missing-output-projection": [(M, NoOutA), (M, NoOutB)],
    "mask-inverted": [("attention", inverted_a), ("attention", inverted_b)],
    "mask-transposed": [("attention", transposed_b), (M, TransposedA)],
    "mask-after-softmax": [("attention", after_a), (M, AfterB)],
    "mask-too-small": [("attention", small_a), ("attention", small_b), (M, SmallC)],
    "dropout-in-eval": [(M, DropA), ("feed-forward", DropB), ("attention", drop_c)],
    "query-key-swapped": [("attention", swapped_a), (M, SwappedB)],
    "wrong-in-proj-slice": [(M, SliceA), (M, slice_b), (M, slice_c)],
}
