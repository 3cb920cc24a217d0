"""Write a model as the files that Vitascope, timm or transformers load, and compare it with timm's model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.model.config import ModelConfig
from vitascope.model.vit import VisionTransformer
from vitascope.weights.model_info import JsonObject, ModelInfo, ModelSettings, StateDict
from vitascope.weights.parameter_names import convert_weights_to_transformers_format


class ModelFiles(NamedTuple):
    json_files: dict[str, JsonObject]  # contents by file name
    weights: StateDict


Converter = Callable[[ModelInfo, StateDict], ModelFiles]
SETTINGS_SHARED_WITH_TIMM = (
    *("img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "global_pool"),
    *("qkv_bias", "qk_norm", "proj_bias", "init_values", "class_token", "reg_tokens", "no_embed_class"),
)
TIMM_NORM_EPS = 1e-6
VITASCOPE_ONLY_DEFAULTS = {"tokenizer": "patch", "attention": "plain", "merge_tokens": 0, "drop_tokens": 0}


def make_vitascope_files(model_info: ModelInfo, weights: StateDict) -> ModelFiles:
    return ModelFiles({"config.json": model_info.as_dict()}, weights)


def make_timm_files(model_info: ModelInfo, weights: StateDict) -> ModelFiles:
    """Make the files for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    `model_args` in config.json overrides the architecture's sizes."""
    config = model_info.model
    check_timm_support(config)
    in_use = {"mlp=swiglu": config.mlp == "swiglu", f"norm_eps={config.norm_eps:g}": config.norm_eps != TIMM_NORM_EPS}
    _raise_if_unsupported("A folder for timm cannot store", in_use)
    args = make_timm_constructor_settings(config)
    if config.norm == "rmsnorm":
        args["norm_layer"] = "rmsnorm"
    rows, columns = config.image_shape
    pretrained_cfg = {
        "input_size": [config.in_chans, rows, columns],
        "fixed_input_size": True,
        "mean": list(model_info.preparation.mean),
        "std": list(model_info.preparation.std),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "num_classes": config.num_classes,
    }
    config_json = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": config.num_classes,
        "num_features": config.embed_dim,
        "label_names": model_info.classes,
        "model_args": args,
        "pretrained_cfg": pretrained_cfg,
        "vitascope": {"stored": list(model_info.stored)},
    }
    return ModelFiles({"config.json": config_json}, weights)


