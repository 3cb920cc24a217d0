"""Write correct solutions at random, as students write them: in several styles, names, argument orders and sizes."""

from random import Random
from textwrap import indent
from typing import NamedTuple

HEADER = "import math\n\nimport numpy as np\nimport torch\nfrom einops import rearrange, einsum as einops_einsum\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"
STYLES = ("einsum", "loops", "linear", "raw", "einops")


def write_attention(r: Random, style: str | None = None) -> tuple[str, str]:
    """Write f(q, k, v[, mask]) with arguments in any order and with any names."""
    style = style or r.choice(STYLES)
    q, k, v = r.choice([("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"), ("Q", "K", "V")])
    name = r.choice(["attention", "scaled_dot_product_attention", "attend", "my_attention", "dot_product_attention"])
    masked = r.random() < 0.6
    order = r.sample([q, k, v], 3) + ([r.choice(["mask=None", "attn_mask=None"])] if masked else [])
    mask = order[-1].split("=")[0]
    low = r.choice(['float("-inf")', "-1e9", "-1e4", "torch.finfo(scores.dtype).min"])
    apply = r.choice(
        [
            f"scores.masked_fill({mask} == 0, {low})",
            *([f"scores.masked_fill({mask}, {low})"] if mask == "attn_mask" else []),  # as nn.MultiheadAttention's
            f"scores.masked_fill({mask}.logical_not(), {low})",
            f"scores + {mask}",
            f"torch.where({mask}, scores, {low})",
        ]
    )
    scores = {
        "einsum": f"torch.einsum('bqd,bkd->bqk', {q}, {k}) / {q}.shape[-1] ** 0.5",
        "loops": f"torch.stack([torch.stack([({q}[:, i] * {k}[:, j]).sum(-1) for j in range({k}.shape[1])], -1) for i in range({q}.shape[1])], 1) / math.sqrt({q}.size(-1))",
        "linear": f"torch.bmm({q}, {k}.transpose(1, 2)) * {k}.size(2) ** -0.5",
        "raw": f"({q} / math.sqrt({q}.shape[-1])) @ {k}.transpose(-2, -1)",
        "einops": f"einops_einsum({q}, {k}, 'b q d, b k d -> b q k') / np.sqrt({q}.shape[-1])",
    }[style]
    soft = r.choice(["torch.softmax(scores, dim=-1)", "F.softmax(scores, -1)", "scores.softmax(2)", "by_hand(scores)"])
    out = r.choice([f"weights @ {v}", f"torch.einsum('bqk,bkd->bqd', weights, {v})", f"torch.matmul(weights, {v})"])
    body = [f"scores = {scores}"]
    if masked:
        body += [f"if {mask} is not None:", f"    scores = {apply}"]
    body += [f"weights = {soft}", f"return {r.choice([out, f'{out}, weights'])}"]
    hand = "def by_hand(x):\n    e = (x - x.max(-1, keepdim=True).values).exp()\n    return e / e.sum(-1, keepdim=True)\n\n\n"
    return hand + f"def {name}({', '.join(order)}):\n" + indent("\n".join(body), "    "), name


def write_attention_steps(r: Random, scale: str = "d ** -0.5") -> str:
    """Write the steps from q, k, v of shape batch × token × width to `out`; uses the variables b, t, e, h, d."""
    split = r.choice(
        [
            "q, k, v = (z.view(b, t, h, d).transpose(1, 2) for z in (q, k, v))",
            "q, k, v = (rearrange(z, 'b t (h d) -> b h t d', h=h) for z in (q, k, v))",
            "q, k, v = (torch.stack(z.chunk(h, dim=-1), dim=1) for z in (q, k, v))",
            "q, k, v = (z.reshape(b, t, h, d).permute(0, 2, 1, 3) for z in (q, k, v))",
        ]
    )
    maps = r.choice(
        [
            f"w = ((q @ k.transpose(-2, -1)) * {scale}).softmax(-1)",
            f"w = torch.softmax(torch.einsum('bhqd,bhkd->bhqk', q, k) * {scale}, dim=3)",
            f"w = F.softmax((q * {scale}) @ k.mT, dim=-1)",
        ]
    )
    join = r.choice(
        [
            "out = (w @ v).transpose(1, 2).reshape(b, t, e)",
            "out = rearrange(w @ v, 'b h t d -> b t (h d)')",
            "out = torch.einsum('bhqk,bhkd->bqhd', w, v).flatten(2)",
            "out = torch.cat([w[:, i] @ v[:, i] for i in range(h)], dim=-1)",
        ]
    )
    return "\n".join([split, maps, join])


