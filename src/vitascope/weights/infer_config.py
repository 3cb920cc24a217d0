"""Infer ModelConfig from weights with timm's names. Settings that the shapes do not define are assumed and reported."""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from vitascope.errors import UserError, format_count
from vitascope.model.anatomy import count_parameters
from vitascope.model.config import ModelConfig, Size, as_pair
from vitascope.model.vit import VisionTransformer
from vitascope.weights.files import read_safetensors_shapes
from vitascope.weights.model_info import ModelSettings, StateDict

HEAD_WIDTH = 64  # of published plain ViTs, except those in NUM_HEADS_BY_WIDTH
# ViT-so400m, ViT-H, ViT-g and ViT-G; the larger models of AIMv2.
NUM_HEADS_BY_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 2048: 16, 3072: 24}
MAX_ALLOCATED_FACTOR = 4  # a model may have this many times the parameters of the weights before it is refused unbuilt
NORM_EPS_BY_LIBRARY = {"transformers": 1e-12}  # for all others 1e-6


class InferredConfig(NamedTuple):
    config: ModelConfig
    assumptions: list[str]  # for the user


def infer_config_and_assumptions(
    weights: StateDict,
    library: str,
    source_name: str,
    *,
    requested_size: Size | None = None,
    **known_settings: Any,
) -> InferredConfig:
    """Infer the config from names and shapes. `known_settings`, from config.json or the user, have priority.

    `requested_size`: the image size, used if nothing else defines it."""
    required = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
    missing = [name for name in required if name not in weights]
    if missing:
        raise UserError(f"{source_name} is not a plain ViT: it has no {missing[0]}.")
    width, channels, rows, columns = weights["patch_embed.proj.weight"].shape
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    settings: ModelSettings = {
        "patch_size": rows if rows == columns else (rows, columns),
        "in_chans": channels,
        "num_classes": weights["head.weight"].shape[0] if "head.weight" in weights else 0,
        "embed_dim": width,
        "depth": 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")),
        "class_token": "cls_token" in weights,
        "reg_tokens": registers,
        **_infer_block_settings(weights, width),
    }
    settings["global_pool"] = _infer_pooling(weights)
    assumptions: list[str] = []
    settings |= _infer_image_size_and_add_assumptions(
        weights, settings, known_settings, requested_size, assumptions, source_name
    )
    settings |= _infer_num_heads_and_add_assumption(width, known_settings, assumptions, source_name)
    settings["norm_eps"] = known_settings.get("norm_eps", NORM_EPS_BY_LIBRARY.get(library, 1e-6))
    if "norm_eps" not in known_settings:
        assumptions.append(f"norm_eps={settings['norm_eps']:g} (as in {library}'s ViTs)")
    config = ModelConfig(**(settings | {name: value for name, value in known_settings.items() if value is not None}))
    check_weights_fit_config(weights, config, source_name)
    return InferredConfig(config, assumptions)


def check_file_is_large_enough(path: Path, config: ModelConfig) -> None:
    """Raise an error if a safetensors file has fewer parameters than the model of this config. Nothing is loaded."""
    check_enough_parameters(config, sum(map(math.prod, read_safetensors_shapes(path).values())), str(path))


def check_enough_parameters(config: ModelConfig, num_elements: int, source_name: str) -> None:
    """Raise an error if the model of this config needs more parameters than there are. Nothing is allocated."""
    if (required := count_parameters(config)) > num_elements:
        raise UserError(
            f"{source_name} does not match its config.json: it has {format_count(num_elements, 'parameter')}, but a "
            f"model of these settings has {required:,}. Restore the file that was changed, or train again."
        )


def check_weights_fit_config(weights: StateDict, config: ModelConfig, source_name: str) -> None:
    """Raise an error unless names and shapes match the model of this config."""
    num_elements = sum(weight.numel() for weight in weights.values())
    if count_parameters(config) > MAX_ALLOCATED_FACTOR * num_elements:  # below it, the weights that differ are named
        check_enough_parameters(config, num_elements, source_name)
    expected = VisionTransformer(config).state_dict()
    extra, missing = sorted(set(weights) - set(expected)), sorted(set(expected) - set(weights))
    if extra or missing:
        problems = (("has the unexpected weights", extra), ("lacks", missing))
        parts = [f"{problem} {', '.join(names[:3])}" for problem, names in problems if names]
        raise UserError(f"{source_name} does not fit a plain ViT: it {' and '.join(parts)}.")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise UserError(
                f"{source_name}: {name} has shape {list(weight.shape)}, but the other weights require "
                f"{list(expected[name].shape)}."
            )