def make_transformers_files(model_info: ModelInfo, weights: StateDict) -> ModelFiles:
    """Make the files for `ViTForImageClassification.from_pretrained(FOLDER)` and its image processor."""
    config = model_info.model
    check_transformers_support(config)
    rows, columns = config.image_shape
    config_json = {
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
        "id2label": {str(index): name for index, name in enumerate(model_info.classes)},
        "label2id": {name: index for index, name in enumerate(model_info.classes)},
        "vitascope": {"stored": list(model_info.stored)},
    }
    # CLIP's processor resizes and centre-crops as Vitascope does. ViT's processor would distort non-square images.
    processor_json = {
        "image_processor_type": "CLIPImageProcessor",
        "resample": 3,
        "do_convert_rgb": config.in_chans == 3,
    }
    processor_json |= {"do_resize": True, "size": {"shortest_edge": rows}}
    processor_json |= {"do_center_crop": True, "crop_size": {"height": rows, "width": columns}}
    processor_json |= {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    processor_json |= {"image_mean": list(model_info.preparation.mean), "image_std": list(model_info.preparation.std)}
    json_files = {"config.json": config_json, "preprocessor_config.json": processor_json}
    return ModelFiles(json_files, convert_weights_to_transformers_format(weights))


def make_timm_constructor_settings(config: ModelConfig) -> ModelSettings:
    """Return the parameters of timm's VisionTransformer."""
    settings: ModelSettings = {name: getattr(config, name) for name in SETTINGS_SHARED_WITH_TIMM}
    settings["pos_embed"] = "learn" if config.positions == "learned" else "none"
    if int(config.embed_dim * config.mlp_ratio) != config.hidden_width:  # timm rounds down
        settings["mlp_ratio"] = (config.hidden_width + 0.5) / config.embed_dim
    return settings


def check_timm_support(config: ModelConfig) -> None:
    """Raise an error for settings that timm's VisionTransformer does not support."""
    in_use = {"global_pool=seq": config.global_pool == "seq", "mlp=relu2": config.mlp == "relu2"}
    in_use |= {f"positions={config.positions}": config.positions not in ("learned", "none")}
    in_use |= {"norm=none": config.norm == "none", "output_projection=false": not config.output_projection}
    in_use |= {"init_values=0": config.init_values == 0}  # timm reads 0 as no LayerScale
    in_use |= _flag_vitascope_only_settings_in_use(config)
    _raise_if_unsupported("timm's VisionTransformer does not support", in_use)


def check_transformers_support(config: ModelConfig) -> None:
    """Raise an error for settings that transformers' ViT does not support."""
    in_use = {
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
    in_use |= _flag_vitascope_only_settings_in_use(config)
    _raise_if_unsupported("transformers' ViT does not support", in_use)


def _flag_vitascope_only_settings_in_use(config: ModelConfig) -> dict[str, bool]:
    """Return for each setting that neither timm nor transformers support whether it is in use."""
    in_use = {
        f"{name}={getattr(config, name)}": getattr(config, name) != default
        for name, default in VITASCOPE_ONLY_DEFAULTS.items()
    }
    return in_use | {"causal attention": config.causal}


def _raise_if_unsupported(error_prefix: str, unsupported_settings_in_use: dict[str, bool]) -> None:
    unsupported = [name for name, in_use in unsupported_settings_in_use.items() if in_use]
    if unsupported:
        raise UserError(f"{error_prefix} {' or '.join(unsupported)}. Export to ONNX or torch, or use --for vitascope.")


CONVERTERS_BY_LIBRARY: dict[str, Converter] = {
    "vitascope": make_vitascope_files,
    "timm": make_timm_files,
    "transformers": make_transformers_files,
}


@dataclass(frozen=True)
class TimmComparison:
    """The largest difference over all logits, and over the gradients of all parameters."""

    max_logit_difference: float
    max_gradient_difference: float


def build_timm_model(config: ModelConfig) -> nn.Module:
    """Build timm's VisionTransformer with the same settings. Unsupported settings raise an error."""
    import timm
    from timm.layers.mlp import SwiGLUPacked
    from timm.layers.norm import RmsNorm

    check_timm_support(config)
    settings: dict[str, Any] = make_timm_constructor_settings(config) | {"num_classes": config.num_classes}
    norm = nn.LayerNorm if config.norm == "layernorm" else RmsNorm
    settings["norm_layer"] = lambda width, **options: norm(width, eps=config.norm_eps, **options)
    if config.mlp == "swiglu":
        settings |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    return timm.models.VisionTransformer(**settings)


def compare_outputs_gradients_with_timm(
    config: ModelConfig, dtype: torch.dtype, *, batch_size: int = 2, seed: int = 0
) -> TimmComparison:
    """Load timm's weights into Vitascope's model, run both, and compare."""
    generator = torch.Generator().manual_seed(seed)
    timm_model = build_timm_model(config).to(dtype)
    for parameter in timm_model.parameters():  # zeros and ones of the initialisation would hide mistakes
        parameter.data.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.05)
    model = VisionTransformer(config).to(dtype)
    model.load_state_dict(timm_model.state_dict())
    images = torch.randn(batch_size, config.in_chans, *config.image_shape, generator=generator, dtype=dtype)
    output = _compute_logits_and_parameter_gradients(model.eval(), images)
    timm_output = _compute_logits_and_parameter_gradients(timm_model.eval(), images)
    differences = [
        _compute_max_difference(output.gradients[name], gradient) for name, gradient in timm_output.gradients.items()
    ]
    return TimmComparison(
        max_logit_difference=_compute_max_difference(output.logits, timm_output.logits).item(),
        max_gradient_difference=torch.stack(differences).max().item(),
    )


class LogitsAndGradients(NamedTuple):
    logits: Tensor
    gradients: StateDict  # of the parameters


def _compute_logits_and_parameter_gradients(model: nn.Module, images: Tensor) -> LogitsAndGradients:
    logits = model(images)
    F.cross_entropy(logits, torch.arange(len(images)) % logits.shape[1]).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return LogitsAndGradients(logits.detach(), gradients)


def _compute_max_difference(vitascope_values: Tensor, timm_values: Tensor) -> Tensor:
    return (vitascope_values - timm_values).abs().max()  # a tensor: its max keeps NaN, unlike Python's