def write_multi_head_attention(r: Random, style: str | None = None, name: str | None = None) -> tuple[str, str]:
    """Write a module, or a function with raw weights."""
    style = style or r.choice(STYLES)
    if style in ("raw", "loops") and name is None and r.random() < 0.6:
        return write_multi_head_function(r)
    name = name or r.choice(["MultiHeadAttention", "MHA", "SelfAttention", "MultiHeadSelfAttention", "CustomAttention"])
    width = r.choice(["embed_dim", "d_model", "dim", "hidden_size", "emb_dim", "n_embd", "hidden_dim"])
    heads = r.choice(["num_heads", "n_heads", "heads", "nhead", "h", "n_head"])
    bias = r.choice(["", ", bias=False"])
    layers, use = _write_projections(r, style, bias)
    heads_attribute = r.choice(["self.num_heads", "self.heads", "self.h", "self.n_heads"])
    dropout = r.random() < 0.3
    arguments = r.sample([width, heads], 2) + (["dropout=0.0"] if dropout else [])
    init = [f"width, {heads_attribute} = {width}, {heads}", *layers]
    init += ["self.drop = nn.Dropout(dropout)"] if dropout else []
    body = [
        "b, t, e = x.shape",
        f"h = {heads_attribute}",
        "d = e // h",
        *use,
        write_attention_steps(r),
        "out = OUT(out)".replace("OUT", _OUT[0]),
    ]
    body += ["out = self.drop(out)"] if dropout else []
    first = r.random() < 0.2
    if first:
        body = ["x = x.transpose(0, 1)", *body, "out = out.transpose(0, 1)"]
    return _write_module(name, arguments, init, "x", [*body, r.choice(["return out", "return out, w"])]), name


_OUT = ["self.proj"]


def _write_projections(r: Random, style: str, bias: str) -> tuple[list[str], list[str]]:
    out = r.choice(["proj", "out_proj", "W_o", "to_out", "fc_out", "output", "o"])
    _OUT[0] = f"self.{out}"
    last = f"self.{out} = nn.Linear(width, width{bias})"
    q, k, v = r.choice(
        [
            ("q_proj", "k_proj", "v_proj"),
            ("W_q", "W_k", "W_v"),
            ("to_q", "to_k", "to_v"),
            ("query", "key", "value"),
            ("wq", "wk", "wv"),
            ("queries", "keys", "values"),
            ("q", "k", "v"),
        ]
    )
    if style in ("raw", "loops"):
        _OUT[0] = "lambda z: z @ self.w_out".replace("lambda z: z", "(lambda z: z") + ")"
        lines = [f"self.{n} = nn.Parameter(torch.randn(width, width))" for n in (q, k, v, "w_out")]
        return lines, [f"q, k, v = x @ self.{q}, x @ self.{k}, x @ self.{v}"]
    if style == "einops" or r.random() < 0.4:
        packed = r.choice(["qkv", "to_qkv", "qkv_proj", "c_attn", "in_proj"])
        lines = [f"self.{packed} = nn.Linear(width, 3 * width{bias})", last]
        orders = [
            "q, k, v = self.P(x).chunk(3, dim=-1)",
            "q, k, v = rearrange(self.P(x), 'b t (n e) -> n b t e', n=3)",
            "q, k, v = self.P(x).split(e, dim=2)",
            "q, k, v = self.P(x).reshape(b, t, 3, e).unbind(2)",
        ]
        if packed == "to_qkv":
            orders.append("q, k, v = rearrange(self.P(x), 'b t (h n d) -> n b t (h d)', n=3, h=h)")
        return lines, [r.choice(orders).replace("P", packed)]
    if style == "linear" and r.random() < 0.3:
        lines = [
            f"self.{n} = nn.ModuleList([nn.Linear(width, width // self_heads{bias}) for _ in range(self_heads)])"
            for n in (q, k, v)
        ]
        lines = [line.replace("self_heads", "HEADS") for line in lines]
        return [*lines, last], [
            f"q, k, v = (torch.cat([f(x) for f in fs], -1) for fs in (self.{q}, self.{k}, self.{v}))"
        ]
    lines = [f"self.{n} = nn.Linear(width, width{bias})" for n in (q, k, v)]
    return [*lines, last], [f"q, k, v = self.{q}(x), self.{k}(x), self.{v}(x)"]


