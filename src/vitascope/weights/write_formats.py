"""Write a model as the files that Vitascope, timm or transformers load."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.weights.model_info import ModelInfo
from vitascope.weights.parameter_names import convert_to_transformers_names

JsonFiles = dict[str, dict[str, Any]]  # name -> what the JSON file says
SETTINGS_SHARED_WITH_TIMM = (
    *("img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "global_pool"),
    *("qkv_bias", "qk_norm", "proj_bias", "init_values", "class_token", "reg_tokens", "no_embed_class"),
)
TIMM_NORM_EPS = 1e-6
VITASCOPE_ONLY_DEFAULTS = {"tokenizer": "patch", "attention": "plain", "merge_tokens": 0, "drop_tokens": 0}


def convert_for_vitascope(model_info: ModelInfo, weights: dict[str, Tensor]) -> tuple[JsonFiles, dict[str, Tensor]]:
    return {"config.json": model_info.as_dict()}, weights


def convert_for_timm(model_info: ModelInfo, weights: dict[str, Tensor]) -> tuple[JsonFiles, dict[str, Tensor]]:
    """For `timm.create_model("local-dir:FOLDER", pretrained=True)`; the config overrides the architecture's sizes."""
    config = model_info.model
    check_timm_support(config)
    others = {"mlp=swiglu": config.mlp == "swiglu", f"norm_eps={config.norm_eps:g}": config.norm_eps != TIMM_NORM_EPS}
    _raise_if_unsupported("A folder for timm cannot store", others)
    args = make_timm_settings(config)
    if config.norm == "rmsnorm":
        args["norm_layer"] = "rmsnorm"
    rows, columns = config.image_shape
    told = {
        "input_size": [config.in_chans, rows, columns],
        "fixed_input_size": True,
        "mean": list(model_info.preparation.mean),
        "std": list(model_info.preparation.std),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "num_classes": config.num_classes,
    }
    said = {"architecture": "vit_tiny_patch16_224", "num_classes": config.num_classes, "num_features": config.embed_dim}
    said |= {"label_names": model_info.classes, "model_args": args, "pretrained_cfg": told}
    return {"config.json": said}, weights


def convert_for_transformers(model_info: ModelInfo, weights: dict[str, Tensor]) -> tuple[JsonFiles, dict[str, Tensor]]:
    """`ViTForImageClassification.from_pretrained(FOLDER)`, and its image processor."""
    config = model_info.model
    check_transformers_support(config)
    rows, columns = config.image_shape
    said = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.hidden_width,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": config.norm_eps,
        "image_size": rows,
        "patch_size": config.patch_shape[0],
        "num_channels": config.in_chans,
        "qkv_bias": config.qkv_bias,
        "id2label": {str(number): name for number, name in enumerate(model_info.classes)},
        "label2id": {name: number for number, name in enumerate(model_info.classes)},
    }
    # CLIP's processor: it resizes and centre-crops as Vitascope does. ViT's own would distort non-square images.
    prepared = {"image_processor_type": "CLIPImageProcessor", "resample": 3, "do_convert_rgb": config.in_chans == 3}
    prepared |= {"do_resize": True, "size": {"shortest_edge": rows}}
    prepared |= {"do_center_crop": True, "crop_size": {"height": rows, "width": columns}}
    prepared |= {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    prepared |= {"image_mean": list(model_info.preparation.mean), "image_std": list(model_info.preparation.std)}
    return {"config.json": said, "preprocessor_config.json": prepared}, convert_to_transformers_names(weights)


def make_timm_settings(config: ModelConfig) -> dict[str, Any]:
    """The settings as timm's VisionTransformer takes them."""
    words: dict[str, Any] = {name: getattr(config, name) for name in SETTINGS_SHARED_WITH_TIMM}
    words["pos_embed"] = "learn" if config.positions == "learned" else "none"
    if int(config.embed_dim * config.mlp_ratio) != config.hidden_width:  # timm rounds down without our allowance
        words["mlp_ratio"] = (config.hidden_width + 0.5) / config.embed_dim
    return words


def check_timm_support(config: ModelConfig) -> None:
    """Raise an error for settings that timm's VisionTransformer does not support."""
    ours_alone = {"seq pooling": config.global_pool == "seq", "relu2": config.mlp == "relu2"}
    ours_alone |= {f"positions={config.positions}": config.positions not in ("learned", "none")}
    ours_alone |= {"norm=none": config.norm == "none", "output_projection=false": not config.output_projection}
    ours_alone |= {"init_values=0": config.init_values == 0}  # timm takes it for no LayerScale
    ours_alone |= _find_vitascope_only_settings(config)
    _raise_if_unsupported("timm's VisionTransformer does not support", ours_alone)


def check_transformers_support(config: ModelConfig) -> None:
    """Raise an error for settings that transformers' ViT does not support."""
    ours_alone = {
        f"global_pool={config.global_pool}": config.global_pool != "token",
        "registers": config.reg_tokens > 0,
        f"positions={config.positions}": config.positions != "learned" or config.no_embed_class,
        f"norm={config.norm}": config.norm != "layernorm",
        f"mlp={config.mlp}": config.mlp != "gelu",
        "QK-norm": config.qk_norm,
        "LayerScale": config.init_values is not None,
        "output_projection=false": not config.output_projection,
        "proj_bias=false": not config.proj_bias,
        "a model without classifier": config.num_classes == 0,
        "non-square images or patches": config.grid[0] != config.grid[1]
        or config.patch_shape[0] != config.patch_shape[1],
    }
    ours_alone |= _find_vitascope_only_settings(config)
    _raise_if_unsupported("transformers' ViT does not support", ours_alone)


def _find_vitascope_only_settings(config: ModelConfig) -> dict[str, bool]:
    """Settings that neither timm nor transformers support."""
    found = {
        f"{name}={getattr(config, name)}": getattr(config, name) != plain
        for name, plain in VITASCOPE_ONLY_DEFAULTS.items()
    }
    return found | {"causal attention": config.causal}


def _raise_if_unsupported(error_prefix: str, unsupported_settings: dict[str, bool]) -> None:
    missing = [name for name, used in unsupported_settings.items() if used]
    if missing:
        raise UserError(
            f"{error_prefix} {' or '.join(missing)}. Export to ONNX or torch, or save for Vitascope instead."
        )


CONVERTERS_BY_LIBRARY: dict[str, Callable[[ModelInfo, dict[str, Tensor]], tuple[JsonFiles, dict[str, Tensor]]]] = {
    "vitascope": convert_for_vitascope,
    "timm": convert_for_timm,
    "transformers": convert_for_transformers,
}
