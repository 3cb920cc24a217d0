"""List every stage of a model from image to logits: shape, parameters, FLOPs and bytes, without running the model.

FLOPs count matrix products, two per multiply-add, as PyTorch's FlopCounterMode does; bytes are the stage's activations
in float32. The tests compare these numbers with a real model.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig

BYTES_PER_FLOAT = 4  # float32


@dataclass(frozen=True)
class Stage:
    """One tensor between image and logits, and the cost of computing it."""

    name: str
    axes: list[str]
    shape: list[int]
    parameters: int = 0
    flops: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BYTES_PER_FLOAT


def list_stages(config: ModelConfig, *, batch_size: int = 1) -> list[Stage]:
    """Return all stages in order, from the image to the logits."""
    _check_at_least_one("batch", batch_size)
    blocks_and_head = _list_block_and_head_stages(config, batch_size, config.num_tokens, config.num_removed_per_block)
    return _list_embedding_stages(config, batch_size) + blocks_and_head


def list_stages_from_first_block(config: ModelConfig, num_tokens: int, *, batch_size: int = 1) -> list[Stage]:
    """Return the stages from this number of tokens at the first block to the logits. No token is merged or dropped."""
    _check_at_least_one("batch", batch_size)
    _check_at_least_one("tokens", num_tokens)
    input_tokens = _make_token_stage_without_flops(config, "tokens", batch_size, num_tokens)
    return [input_tokens, *_list_block_and_head_stages(config, batch_size, num_tokens, [0] * config.depth)]


def _check_at_least_one(option_name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{option_name}={value} must be at least 1.")


def _list_block_and_head_stages(
    config: ModelConfig, batch_size: int, num_tokens: int, num_removed_per_block: list[int]
) -> list[Stage]:
    stages: list[Stage] = []
    for index, num_removed in enumerate(num_removed_per_block):
        stages += _list_block_stages(config, batch_size, num_tokens, num_tokens - num_removed, f"blocks.{index}.")
        num_tokens -= num_removed
    return stages + _list_head_stages(config, batch_size, num_tokens)


def _list_embedding_stages(config: ModelConfig, batch_size: int) -> list[Stage]:
    prefix_rows = 0 if config.no_embed_class else config.num_prefix_tokens
    table_rows = prefix_rows + config.num_patches if config.absolute_positions == "learned" else 0
    return [
        Stage("image", ["batch", "channel", "height", "width"], [batch_size, config.in_chans, *config.image_shape]),
        *(
            _list_conv_tokenizer_stages(config, batch_size)
            if config.tokenizer == "conv"
            else _list_patch_embedding_stages(config, batch_size)
        ),
        _make_token_stage_without_flops(
            config,
            "tokens",
            batch_size,
            config.num_tokens,
            num_parameters=(config.num_prefix_tokens + table_rows) * config.embed_dim,
        ),
    ]


def _list_patch_embedding_stages(config: ModelConfig, batch_size: int) -> list[Stage]:
    has_shifted_copies = config.tokenizer == "spt"
    channels = config.in_chans * (5 if has_shifted_copies else 1)
    pixels = channels * prod(config.patch_shape)
    embedded = _make_linear_layer_stage(
        "patch_embed", "feature", batch_size, config.num_patches, pixels, config.embed_dim, True
    )
    stages = [Stage("patches", ["batch", "patch", "pixel value"], [batch_size, config.num_patches, pixels])]
    if has_shifted_copies:
        shape = [batch_size, channels, *config.image_shape]
        stages.insert(0, Stage("shifted", ["batch", "channel", "height", "width"], shape))
        stages.append(replace(stages[-1], name="patch_embed.norm", parameters=2 * pixels))
    return [*stages, replace(embedded, axes=["batch", "patch", "feature"])]


def _list_conv_tokenizer_stages(config: ModelConfig, batch_size: int) -> list[Stage]:
    """Return one stage per layer: the cost of its convolution, and the shape after its pooling."""
    height, width = config.image_shape
    stages = []
    for layer, (before, after) in enumerate(pairwise(config.conv_channels)):
        weights, pixels = 9 * before * after, (height >> layer) * (width >> layer)
        shape = [batch_size, after, height >> layer + 1, width >> layer + 1]
        axes = ["batch", "channel", "height", "width"]
        stages.append(Stage(f"patch_embed.layers.{3 * layer}", axes, shape, weights, 2 * batch_size * weights * pixels))
    shape = [batch_size, config.num_patches, config.embed_dim]
    return [*stages, Stage("patch_embed", ["batch", "patch", "feature"], shape)]


def _list_block_stages(
    config: ModelConfig, batch_size: int, num_tokens: int, num_tokens_after: int, name_prefix: str
) -> list[Stage]:
    """Return one block's stages. `num_tokens_after` tokens remain for the MLP if some are merged or dropped."""
    return [
        *_list_norm_stages(config, name_prefix + "norm1", batch_size, num_tokens),
        *_list_attention_stages(config, batch_size, num_tokens, name_prefix + "attn."),
        *_list_layer_scale_stages(config, name_prefix + "ls1", batch_size, num_tokens),
        _make_token_stage_without_flops(config, name_prefix + "residual1", batch_size, num_tokens),
        *(
            _list_token_reduction_stages(config, batch_size, num_tokens, num_tokens_after, name_prefix)
            if num_tokens_after < num_tokens
            else []
        ),
        *_list_norm_stages(config, name_prefix + "norm2", batch_size, num_tokens_after),
        *_list_mlp_stages(config, batch_size, num_tokens_after, name_prefix + "mlp."),
        *_list_layer_scale_stages(config, name_prefix + "ls2", batch_size, num_tokens_after),
        _make_token_stage_without_flops(config, name_prefix + "residual2", batch_size, num_tokens_after),
    ]


