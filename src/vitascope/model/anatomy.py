"""ModelConfig -> every stage from image to logits: its shape, parameters, FLOPs and bytes, without running anything.

FLOPs count matrix products, two per multiply-add, as PyTorch's FlopCounterMode does; bytes are the stage's activations
in float32. The tests hold these numbers against a real model.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig

BYTES_PER_NUMBER = 4  # float32


@dataclass(frozen=True)
class Stage:
    """One tensor on the way, and what making it costs."""

    name: str
    axes: list[str]
    shape: list[int]
    parameters: int = 0
    flops: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES_PER_NUMBER


def anatomy(config: ModelConfig, *, batch: int = 1, tokens: int | None = None) -> list[Stage]:
    """All stages in order. `tokens` follows that many tokens from the first block on, leaving the image out."""
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1.")
    start = _embedding(config, batch) if tokens is None else [_tokens(config, batch, tokens, parameters=0)]
    count = config.num_tokens if tokens is None else tokens
    blocks: list[Stage] = []
    for index, fewer in enumerate(config.fewer_per_block if tokens is None else [0] * config.depth):
        blocks += _block(config, batch, count, count - fewer, f"blocks.{index}.")
        count -= fewer
    return start + blocks + _head(config, batch, count)


def _embedding(config: ModelConfig, batch: int) -> list[Stage]:
    rows = 0 if config.no_embed_class else config.num_prefix_tokens
    table = rows + config.num_patches if config.absolute_positions == "learned" else 0
    return [
        Stage("image", ["batch", "channel", "height", "width"], [batch, config.in_chans, *config.image_shape]),
        *(_convolutions(config, batch) if config.tokenizer == "conv" else _patches(config, batch)),
        _tokens(config, batch, config.num_tokens, parameters=(config.num_prefix_tokens + table) * config.embed_dim),
    ]


def _patches(config: ModelConfig, batch: int) -> list[Stage]:
    shifts = config.tokenizer == "spt"
    channels = config.in_chans * (5 if shifts else 1)
    pixels = channels * prod(config.patch_shape)
    embedded = _linear("patch_embed", "feature", batch, config.num_patches, pixels, config.embed_dim, True)
    found = [Stage("patches", ["batch", "patch", "pixel value"], [batch, config.num_patches, pixels])]
    if shifts:
        shape = [batch, channels, *config.image_shape]
        found.insert(0, Stage("shifted", ["batch", "channel", "height", "width"], shape))
        found.append(replace(found[-1], name="patch_embed.norm", parameters=2 * pixels))
    return [*found, replace(embedded, axes=["batch", "patch", "feature"])]


def _convolutions(config: ModelConfig, batch: int) -> list[Stage]:
    """Each layer's cost is at full size; what is shown is the picture after pooling."""
    height, width = config.image_shape
    found = []
    for layer, (before, after) in enumerate(pairwise(config.conv_channels)):
        weights, pixels = 9 * before * after, (height >> layer) * (width >> layer)
        shape = [batch, after, height >> layer + 1, width >> layer + 1]
        axes = ["batch", "channel", "height", "width"]
        found.append(Stage(f"patch_embed.layers.{3 * layer}", axes, shape, weights, 2 * batch * weights * pixels))
    shape = [batch, config.num_patches, config.embed_dim]
    return [*found, Stage("patch_embed", ["batch", "patch", "feature"], shape)]


def _tokens(config: ModelConfig, batch: int, count: int, *, parameters: int) -> Stage:
    return Stage("tokens", ["batch", "token", "feature"], [batch, count, config.embed_dim], parameters=parameters)


def _block(config: ModelConfig, batch: int, tokens: int, after: int, prefix: str) -> list[Stage]:
    """`after`: tokens that are left for the MLP, where some are merged or dropped."""
    return [
        *_norm(config, prefix + "norm1", batch, tokens),
        *_attention(config, batch, tokens, prefix + "attn."),
        *_layer_scale(config, prefix + "ls1", batch, tokens),
        _vector_stage(config, prefix + "residual1", batch, tokens),
        *(_fewer(config, batch, tokens, after, prefix) if after < tokens else []),
        *_norm(config, prefix + "norm2", batch, after),
        *_mlp(config, batch, after, prefix + "mlp."),
        *_layer_scale(config, prefix + "ls2", batch, after),
        _vector_stage(config, prefix + "residual2", batch, after),
    ]


