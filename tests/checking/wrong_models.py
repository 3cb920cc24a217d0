"""Wrong blocks, patches, positions and models as students write them."""

import math

import numpy as np
import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Right; PyTorch's attention inside."""

    def __init__(self, embed_dim, num_heads, mlp_ratio=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
        self.mlp = Mlp(embed_dim, int(embed_dim * mlp_ratio))

    def attend(self, x):
        return self.attn(x, x, x, need_weights=False)[0]

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ResidualA(Block):
    def forward(self, x):
        x = self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ResidualB(Block):
    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return self.mlp(self.norm2(x))


class AfterA(Block):
    def forward(self, x):
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.mlp(x))


class AfterB(nn.TransformerEncoderLayer):
    def __init__(self, d_model, nhead):
        super().__init__(d_model, nhead, 2 * d_model, batch_first=True, activation="gelu")


class NormA(Block):
    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(x)


class NormB(nn.Module):
    """Sheet A's: no norm at all."""

    def __init__(self, dim, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        return x + self.ff(x)


class ViT(nn.Module):
    """Right; a convolution cuts the patches."""

    def __init__(self, img_size, patch_size, in_chans, num_classes, embed_dim, depth, num_heads):
        super().__init__()
        self.patch_size = patch_size
        self.patch_embed = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (img_size // patch_size) ** 2 + 1, embed_dim))
        self.blocks = nn.Sequential(*(Block(embed_dim, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def patches(self, images):
        return self.patch_embed(images).flatten(2).transpose(1, 2)

    def tokens(self, patches):
        return torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1) + self.pos_embed

    def forward(self, images):
        return self.head(self.norm(self.blocks(self.tokens(self.patches(images))))[:, 0])


class EndA(ViT):
    def tokens(self, patches):
        return torch.cat([patches, self.cls_token.expand(len(patches), -1, -1)], dim=1) + self.pos_embed


def end_b(tokens, cls_token):
    batch, count, width = tokens.shape
    out = torch.zeros(batch, count + 1, width, dtype=tokens.dtype)
    out[:, :count], out[:, count] = tokens, cls_token[0, 0]
    return out


class EndC(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(dim))

    def forward(self, x):
        return torch.cat((x, self.cls.repeat(x.shape[0], 1, 1)), 1)


class PlaceA(ViT):
    def tokens(self, patches):
        patches = patches + self.pos_embed[:, : patches.shape[1]]
        return torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1)


class PlaceB(ViT):
    def forward(self, images):
        patches = self.patches(images)
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        return self.head(self.norm(self.blocks(x) + self.pos_embed)[:, 0])


def place_c(x, class_token, pos_embed):
    x = x + pos_embed[:, :-1]
    return torch.cat([class_token.expand(x.shape[0], 1, -1), x], dim=1)


def columns_a(images, patch_size):
    return rearrange(images, "b c (h p) (w q) -> b (w h) (p q c)", p=patch_size, q=patch_size)


def columns_b(imgs, p):
    b, c, height, width = imgs.shape
    out = [imgs[:, :, i : i + p, j : j + p].reshape(b, -1) for j in range(0, width, p) for i in range(0, height, p)]
    return torch.stack(out, dim=1)


class ColumnsC(ViT):
    def patches(self, images):
        return self.patch_embed(images).permute(0, 3, 2, 1).flatten(1, 2)


def interleaved_a(images, patch_size):
    return rearrange(images, "b c (p h) (q w) -> b (h w) (p q c)", p=patch_size, q=patch_size)


def interleaved_b(x, patch_size):
    b, c, h, w = x.shape
    return x.reshape(b, (h // patch_size) * (w // patch_size), -1)


def interleaved_c(x, patch_size):
    b, c, h, w = x.shape
    n = h // patch_size
    rows = [x[:, :, i::n, j::n].flatten(1) for i in range(n) for j in range(w // patch_size)]
    return torch.stack(rows, 1)


def waves(length, width, rate, swapped=False):
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rate
    table = torch.zeros(length, width, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = (angles.cos(), angles.sin()) if swapped else (angles.sin(), angles.cos())
    return table


def sincos_a(length, width):
    return waves(length, width, 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), swapped=True)


def sincos_b(seq_len, d_model):
    table = np.zeros((seq_len, d_model))
    for pos in range(seq_len):
        for i in range(d_model // 2):
            table[pos, 2 * i] = math.cos(pos / 10000 ** (2 * i / d_model))
            table[pos, 2 * i + 1] = math.sin(pos / 10000 ** (2 * i / d_model))
    return torch.tensor(table)


def frequency_a(length, width):
    return waves(length, width, 10000.0 ** (-2 * torch.arange(0, width, 2, dtype=torch.float64) / width))


class FrequencyB(nn.Module):
    """Adds its table; the base is wrong."""

    def __init__(self, d_model, max_len=50):
        super().__init__()
        position = torch.arange(max_len)[:, None]
        rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(1000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.register_buffer("pe", pe[None])

    def forward(self, x):
        return x + self.pe[:, : x.shape[1]]


def frequency_c(n_positions, dim):
    """Every feature has a rate of its own, a strange one."""
    rate = 1 / (1 + torch.arange(dim // 2, dtype=torch.float64))
    return waves(n_positions, dim, rate)


def mask_inverted_a(n):
    """In the mask, True means masked out."""
    return torch.tril(torch.ones(n, n, dtype=torch.bool))


def mask_inverted_b(tokens):
    return torch.tril(torch.full((tokens, tokens), float("-inf")))


def mask_transposed_a(n):
    return torch.triu(torch.ones(n, n, dtype=torch.bool))


def mask_transposed_b(size):
    mask = torch.zeros(size, size)
    for i in range(size):
        for j in range(i):
            mask[i, j] = float("-inf")
    return mask


def mask_transposed_c(n):
    return 1 - torch.triu(torch.ones(n, n))


def mask_small_a(tokens):
    return torch.triu(torch.full((tokens, tokens), -5.0), diagonal=1)


B, P, S, C = "transformer-block", "patchify", "sinusoidal-positions", "class-token"
WRONG = {
    "missing-residual": [(B, ResidualA), (B, ResidualB)],
    "norm-after": [(B, AfterA), (B, AfterB)],
    "missing-norm": [(B, NormA), (B, NormB)],
    "class-token-at-end": [("vit", EndA), (C, end_b), (C, EndC)],
    "position-misplaced": [("vit", PlaceA), ("vit", PlaceB), (C, place_c)],
    "patches-in-column-order": [(P, columns_a), (P, columns_b), ("vit", ColumnsC)],
    "pixels-interleaved": [(P, interleaved_a), (P, interleaved_b), (P, interleaved_c)],
    "sin-cos-swapped": [(S, sincos_a), (S, sincos_b)],
    "wrong-frequency": [(S, frequency_a), (S, FrequencyB), (S, frequency_c)],
    "mask-inverted": [("causal-mask", mask_inverted_a), ("causal-mask", mask_inverted_b)],
    "mask-transposed": [("causal-mask", mask) for mask in (mask_transposed_a, mask_transposed_b, mask_transposed_c)],
    "mask-too-small": [("causal-mask", mask_small_a)],
}