def write_multi_head_function(r: Random) -> tuple[str, str]:
    name = r.choice(["multi_head_attention", "mha", "multihead_self_attention", "multi_head"])
    kind = r.choice(["w_{}", "W_{}", "w{}", "W{}"])
    q, k, v, o = (kind.format(letter) for letter in "qkvo")
    if r.random() < 0.4:
        q, k, v, o = ("in_proj_weight", "", "", "out_proj_weight")
    x, heads = r.choice(["x", "tokens", "inputs", "X"]), r.choice(["num_heads", "n_heads", "heads"])
    arguments = [x, *r.sample([name for name in (q, k, v, o) if name], 2 if not k else 4), heads]
    turn = ".T" if not k else r.choice(["", ".T"])
    use = (
        [f"q, k, v = (F.linear({x}, w) for w in {q}.chunk(3))"]
        if not k
        else [f"q, k, v = {x} @ {q}{turn}, {x} @ {k}{turn}, {x} @ {v}{turn}"]
    )
    docstring = ['"""The weights are input × output."""'] if not turn else []
    body = [
        *docstring,
        f"b, t, e = {x}.shape",
        f"h = {heads}",
        "d = e // h",
        *use,
        write_attention_steps(r),
        f"return out @ {o}{turn}",
    ]
    return f"def {name}({', '.join(arguments)}):\n" + indent("\n".join(body), "    "), name


def _write_module(name: str, arguments: list[str], init: list[str], argument: str, body: list[str]) -> str:
    lines = "\n".join(init).replace("HEADS", next((a for a in arguments if "head" in a or a in ("h",)), "1"))
    return (
        f"class {name}(nn.Module):\n    def __init__(self, {', '.join(arguments)}):\n        super().__init__()\n"
        + indent(lines, "        ")
        + f"\n\n    def forward(self, {argument}):\n"
        + indent("\n".join(body), "        ")
    )


def write_attention_2d(r: Random, style: str | None = None) -> tuple[str, str]:
    name = r.choice(["SelfAttention2d", "Attention2D", "SelfAttention2D"])
    channels, heads = (
        r.choice(["channels", "embed_dim", "in_channels", "dim"]),
        r.choice(["num_heads", "heads", "n_heads"]),
    )
    convolutional = r.random() < 0.5
    layer = "nn.Conv2d(width, {}, 1)" if convolutional else "nn.Linear(width, {})"
    init = [
        f"width, self.h = {channels}, {heads}",
        f"self.qkv = {layer.format('3 * width')}",
        f"self.proj = {layer.format('width')}",
    ]
    flat = r.choice(
        [
            "rearrange({}, 'b c i j -> b (i j) c')",
            "{}.flatten(2).transpose(1, 2)",
            "{}.permute(0, 2, 3, 1).flatten(1, 2)",
        ]
    )
    back = r.choice(
        ["rearrange({}, 'b (i j) c -> b c i j', i=height)", "{}.transpose(1, 2).reshape(b, e, height, width)"]
    )
    packed = flat.format("self.qkv(x)") if convolutional else f"self.qkv({flat.format('x')})"
    out = f"self.proj({back.format('out')})" if convolutional else back.format("self.proj(out)")
    body = [
        "b, e, height, width = x.shape",
        "t, h = height * width, self.h",
        "d = e // h",
        f"q, k, v = {packed}.chunk(3, dim=-1)",
        write_attention_steps(r),
        f"return {out}",
    ]
    return _write_module(name, [channels, heads], init, "x", body), name


