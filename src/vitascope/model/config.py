"""Settings of a vision transformer, checked on construction, without importing torch."""

from dataclasses import dataclass, fields
from typing import Any, get_args

from vitascope.errors import UserError, skip_beartype, suggest_choice
from vitascope.model.limits import check_sides, check_upper_limits

Size = int | tuple[int, int]

GLOBAL_POOLS = ("token", "avg", "seq")
POSITIONS = ("learned", "sinusoidal", "sincos2d", "none", "rotary")
POSITIONS += tuple(f"{absolute}+rotary" for absolute in ("learned", "sinusoidal", "sincos2d"))
NORMS = ("layernorm", "rmsnorm", "none")
MLPS = ("gelu", "relu2", "swiglu")
INITIALIZERS = ("timm", "torch", "mimetic", "conv_like")
OLD_INITIALIZERS = {"local": "conv_like", "silent": "timm"}  # names in files of older versions
TOKENIZERS = ("patch", "spt", "conv")
ATTENTIONS = ("plain", "lsa")
TOKEN_REDUCTION_SETTINGS = ("merge_tokens", "drop_tokens")  # change inference, not training
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


@skip_beartype
@dataclass(frozen=True)
class ModelConfig:
    """Settings of one model. The defaults are those of timm's vit_base_patch16_224."""

    img_size: Size = 224  # pixels, or (rows, columns)
    patch_size: Size = 16  # pixels, or (rows, columns); must divide img_size
    in_chans: int = 3  # 1 for grayscale images, 3 for colour
    tokenizer: str = (
        "patch"  # patch; spt (shifted patches, Lee et al. 2021); conv (3×3 convolutions as in CCT, Hassani et al. 2021)
    )
    num_classes: int = 1000  # 0: no classifier; the model returns features
    global_pool: str = (
        "token"  # input of the classifier: token (class token), avg (mean of patch tokens), seq (learned weighted mean)
    )
    embed_dim: int = 768  # features per token
    depth: int = 12  # blocks
    num_heads: int = 12  # must divide embed_dim
    mlp_ratio: float = 4.0  # width of the MLP's first layer / embed_dim; with swiglu this layer holds value and gate
    attention: str = "plain"  # plain; lsa (no attention to the token itself, learned scale per head; Lee et al. 2021)
    qkv_bias: bool = True  # bias on queries, keys and values
    qk_norm: bool = False  # normalise queries and keys per head before the dot product
    proj_bias: bool = True  # bias on attention's output projection and in the MLP
    output_projection: bool = True  # False: concatenated heads are the output (sheet A)
    init_values: float | None = None  # initial value of LayerScale; none: no LayerScale
    class_token: bool = True  # add a class token before the patches
    reg_tokens: int = 0  # register tokens (Darcet et al. 2024)
    no_embed_class: bool = False  # True: class and register tokens have no position embedding
    positions: str = "learned"  # learned, sinusoidal (1-d), sincos2d, rotary (2-d), none, or two such as learned+rotary
    rotary_base: float = 100.0  # longest rotary period is about 2π·base patches; 100 suits grids up to 16×16
    causal: bool = False  # a token attends only to itself and earlier tokens
    norm: str = "layernorm"  # layernorm, rmsnorm, none (sheet A)
    norm_eps: float = 1e-6
    mlp: str = "gelu"  # activation: gelu, relu2 (squared ReLU), swiglu (gated)
    drop_rate: float = 0.0  # dropout before the classifier
    pos_drop_rate: float = 0.0  # dropout after the position embedding
    proj_drop_rate: float = 0.0  # dropout after attention's output projection and after both MLP layers
    attn_drop_rate: float = 0.0  # dropout on the attention maps
    drop_path_rate: float = 0.0  # stochastic depth: rate of the last block; it grows linearly from 0 at the first
    merge_tokens: int = 0  # inference only: patches that each block merges into similar ones (Bolya et al. 2023)
    drop_tokens: int = 0  # inference only: patches that each block drops, those with the least attention
    grad_checkpointing: bool = False  # recompute activations in the backward pass (less memory, more time)
    initialize: str = "timm"  # weights before training: timm, torch, mimetic, conv_like (docs/model.md)

    def __post_init__(self) -> None:
        for name in ("img_size", "patch_size"):
            object.__setattr__(self, name, check_and_convert_size(name, getattr(self, name)))
        self._check_types()
        self._check_ranges()
        self._check_divisibility()
        self._check_norm_and_pooling()
        self._check_tokenizer_attention_init()
        self._check_token_reduction()

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
        """tokenizer=conv: channels before the first layer and after each layer. Every layer halves the image size."""
        layers = self.patch_shape[0].bit_length() - 1
        return [self.in_chans, *[CONV_CHANNELS] * (layers - 1), self.embed_dim]

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens, which come before the patches."""
        return int(self.class_token) + self.reg_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_patches

    @property
    def token_reduction(self) -> dict[str, int]:
        """The setting that reduces tokens at inference, merge_tokens or drop_tokens, if one is on."""
        return {name: getattr(self, name) for name in TOKEN_REDUCTION_SETTINGS if getattr(self, name)}

    @property
    def num_removed_per_block(self) -> list[int]:
        """Number of tokens that each block removes at inference. At most half of the patches can be merged."""
        num_removed, patches = [], self.num_patches
        min_patches = 2 if self.attention == "lsa" and not self.num_prefix_tokens else 1  # lsa needs two
        for _ in range(self.depth):
            num_merged = min(self.merge_tokens, patches // 2)
            num_removed.append(num_merged + min(self.drop_tokens, max(0, patches - min_patches)))
            patches -= num_removed[-1]
        return num_removed

    @property
    def head_width(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Width of the MLP's first layer."""
        return int(self.embed_dim * self.mlp_ratio + 1e-6)  # 100 / 48 · 48 must stay 100

    @property
    def absolute_positions(self) -> str:
        """The position embedding added to the tokens: learned, sinusoidal, sincos2d or none."""
        first = self.positions.split("+")[0]
        return "none" if first == "rotary" else first

    @property
    def uses_rotary(self) -> bool:
        return self.positions.endswith("rotary")

    @property
    def uses_dropout(self) -> bool:
        """Whether dropout or stochastic depth is active in training."""
        rates = (self.drop_rate, self.pos_drop_rate, self.proj_drop_rate, self.attn_drop_rate, self.drop_path_rate)
        return any(rates)

    @property
    def drop_path_rates(self) -> list[float]:
        """One rate per block, growing linearly from 0 to drop_path_rate (Huang et al. 2016)."""
        return [self.drop_path_rate * block / max(1, self.depth - 1) for block in range(self.depth)]

    def _check_types(self) -> None:
        for field in fields(self):
            types: tuple[type, ...] = get_args(field.type) or (field.type,)  # pyright: ignore[reportAssignmentType]
            value = getattr(self, field.name)
            if isinstance(value, bool) and bool not in types:
                raise UserError(
                    f"{field.name}={value} is true or false, but {field.name} must be {_describe_types(types)}."
                )
            accepted = types + ((int,) if float in types else ())
            if field.name not in ("img_size", "patch_size") and not isinstance(value, accepted):
                raise UserError(f"{field.name}={value!r} is not {_describe_types(types)}.")

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
        check_upper_limits(self, self.num_tokens)
        if self.init_values is not None and not abs(self.init_values) < 1e30:
            raise UserError(f"init_values={self.init_values} must be a finite number.")
        for name in [field.name for field in fields(self) if field.name.endswith(("drop_rate", "drop_path_rate"))]:
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is not a rate. It must be at least 0 and below 1.")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f"{name}={value!r} is unknown. {suggest_choice(value, choices)}")

    def _check_divisibility(self) -> None:
        for image, patch in zip(self.image_shape, self.patch_shape, strict=True):
            if image % patch:
                divisors = ", ".join(str(size) for size in range(1, image + 1) if image % size == 0)
                side = f"img_size={self.img_size}" if image == self.img_size else f"{image} of img_size={self.img_size}"
                raise UserError(f"patch_size={patch} does not divide {side}. Choose patch_size from {divisors}.")
        check_heads_divide_width(self.embed_dim, self.num_heads, width_factor=4 if self.uses_rotary else 1)
        if self.hidden_width < 1:
            raise UserError(f"mlp_ratio={self.mlp_ratio} × embed_dim={self.embed_dim} must be at least 1.")
        if self.mlp == "swiglu" and self.hidden_width % 2:
            raise UserError(
                "mlp=swiglu splits its first layer into halves, so its width must be even. "
                f"It is embed_dim={self.embed_dim} × mlp_ratio={self.mlp_ratio} = {self.hidden_width}."
            )
        factor = {"sinusoidal": 2, "sincos2d": 4}.get(self.absolute_positions, 1)
        if self.embed_dim % factor:
            raise UserError(
                f"positions={self.positions} needs embed_dim to be a multiple of {factor}, not {self.embed_dim}."
            )

    def _check_norm_and_pooling(self) -> None:
        if self.qk_norm and self.norm == "none":
            raise UserError("qk_norm=true needs a norm, but norm=none. Choose norm=layernorm or norm=rmsnorm.")
        if self.global_pool == "token" and not self.class_token:
            raise UserError(
                "global_pool=token needs the class token, but class_token=false. Choose global_pool=avg or seq, "
                "or model.class_token=true."
            )
        if self.global_pool == "token" and self.causal:
            raise UserError(
                "With causal=true the class token, which comes first, attends to no patch. The prediction would not "
                "depend on the image. Choose global_pool=avg or seq."
            )

    def _check_token_reduction(self) -> None:
        if len(self.token_reduction) > 1:
            raise UserError("merge_tokens and drop_tokens cannot be combined. Set one of them to 0.")
        if self.token_reduction and self.causal:
            raise UserError("merge_tokens and drop_tokens change the order of tokens, so causal=true is not supported.")

    def _check_tokenizer_attention_init(self) -> None:
        rows, columns = self.patch_shape
        if self.tokenizer == "conv" and (rows != columns or rows < 2 or rows & (rows - 1)):
            raise UserError(
                f"tokenizer=conv halves the image size in every layer, so patch_size must be 2, 4, 8, …, "
                f"not {self.patch_size}."
            )
        if self.attention == "lsa" and (self.causal or self.num_tokens < 2):
            reason = "with causal=true the first token has no other" if self.causal else "there is only one token"
            raise UserError(
                f"With attention=lsa a token does not attend to itself, and {reason}. Choose attention=plain."
            )
        if self.initialize == "mimetic" and not self.output_projection:
            raise UserError(
                f"initialize={self.initialize} sets the output projection, but output_projection=false. "
                "Choose initialize=timm."
            )
        if self.initialize == "conv_like" and not (self.uses_rotary and self.qkv_bias):
            raise UserError(
                "initialize=conv_like needs rotary positions and biases of queries and keys. Choose "
                "positions=learned+rotary and qkv_bias=true, or initialize=timm."
            )