def _list_token_reduction_stages(
    config: ModelConfig, batch_size: int, num_tokens: int, num_tokens_after: int, name_prefix: str
) -> list[Stage]:
    remaining = _make_token_stage_without_flops(
        config, name_prefix + ("merged" if config.merge_tokens else "kept"), batch_size, num_tokens_after
    )
    if not config.merge_tokens:
        return [remaining]
    patches = num_tokens - config.num_prefix_tokens
    sides = [(patches + 1) // 2, patches // 2]
    flops = 2 * batch_size * prod(sides) * config.head_width
    return [Stage(name_prefix + "likeness", ["batch", "first", "second"], [batch_size, *sides], flops=flops), remaining]


def _list_attention_stages(config: ModelConfig, batch_size: int, num_tokens: int, name_prefix: str) -> list[Stage]:
    width, heads, head_width = config.embed_dim, config.num_heads, config.head_width
    per_head = (["batch", "head", "token", "head_dim"], [batch_size, heads, num_tokens, head_width])
    weights = width * width + width * config.qkv_bias
    qk_norm = _count_norm_parameters(config, head_width) if config.qk_norm else 0
    scales = heads if config.attention == "lsa" else 0
    projection_flops = 2 * batch_size * num_tokens * width * width
    map_flops = 2 * batch_size * num_tokens * num_tokens * width
    stages = [
        Stage(name_prefix + "query", *per_head, parameters=weights + qk_norm, flops=projection_flops),
        Stage(name_prefix + "key", *per_head, parameters=weights + qk_norm, flops=projection_flops),
        Stage(name_prefix + "value", *per_head, parameters=weights, flops=projection_flops),
        Stage(
            name_prefix + "maps",
            ["batch", "head", "query", "key"],
            [batch_size, heads, num_tokens, num_tokens],
            scales,
            map_flops,
        ),
        Stage(name_prefix + "head_outputs", *per_head, flops=map_flops),
        Stage(name_prefix + "concat", ["batch", "token", "feature"], [batch_size, num_tokens, width]),
    ]
    if config.output_projection:
        stages.append(
            _make_linear_layer_stage(
                name_prefix + "proj", "feature", batch_size, num_tokens, width, width, config.proj_bias
            )
        )
    return stages


def _list_mlp_stages(config: ModelConfig, batch_size: int, num_tokens: int, name_prefix: str) -> list[Stage]:
    width, fc1_width = config.embed_dim, config.hidden_width
    hidden = fc1_width // 2 if config.mlp == "swiglu" else fc1_width
    return [
        _make_linear_layer_stage(
            name_prefix + "fc1", "hidden", batch_size, num_tokens, width, fc1_width, config.proj_bias
        ),
        Stage(name_prefix + "activation", ["batch", "token", "hidden"], [batch_size, num_tokens, hidden]),
        _make_linear_layer_stage(
            name_prefix + "fc2", "feature", batch_size, num_tokens, hidden, width, config.proj_bias
        ),
    ]


def _list_head_stages(config: ModelConfig, batch_size: int, num_tokens: int) -> list[Stage]:
    width, pooled = config.embed_dim, ["batch", "feature"]
    pools_first = config.global_pool == "avg"
    patches = max(0, num_tokens - config.num_prefix_tokens)
    has_scores = config.global_pool == "seq"
    stages = [] if pools_first else _list_norm_stages(config, "norm", batch_size, num_tokens)
    stages.append(
        Stage(
            "pool",
            pooled,
            [batch_size, width],
            parameters=has_scores * (width + 1),
            flops=has_scores * 2 * batch_size * patches * width,
        )
    )
    norm = _count_norm_parameters(config, width)
    if pools_first and norm:
        stages.append(Stage("fc_norm", pooled, [batch_size, width], parameters=norm))
    if config.num_classes:
        classes = config.num_classes
        weights, flops = (width + 1) * classes, 2 * batch_size * width * classes
        stages.append(Stage("head", ["batch", "class"], [batch_size, classes], parameters=weights, flops=flops))
    return stages


def count_parameters(config: ModelConfig) -> int:
    """Count the trainable parameters of a model."""
    return sum(stage.parameters for stage in list_stages(config))


def count_forward_flops_per_image(config: ModelConfig, num_visible_patches: int | None = None) -> int:
    """Count the FLOPs of one image's forward pass, as papers do.

    With `num_visible_patches`, all patches are embedded and this number enters the blocks (MAE)."""
    if num_visible_patches is None:
        return sum(stage.flops for stage in list_stages(config))
    blocks = list_stages_from_first_block(config, config.num_prefix_tokens + num_visible_patches)
    return sum(stage.flops for stage in [*_list_embedding_stages(config, 1), *blocks])


def _make_linear_layer_stage(
    name: str, output_axis: str, batch_size: int, num_tokens: int, in_features: int, out_features: int, has_bias: bool
) -> Stage:
    return Stage(
        name,
        ["batch", "token", output_axis],
        [batch_size, num_tokens, out_features],
        parameters=in_features * out_features + out_features * has_bias,
        flops=2 * batch_size * num_tokens * in_features * out_features,
    )


def _list_norm_stages(config: ModelConfig, name: str, batch_size: int, num_tokens: int) -> list[Stage]:
    parameters = _count_norm_parameters(config, config.embed_dim)
    return [_make_token_stage_without_flops(config, name, batch_size, num_tokens, parameters)] if parameters else []


def _list_layer_scale_stages(config: ModelConfig, name: str, batch_size: int, num_tokens: int) -> list[Stage]:
    return (
        []
        if config.init_values is None
        else [_make_token_stage_without_flops(config, name, batch_size, num_tokens, config.embed_dim)]
    )


def _make_token_stage_without_flops(
    config: ModelConfig, name: str, batch_size: int, num_tokens: int, num_parameters: int = 0
) -> Stage:
    return Stage(
        name, ["batch", "token", "feature"], [batch_size, num_tokens, config.embed_dim], parameters=num_parameters
    )


def _count_norm_parameters(config: ModelConfig, width: int) -> int:
    return {"layernorm": 2, "rmsnorm": 1, "none": 0}[config.norm] * width