def write_feed_forward(r: Random, style: str | None = None) -> tuple[str, str]:
    style = style or r.choice(STYLES)
    act = r.choice(["F.gelu", "F.relu", "F.silu"])
    if style in ("raw", "loops", "einsum"):
        name, turn = r.choice(["feed_forward", "mlp", "ffn"]), r.choice([".T", ""])
        first = f"torch.einsum('btd,dh->bth', x, w1{turn})" if style == "einsum" else f"x @ w1{turn}"
        return f"def {name}(x, w1, b1, w2, b2):\n    return {act}({first} + b1) @ w2{turn} + b2", name
    name = r.choice(["FeedForward", "MLP", "FFN", "Mlp"])
    width, hidden = r.choice(["dim", "embed_dim", "d_model"]), r.choice(["hidden_dim", "mlp_dim", "d_ff"])
    layer = r.choice(["nn.GELU()", "nn.ReLU()", "nn.GELU(approximate='tanh')"])
    init = [
        f"self.net = nn.Sequential(nn.Linear({width}, {hidden}), {layer}, nn.Dropout(dropout), nn.Linear({hidden}, {width}))"
    ]
    return _write_module(name, [width, hidden, "dropout=0.1"], init, "x", ["return self.net(x)"]), name


def write_transformer_block(r: Random, style: str | None = None, name: str | None = None) -> tuple[str, str]:
    name = name or r.choice(["TransformerBlock", "Block", "EncoderBlock", "EncoderLayer", "TransformerEncoderBlock"])
    width, heads = r.choice(["embed_dim", "d_model", "dim"]), r.choice(["num_heads", "n_heads", "heads"])
    inner, inner_name = write_multi_head_attention(r, style or r.choice(["linear", "einops", "raw"]), "InnerAttention")
    uses_inner = r.random() < 0.6 and "transpose(0, 1)" not in inner
    norms = r.choice([("norm1", "norm2"), ("ln_1", "ln_2"), ("layernorm1", "layernorm2"), ("norm_a", "norm_m")])
    signature = inner.split("__init__(self, ")[1].split(")")[0] if uses_inner else ""
    if uses_inner:
        constructor_arguments = ", ".join(width if n.split("=")[0] in ("embed_dim", "d_model", "dim", "hidden_size", "emb_dim", "n_embd", "hidden_dim") else heads
                          for n in signature.split(", ") if "=" not in n)  # fmt: skip
        attn, call = (
            f"{inner_name}({constructor_arguments})",
            "self.attn({})" + ("[0]" if "return out, w" in inner else ""),
        )
    else:
        inner, attn = "", f"nn.MultiheadAttention({width}, {heads}, batch_first=True)"
        call = "(lambda z: self.attn(z, z, z)[0])({})"
    init = [
        f"self.{norms[0]} = nn.LayerNorm({width})",
        f"self.attn = {attn}",
        f"self.{norms[1]} = nn.LayerNorm({width})",
        f"self.mlp = nn.Sequential(nn.Linear({width}, mlp_ratio * {width}), nn.GELU(), nn.Linear(mlp_ratio * {width}, {width}))",
    ]
    init = init if r.random() < 0.5 else [init[0], init[2], init[1], init[3]]
    body = [f"x = x + {call.format(f'self.{norms[0]}(x)')}", f"return x + self.mlp(self.{norms[1]}(x))"]
    lines = _write_module(name, [width, heads, "mlp_ratio=4"], init, r.choice(["x", "x"]), body)
    return (inner + "\n\n\n" if inner else "") + lines, name