def check_heads_divide_width(embed_dim: int, num_heads: int, *, width_factor: int = 1) -> None:
    """Raise an error unless num_heads divides embed_dim into heads whose width is a multiple of width_factor."""
    if embed_dim < 1 or num_heads < 1:
        raise UserError(f"embed_dim={embed_dim} and num_heads={num_heads} must be at least 1.")
    if embed_dim % width_factor:
        raise UserError(f"Rotary positions need embed_dim to be a multiple of {width_factor}, not {embed_dim}.")
    if embed_dim % (num_heads * width_factor):
        heads = embed_dim // width_factor
        divisors = [count for count in range(1, heads + 1) if heads % count == 0]
        near = sorted(sorted(divisors, key=lambda count: abs(count - num_heads))[:6])
        problem = (
            f"num_heads={num_heads} does not divide embed_dim={embed_dim}."
            if embed_dim % num_heads
            else f"Rotary positions need embed_dim / num_heads to be a multiple of {width_factor}; "
            f"it is {embed_dim} / {num_heads} = {embed_dim // num_heads}."
        )
        raise UserError(f"{problem} Choose num_heads from {', '.join(map(str, near))}.")


def as_pair(size: Size) -> tuple[int, int]:
    """Return (rows, columns): 8 becomes (8, 8); a pair is unchanged."""
    return size if isinstance(size, tuple) else (size, size)


def check_and_convert_size(setting_name: str, value: object) -> Size:
    """Return a size as an int or a pair of ints, at least 1 each; lists (from YAML) become tuples."""
    pair: Any = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in pair):
        raise UserError(f"{setting_name}={value!r} is not a size. Give a number of pixels or a pair (rows, columns).")
    check_sides(setting_name, value, pair)
    return value if isinstance(value, int) else pair


def _describe_types(accepted_types: tuple[object, ...]) -> str:
    descriptions = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return next((text for accepted_type, text in descriptions.items() if accepted_type in accepted_types), "a size")