def _infer_block_settings(weights: StateDict, embed_dim: int) -> ModelSettings:
    wide, narrow = (weights.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    gated = wide is not None and narrow is not None and wide.shape[0] == 2 * narrow.shape[1]
    return {
        "mlp_ratio": weights["blocks.0.mlp.fc1.weight"].shape[0] / embed_dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "proj_bias": "blocks.0.mlp.fc1.bias" in weights,
        "qk_norm": "blocks.0.attn.q_norm.weight" in weights,
        "init_values": 1.0 if "blocks.0.ls1.gamma" in weights else None,
        "norm": "layernorm" if "blocks.0.norm1.bias" in weights else "rmsnorm",
        "mlp": "swiglu" if gated else "gelu",
    }


def _infer_pooling(weights: StateDict) -> str:
    if any(re.match(r"pool\.score", name) for name in weights):
        return "seq"
    return "avg" if "fc_norm.weight" in weights or "cls_token" not in weights else "token"


def _infer_image_size_and_add_assumptions(
    weights: StateDict,
    settings: ModelSettings,
    known_settings: ModelSettings,
    requested_size: Size | None,
    assumptions: list[str],
    source_name: str,
) -> ModelSettings:
    """Infer the image size from the number of positions, assuming a square; else use the requested size if it fits.

    Each assumption is appended to `assumptions`."""
    table, (rows, columns) = weights.get("pos_embed"), as_pair(settings["patch_size"])
    size = known_settings.get("img_size", requested_size)
    if table is None:
        if size is None:
            raise UserError(
                f"{source_name} has no pos_embed, so its image size is unknown. "
                f"{_format_setting_hint('img_size=32', source_name)}"
            )
        if "img_size" not in known_settings:
            assumptions.append(f"img_size={size} (as requested, because the weights do not define it)")
        return {"positions": "none", "img_size": size}
    prefix, num_positions = int(settings["class_token"]) + settings["reg_tokens"], table.shape[1]
    if "img_size" not in known_settings and (
        side := _infer_square_grid_side(num_positions, prefix, settings["reg_tokens"], known_settings)
    ):
        size = side * rows if rows == columns else (side * rows, side * columns)
        assumptions.append(f"img_size={size} (a square grid of {side}×{side} patches)")
        return {"img_size": size, "no_embed_class": prefix > 0 and side * side == num_positions}
    patches = (as_pair(size)[0] // rows) * (as_pair(size)[1] // columns) if size is not None else 0
    if "img_size" not in known_settings and patches not in (num_positions, num_positions - prefix):
        raise UserError(
            f"{source_name}: {num_positions} positions do not form a square grid, so the image size is unknown. "
            f"{_format_setting_hint('img_size=[rows,columns]', source_name)}"
        )
    if "img_size" not in known_settings:
        assumptions.append(
            f"img_size={size} (as requested, because {num_positions} positions do not form a square grid)"
        )
    return {"img_size": size, "no_embed_class": prefix > 0 and patches == num_positions}


def _infer_square_grid_side(
    num_positions: int, num_prefix_tokens: int, num_registers: int, known_settings: ModelSettings
) -> int | None:
    """Return the side of the square patch grid, None if there is none.

    Published models with registers have positions only for patches: 9 positions with 5 prefix tokens are 3×3 patches.
    Without registers, all tokens have positions."""
    counts = (
        [num_positions, num_positions - num_prefix_tokens]
        if num_registers
        else [num_positions - num_prefix_tokens, num_positions]
    )
    if "no_embed_class" in known_settings:
        counts = [num_positions if known_settings["no_embed_class"] else num_positions - num_prefix_tokens]
    return next((math.isqrt(count) for count in counts if count > 0 and math.isqrt(count) ** 2 == count), None)


def _infer_num_heads_and_add_assumption(
    embed_dim: int, known_settings: ModelSettings, assumptions: list[str], source_name: str
) -> ModelSettings:
    if known_settings.get("num_heads") is not None:
        return {}
    num_heads = guess_num_heads(embed_dim)
    if num_heads is None:
        raise UserError(
            f"{source_name}: embed_dim={embed_dim} is not a multiple of {HEAD_WIDTH}, so num_heads is unknown. "
            f"{_format_setting_hint('num_heads=', source_name)}"
        )
    reason = f"embed_dim {embed_dim} / {HEAD_WIDTH} per head"
    if embed_dim in NUM_HEADS_BY_WIDTH:
        reason = f"as in published ViTs with embed_dim {embed_dim}"
    assumptions.append(f"num_heads={num_heads} ({reason})")
    return {"num_heads": num_heads}


def guess_num_heads(embed_dim: int) -> int | None:
    """Return the number of heads of published ViTs with this width, None if it is unknown."""
    default = None if embed_dim % HEAD_WIDTH else embed_dim // HEAD_WIDTH
    return NUM_HEADS_BY_WIDTH.get(embed_dim, default)


def _format_setting_hint(missing_setting: str, source_name: str) -> str:
    """Return how to set what the weights do not define."""
    return f"Set it with vitascope adapt {source_name} {missing_setting} --out FOLDER, then use that folder."