def write_vit(r: Random, style: str | None = None) -> tuple[str, str]:
    name = r.choice(["ViT", "VisionTransformer", "MyViT"])
    inner, _ = write_transformer_block(r, style, "InnerBlock")
    linear, pooled = r.random() < 0.5, r.random() < 0.25
    arguments = r.sample([r.choice(["img_size", "image_size"]), "patch_size", r.choice(["in_chans", "in_channels", "channels"]),
                          r.choice(["num_classes", "n_classes"]), r.choice(["embed_dim", "dim", "d_model", "hidden_dim"]),
                          r.choice(["depth", "num_layers", "n_layers"]), r.choice(["num_heads", "heads"])], 7)  # fmt: skip
    by = {
        "size": next(a for a in arguments if a in ("img_size", "image_size")),
        "chans": next(a for a in arguments if "chan" in a),
        "classes": next(a for a in arguments if "classes" in a),
        "depth": next(a for a in arguments if "layers" in a or a == "depth"),
        "heads": next(a for a in arguments if "heads" in a),
        "width": next(a for a in arguments if a in ("embed_dim", "dim", "d_model", "hidden_dim")),
    }
    project = (
        f"nn.Linear({by['chans']} * patch_size ** 2, {by['width']})"
        if linear
        else f"nn.Conv2d({by['chans']}, {by['width']}, patch_size, patch_size)"
    )
    extra = 0 if pooled else 1
    init = [
        f"self.p, n = patch_size, ({by['size']} // patch_size) ** 2",
        f"self.embed = {project}",
        f"self.pos_embedding = nn.Parameter(torch.randn(1, n + {extra}, {by['width']}))",
        f"self.blocks = nn.ModuleList([InnerBlock({by['width']}, {by['heads']}) for _ in range({by['depth']})])",
        f"self.norm = nn.LayerNorm({by['width']})",
        f"self.head = nn.Linear({by['width']}, {by['classes']})",
    ]
    init += [] if pooled else [f"self.cls_token = nn.Parameter(torch.zeros(1, 1, {by['width']}))"]
    pixels = r.choice(["c p q", "p q c"])
    cut = (
        f"self.embed(rearrange(x, 'b c (i p) (j q) -> b (i j) ({pixels})', p=self.p, q=self.p))"
        if linear
        else "self.embed(x).flatten(2).transpose(1, 2)"
    )
    body = [f"x = {cut}"]
    body += [] if pooled else ["x = torch.cat([self.cls_token.repeat(x.shape[0], 1, 1), x], dim=1)"]
    body += ["x = x + self.pos_embedding", "for layer in self.blocks:", "    x = layer(x)"]
    body += (
        ["return self.head(self.norm(x).mean(dim=1))"]
        if pooled
        else [r.choice(["return self.head(self.norm(x)[:, 0])", "return self.head(self.norm(x[:, 0]))"])]
    )
    return inner + "\n\n\n" + _write_module(name, arguments, init, "x", body), name


def write_patchify(r: Random, style: str | None = None) -> tuple[str, str]:
    name, size = (
        r.choice(["patchify", "image_to_patches", "to_patches", "extract_patches"]),
        r.choice(["patch_size", "p", "patch"]),
    )
    body = r.choice(
        [
            "return rearrange(images, 'b c (h p1) (w p2) -> b (h w) (p1 p2 c)', p1=S, p2=S)",
            "return rearrange(images, 'b c (h p1) (w p2) -> b (h w) (c p1 p2)', p1=S, p2=S)",
            "return F.unfold(images, S, stride=S).transpose(1, 2)",
            "b, c, h, w = images.shape\nreturn images.reshape(b, c, h // S, S, w // S, S).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * S * S)",
            "b, c, h, w = images.shape\nreturn torch.stack([images[:, :, i:i + S, j:j + S].flatten(1) for i in range(0, h, S) for j in range(0, w, S)], 1)",
            "x = images.unfold(2, S, S).unfold(3, S, S)\nreturn x.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)",
            "return torch.einsum('nchpwq->nhwpqc', images.reshape(*images.shape[:2], images.shape[2] // S, S, images.shape[3] // S, S)).flatten(1, 2).flatten(2)",
        ]
    ).replace("S", size)
    return f"def {name}(images, {size}):\n" + indent(body, "    "), name


