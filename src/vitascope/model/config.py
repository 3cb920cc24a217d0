"""What a vision transformer is made of: every size and choice, checked when it is made, without torch."""

from dataclasses import dataclass, fields
from typing import Any, get_args

from vitascope.errors import UserError, did_you_mean, speaks_for_itself

Size = int | tuple[int, int]

GLOBAL_POOLS = ("token", "avg", "seq")
POSITIONS = ("learned", "sinusoidal", "sincos2d", "none", "rotary")
POSITIONS += tuple(f"{absolute}+rotary" for absolute in ("learned", "sinusoidal", "sincos2d"))
NORMS = ("layernorm", "rmsnorm", "none")
MLPS = ("gelu", "relu2", "swiglu")
INITIALIZERS = ("timm", "torch", "mimetic", "conv_like")
OLD_INITIALIZERS = {"local": "conv_like", "silent": "timm"}  # in files of older versions, whose weights are trained
TOKENIZERS = ("patch", "spt", "conv")
ATTENTIONS = ("plain", "lsa")
FEWER = ("merge_tokens", "drop_tokens")  # change how a model answers, not what it learns
CONV_CHANNELS = 64  # between the layers of tokenizer=conv (Hassani et al. 2021)
CHOICES = {
    "tokenizer": TOKENIZERS,
    "attention": ATTENTIONS,
    "global_pool": GLOBAL_POOLS,
    "positions": POSITIONS,
    "norm": NORMS,
    "mlp": MLPS,
    "initialize": INITIALIZERS,
}