def _fewer(config: ModelConfig, batch: int, tokens: int, after: int, prefix: str) -> list[Stage]:
    left = _vector_stage(config, prefix + ("merged" if config.merge_tokens else "kept"), batch, after)
    if not config.merge_tokens:
        return [left]
    patches = tokens - config.num_prefix_tokens
    sides = [(patches + 1) // 2, patches // 2]
    meeting = 2 * batch * prod(sides) * config.head_width
    return [Stage(prefix + "likeness", ["batch", "first", "second"], [batch, *sides], flops=meeting), left]


def _attention(config: ModelConfig, batch: int, tokens: int, prefix: str) -> list[Stage]:
    width, heads, head_width = config.embed_dim, config.num_heads, config.head_width
    per_head = (["batch", "head", "token", "head_dim"], [batch, heads, tokens, head_width])
    weights = width * width + width * config.qkv_bias
    qk_norm = _norm_parameters(config, head_width) if config.qk_norm else 0
    scales = heads if config.attention == "lsa" else 0
    projecting = 2 * batch * tokens * width * width
    meeting = 2 * batch * tokens * tokens * width
    stages = [
        Stage(prefix + "query", *per_head, parameters=weights + qk_norm, flops=projecting),
        Stage(prefix + "key", *per_head, parameters=weights + qk_norm, flops=projecting),
        Stage(prefix + "value", *per_head, parameters=weights, flops=projecting),
        Stage(prefix + "maps", ["batch", "head", "query", "key"], [batch, heads, tokens, tokens], scales, meeting),
        Stage(prefix + "heads", *per_head, flops=meeting),
        Stage(prefix + "joined", ["batch", "token", "feature"], [batch, tokens, width]),
    ]
    if config.output_projection:
        stages.append(_linear(prefix + "proj", "feature", batch, tokens, width, width, config.proj_bias))
    return stages


def _mlp(config: ModelConfig, batch: int, tokens: int, prefix: str) -> list[Stage]:
    width, wide = config.embed_dim, config.hidden_width
    hidden = wide // 2 if config.mlp == "swiglu" else wide
    return [
        _linear(prefix + "fc1", "hidden", batch, tokens, width, wide, config.proj_bias),
        Stage(prefix + "activation", ["batch", "token", "hidden"], [batch, tokens, hidden]),
        _linear(prefix + "fc2", "feature", batch, tokens, hidden, width, config.proj_bias),
    ]


def _head(config: ModelConfig, batch: int, tokens: int) -> list[Stage]:
    width, pooled = config.embed_dim, ["batch", "feature"]
    pools_first = config.global_pool == "avg"
    patches = max(0, tokens - config.num_prefix_tokens)
    scores = config.global_pool == "seq"
    stages = [] if pools_first else _norm(config, "norm", batch, tokens)
    stages.append(
        Stage(
            "pool", pooled, [batch, width], parameters=scores * (width + 1), flops=scores * 2 * batch * patches * width
        )
    )
    norm = _norm_parameters(config, width)
    if pools_first and norm:
        stages.append(Stage("fc_norm", pooled, [batch, width], parameters=norm))
    if config.num_classes:
        classes = config.num_classes
        weights, flops = (width + 1) * classes, 2 * batch * width * classes
        stages.append(Stage("head", ["batch", "class"], [batch, classes], parameters=weights, flops=flops))
    return stages


def total_parameters(config: ModelConfig) -> int:
    return sum(stage.parameters for stage in anatomy(config))


def total_flops(config: ModelConfig, seen: int | None = None) -> int:
    """Of one image's forward pass, all tokens, as papers count; with `seen`, of so many patches, all being embedded."""
    if seen is None:
        return sum(stage.flops for stage in anatomy(config))
    blocks = anatomy(config, tokens=config.num_prefix_tokens + seen)
    return sum(stage.flops for stage in [*_embedding(config, 1), *blocks])


def _linear(name: str, axis: str, batch: int, tokens: int, inputs: int, outputs: int, bias: bool) -> Stage:
    return Stage(
        name,
        ["batch", "token", axis],
        [batch, tokens, outputs],
        parameters=inputs * outputs + outputs * bias,
        flops=2 * batch * tokens * inputs * outputs,
    )


def _norm(config: ModelConfig, name: str, batch: int, tokens: int) -> list[Stage]:
    parameters = _norm_parameters(config, config.embed_dim)
    return [_vector_stage(config, name, batch, tokens, parameters)] if parameters else []


def _layer_scale(config: ModelConfig, name: str, batch: int, tokens: int) -> list[Stage]:
    return [] if config.init_values is None else [_vector_stage(config, name, batch, tokens, config.embed_dim)]


def _vector_stage(config: ModelConfig, name: str, batch: int, tokens: int, parameters: int = 0) -> Stage:
    return Stage(name, ["batch", "token", "feature"], [batch, tokens, config.embed_dim], parameters=parameters)


def _norm_parameters(config: ModelConfig, width: int) -> int:
    return {"layernorm": 2, "rmsnorm": 1, "none": 0}[config.norm] * width