def write_causal_mask(r: Random, style: str | None = None) -> tuple[str, str]:
    name, n = (
        r.choice(["causal_mask", "make_causal_mask", "subsequent_mask", "look_ahead_mask"]),
        r.choice(["n", "size", "tokens", "seq_len"]),
    )
    body = r.choice(
        ["torch.tril(torch.ones(§n, §n))", "torch.triu(torch.full((§n, §n), float('-inf')), diagonal=1)", "torch.ones(§n, §n).triu(1).bool()",
         "torch.arange(§n)[:, None] >= torch.arange(§n)[None]", "torch.tensor([[0.0 if j <= i else -10000.0 for j in range(§n)] for i in range(§n)])",
         "torch.tril(torch.ones(1, 1, §n, §n)) == 1", "np.tril(np.ones((§n, §n))).astype(bool)"]
    ).replace("§n", n)  # fmt: skip
    return f"def {name}({n}):\n    return {body}", name


def write_sinusoidal_positions(r: Random, style: str | None = None) -> tuple[str, str]:
    name = r.choice(["sinusoidal_positions", "positional_encoding", "sinusoidal_embedding", "position_table"])
    n, d = r.choice(["length", "seq_len", "max_len", "n_positions"]), r.choice(["width", "d_model", "dim", "embed_dim"])
    body = r.choice(
        [
            "a = torch.arange(§n)[:, None] / 10000 ** (torch.arange(0, §d, 2) / §d)\nt = torch.zeros(§n, §d)\nt[:, 0::2] = torch.sin(a)\nt[:, 1::2] = torch.cos(a)\nreturn t",
            "a = torch.arange(§n)[:, None] * torch.exp(-math.log(10000.0) * torch.arange(0, §d, 2) / §d)\nreturn torch.cat([a.sin(), a.cos()], dim=1)",
            "return torch.tensor([[math.sin(i / 10000 ** (j / §d)) if j % 2 == 0 else math.cos(i / 10000 ** ((j - 1) / §d)) for j in range(§d)] for i in range(§n)])",
            "a = np.arange(§n)[:, None] / np.power(10000, 2 * (np.arange(§d)[None] // 2) / §d)\na[:, 0::2], a[:, 1::2] = np.sin(a[:, 0::2]), np.cos(a[:, 1::2])\nreturn torch.tensor(a)[None]",
        ]
    ).replace("§n", n).replace("§d", d)  # fmt: skip
    return f"def {name}({', '.join(r.sample([n, d], 2))}):\n" + indent(body, "    "), name


def write_class_token(r: Random, style: str | None = None) -> tuple[str, str]:
    name, token = (
        r.choice(["add_class_token", "prepend_cls", "prepend_class_token"]),
        r.choice(["cls_token", "cls", "class_token"]),
    )
    body = r.choice(["torch.cat([T.expand(x.shape[0], -1, -1), x], dim=1)", "torch.cat([T.repeat(len(x), 1, 1), x], 1)",
                     "torch.stack([torch.vstack([T.reshape(1, -1), one]) for one in x])"]).replace("T", token)  # fmt: skip
    return f"def {name}({', '.join(r.sample(['x', token], 2))}):\n    return {body}", name


SOURCE_WRITERS = {
    "attention": write_attention,
    "multi-head-attention": write_multi_head_attention,
    "self-attention-2d": write_attention_2d,
    "feed-forward": write_feed_forward,
    "transformer-block": write_transformer_block,
    "vit": write_vit,
    "patchify": write_patchify,
    "causal-mask": write_causal_mask,
    "sinusoidal-positions": write_sinusoidal_positions,
    "class-token": write_class_token,
}


class Solution(NamedTuple):
    """The source code of a correct solution, and the name that it defines."""

    part: str
    source: str
    name: str


def write_random_solution(seed: int, part: str | None = None, style: str | None = None) -> Solution:
    """Return a part, the source of a solution, and the name that it defines."""
    r = Random(seed)
    part = part or r.choice([*SOURCE_WRITERS, "attention", "multi-head-attention", "multi-head-attention", "vit"])
    source, name = SOURCE_WRITERS[part](r, style)
    return Solution(part, HEADER + source + "\n", name)