@speaks_for_itself
@dataclass(frozen=True)
class ModelConfig:
    """The settings of one model; the defaults are timm's ViT (vit_base_patch16_224)."""

    img_size: Size = 224  # pixels, or (rows, columns)
    patch_size: Size = 16  # pixels, or (rows, columns); must divide img_size
    in_chans: int = 3  # 1 for grey images, 3 for colour
    tokenizer: str = (
        "patch"  # patch; spt (shifted patches, Lee et al. 2021); conv (3×3 layers, CCT, Hassani et al. 2021)
    )
    num_classes: int = 1000  # 0: no classifier, the model returns features
    global_pool: str = (
        "token"  # what the classifier sees: token (class token), avg (mean of patches), seq (learned mean)
    )
    embed_dim: int = 768  # features per token
    depth: int = 12  # blocks
    num_heads: int = 12  # must divide embed_dim
    mlp_ratio: float = 4.0  # width of the MLP's first layer, in units of embed_dim (swiglu: value and gate together)
    attention: str = "plain"  # plain; lsa (nobody looks at itself, a learned scale per head; Lee et al. 2021)
    qkv_bias: bool = True  # bias on queries, keys and values
    qk_norm: bool = False  # normalise queries and keys per head before they meet
    proj_bias: bool = True  # bias on attention's output projection and in the MLP
    output_projection: bool = True  # False: the joined heads are the output (sheet A)
    init_values: float | None = None  # LayerScale's start value; none: no LayerScale
    class_token: bool = True
    reg_tokens: int = 0  # register tokens (Darcet et al. 2024)
    no_embed_class: bool = False  # True: class and register tokens get no position
    positions: str = "learned"  # learned, sinusoidal (1-d), sincos2d, rotary (2-d), none, or two joined: learned+rotary
    rotary_base: float = 100.0  # slowest rotation turns once in about 2π·base patches; 100 suits grids up to 16×16
    causal: bool = False  # a token sees itself and earlier tokens only
    norm: str = "layernorm"  # layernorm, rmsnorm, none (sheet A)
    norm_eps: float = 1e-6
    mlp: str = "gelu"  # gelu, relu2 (squared ReLU), swiglu (gated)
    drop_rate: float = 0.0  # dropout before the classifier
    pos_drop_rate: float = 0.0  # dropout after the position embedding
    proj_drop_rate: float = 0.0  # dropout after attention's projection and after both MLP layers
    attn_drop_rate: float = 0.0  # dropout on the attention maps
    drop_path_rate: float = 0.0  # stochastic depth: last block's rate, growing linearly from 0 at the first
    merge_tokens: int = 0  # at inference: in each block so many patches join those most like them (Bolya et al. 2023)
    drop_tokens: int = 0  # at inference: in each block so many patches are left out, the least looked-at
    grad_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    initialize: str = (
        "timm"  # timm; torch (PyTorch's layers; tokens, positions N(0, 1): sheet A); mimetic; conv_like: docs/model.md
    )

    def __post_init__(self) -> None:
        for name in ("img_size", "patch_size"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))
        self._check_types()
        self._check_ranges()
        self._check_sizes()
        self._check_tokens()
        self._check_small_data()
        self._check_fewer()

    @property
    def image_shape(self) -> tuple[int, int]:
        """(rows, columns) in pixels."""
        return as_pair(self.img_size)

    @property
    def patch_shape(self) -> tuple[int, int]:
        """(rows, columns) of one patch in pixels."""
        return as_pair(self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) in patches."""
        (height, width), (rows, columns) = self.image_shape, self.patch_shape
        return height // rows, width // columns

    @property
    def conv_channels(self) -> list[int]:
        """Of tokenizer=conv, before the first layer and after each; every layer halves the picture, to the patch."""
        layers = self.patch_shape[0].bit_length() - 1
        return [self.in_chans, *[CONV_CHANNELS] * (layers - 1), self.embed_dim]

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Class token and registers: they stand before the patches."""
        return int(self.class_token) + self.reg_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_patches

    @property
    def fewer(self) -> dict[str, int]:
        """How answers are made with fewer tokens than learning: the one setting of FEWER that is on, or nothing."""
        return {name: getattr(self, name) for name in FEWER if getattr(self, name)}

    @property
    def fewer_per_block(self) -> list[int]:
        """By how many tokens each block makes the crowd smaller at inference: at most half of its patches merge."""
        found, patches = [], self.num_patches
        least = 2 if self.attention == "lsa" and not self.num_prefix_tokens else 1  # a local token needs another
        for _ in range(self.depth):
            found.append(min(self.merge_tokens, patches // 2) + min(self.drop_tokens, max(0, patches - least)))
            patches -= found[-1]
        return found

    @property
    def head_width(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Width of the MLP's first layer."""
        return int(self.embed_dim * self.mlp_ratio + 1e-6)  # 100 / 48 · 48 must stay 100

    @property
    def absolute_positions(self) -> str:
        """What is added to the tokens: learned, sinusoidal, sincos2d or none."""
        first = self.positions.split("+")[0]
        return "none" if first == "rotary" else first

    @property
    def rotary(self) -> bool:
        return self.positions.endswith("rotary")

    @property
    def has_chance(self) -> bool:
        """Whether training drops anything at random."""
        rates = (self.drop_rate, self.pos_drop_rate, self.proj_drop_rate, self.attn_drop_rate, self.drop_path_rate)
        return any(rates)

    @property
    def drop_path_rates(self) -> list[float]:
        """One rate per block, growing linearly from 0 to drop_path_rate (Huang et al. 2016)."""
        return [self.drop_path_rate * block / max(1, self.depth - 1) for block in range(self.depth)]

    def _check_types(self) -> None:
        for field in fields(self):
            kinds: tuple[Any, ...] = get_args(field.type) or (field.type,)
            value = getattr(self, field.name)
            if isinstance(value, bool) and bool not in kinds:
                raise UserError(f"{field.name}={value} is a yes or no, but {field.name} is a {_kind_name(kinds)}.")
            accepted = kinds + ((int,) if float in kinds else ())
            if field.name not in ("img_size", "patch_size") and not isinstance(value, accepted):
                raise UserError(f"{field.name}={value!r} is not a {_kind_name(kinds)}.")

    def _check_ranges(self) -> None:
        for name in ("in_chans", "embed_dim", "depth", "num_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is too small. It must be at least 1.")
        for name in ("num_classes", "reg_tokens", "merge_tokens", "drop_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} is negative. It must be 0 or more.")
        for name in ("mlp_ratio", "norm_eps", "rotary_base"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name}={getattr(self, name)} must be greater than 0 and finite.")
        if self.init_values is not None and not abs(self.init_values) < float("inf"):
            raise UserError(f"init_values={self.init_values} must be a finite number.")
        for name in [field.name for field in fields(self) if field.name.endswith(("drop_rate", "drop_path_rate"))]:
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is not a rate. It must be at least 0 and below 1.")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(
                    f"{name}={getattr(self, name)!r} is unknown. {did_you_mean(getattr(self, name), choices)}"
                )

    def _check_sizes(self) -> None:
        for image, patch in zip(self.image_shape, self.patch_shape, strict=True):
            if image % patch:
                divisors = ", ".join(str(number) for number in range(1, image + 1) if image % number == 0)
                size = f"img_size={self.img_size}" if image == self.img_size else f"{image} of img_size={self.img_size}"
                raise UserError(f"patch_size={patch} does not divide {size}. Choose one of {divisors}.")
        check_heads(self.embed_dim, self.num_heads)
        if self.hidden_width < 1:
            raise UserError(f"mlp_ratio={self.mlp_ratio} of embed_dim={self.embed_dim} leaves no hidden feature.")
        if self.mlp == "swiglu" and self.hidden_width % 2:
            raise UserError(
                f"mlp=swiglu halves its first layer, but embed_dim={self.embed_dim} × mlp_ratio={self.mlp_ratio} "
                f"= {self.hidden_width} is odd. Choose another mlp_ratio."
            )
        if self.rotary and self.head_width % 4:
            raise UserError(
                f"positions={self.positions} turns pairs of features along two axes, so embed_dim / num_heads must be "
                f"a multiple of 4; it is {self.embed_dim} / {self.num_heads} = {self.head_width}."
            )
        factor = {"sinusoidal": 2, "sincos2d": 4}.get(self.absolute_positions, 1)
        if self.embed_dim % factor:
            raise UserError(
                f"positions={self.positions} needs embed_dim to be a multiple of {factor}, not {self.embed_dim}."
            )

    def _check_tokens(self) -> None:
        if self.qk_norm and self.norm == "none":
            raise UserError("qk_norm=true normalises by `norm`, but norm=none. Choose layernorm or rmsnorm.")
        if self.global_pool == "token" and not self.class_token:
            raise UserError(
                "global_pool=token reads the class token, but class_token=false. Choose global_pool=avg or seq."
            )
        if self.global_pool == "token" and self.causal:
            raise UserError(
                "causal=true hides the patches from the class token, which stands first: the answer could not depend "
                "on the image. Choose global_pool=avg or seq."
            )

    def _check_fewer(self) -> None:
        if len(self.fewer) > 1:
            raise UserError(
                "Tokens are merged (merge_tokens) or dropped (drop_tokens), not both. Set one of them to 0."
            )
        if self.fewer and self.causal:
            raise UserError("With causal=true the order of tokens counts, and merging or dropping would break it.")

    def _check_small_data(self) -> None:
        rows, columns = self.patch_shape
        if self.tokenizer == "conv" and (rows != columns or rows < 2 or rows & (rows - 1)):
            raise UserError(
                f"tokenizer=conv halves the picture once per layer, so patch_size must be 2, 4, 8, …, "
                f"not {self.patch_size}."
            )
        if self.attention == "lsa" and (self.causal or self.num_tokens < 2):
            alone = "causal=true leaves the first token" if self.causal else "there is one token, which has"
            raise UserError(
                f"attention=lsa forbids a token to look at itself, and {alone} nothing else to look at. "
                "Choose attention=plain."
            )
        if self.initialize == "mimetic" and not self.output_projection:
            raise UserError(
                f"initialize={self.initialize} sets the output projection, but output_projection=false. "
                "Choose initialize=timm."
            )
        if self.initialize == "conv_like" and not (self.rotary and self.qkv_bias):
            raise UserError(
                "initialize=conv_like sets the biases of queries and keys, which rotary positions rotate. Choose "
                "positions=learned+rotary and qkv_bias=true, or initialize=timm."
            )


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Heads share the features equally."""
    if embed_dim < 1 or num_heads < 1:
        raise UserError(f"embed_dim={embed_dim} and num_heads={num_heads} must be at least 1.")
    if embed_dim % num_heads:
        divisors = [number for number in range(1, embed_dim + 1) if embed_dim % number == 0]
        near = sorted(sorted(divisors, key=lambda number: abs(number - num_heads))[:6])
        choices = ", ".join(map(str, near))
        raise UserError(f"num_heads={num_heads} does not divide embed_dim={embed_dim}. Choose one of {choices}.")


def as_pair(size: Size) -> tuple[int, int]:
    """8 -> (8, 8); (8, 4) stays."""
    return size if isinstance(size, tuple) else (size, size)


def check_size(name: str, value: Any) -> Size:
    """A size as an int or a pair of ints, at least 1 each; lists (from YAML) become tuples."""
    pair = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in pair):
        raise UserError(f"{name}={value!r} is not a size. Give one number of pixels, or a pair (rows, columns).")
    if min(pair) < 1:
        raise UserError(f"{name}={value} is too small. It must be at least 1.")
    return value if isinstance(value, int) else pair


def _kind_name(kinds: tuple[object, ...]) -> str:
    words = {int: "whole number", float: "number", bool: "yes or no", str: "word"}
    return next((word for kind, word in words.items() if kind in kinds), "size")
