"""Convert parameter names of transformers, torchvision, DINO, MAE and DINOv2 to timm's names, and back."""

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitascope.errors import UserError

# Names in files; transformers 5 has shorter ones in memory (q_proj, layers.0), which are read too.
TRANSFORMERS_RULES = (
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.register_tokens", "register_tokens"),
    (r"embeddings\.distillation_token", "dist_token"),
    (r"embeddings\.mask_token", "mask_token"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.attention\.(?:attention\.query|q_proj)\.", r"blocks.\1.attn.q."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.attention\.(?:attention\.key|k_proj)\.", r"blocks.\1.attn.k."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.attention\.(?:attention\.value|v_proj)\.", r"blocks.\1.attn.v."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.attention\.(?:output\.dense|o_proj)\.", r"blocks.\1.attn.proj."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.(?:intermediate\.dense|mlp\.fc1)\.", r"blocks.\1.mlp.fc1."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.(?:output\.dense|mlp\.fc2)\.", r"blocks.\1.mlp.fc2."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.mlp\.weights_in\.", r"blocks.\1.mlp.fc1."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.mlp\.weights_out\.", r"blocks.\1.mlp.fc2."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.(?:layernorm_before|norm1)\.", r"blocks.\1.norm1."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.(?:layernorm_after|norm2)\.", r"blocks.\1.norm2."),
    (r"(?:encoder\.layer|layers)\.(\d+)\.layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (r"layernorm\.", "norm."),
    (r"(?:cls_)?classifier\.", "head."),
    (r"distillation_classifier\.", "head_dist."),
)
TORCHVISION_RULES = (
    (r"class_token", "cls_token"),
    (r"conv_proj\.", "patch_embed.proj."),
    (r"encoder\.pos_embedding", "pos_embed"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.ln_1\.", r"blocks.\1.norm1."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.ln_2\.", r"blocks.\1.norm2."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_", r"blocks.\1.attn.qkv."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.", r"blocks.\1.attn.proj."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:0|linear_1)\.", r"blocks.\1.mlp.fc1."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:3|linear_2)\.", r"blocks.\1.mlp.fc2."),
    (r"encoder\.ln\.", "norm."),
    (r"heads\.head\.", "head."),
)
TIMM_RULES = (
    (r"blocks\.(\d+)\.mlp\.w12\.", r"blocks.\1.mlp.fc1."),
    (r"blocks\.(\d+)\.mlp\.w3\.", r"blocks.\1.mlp.fc2."),
)
# Whose names they are -> a name that only those have, and how they are told in ours.
RULES_BY_LIBRARY: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "timm": (r"blocks\.0\.attn\.qkv\.weight", TIMM_RULES),
    "transformers": (r"(?:\w+\.)?embeddings\.patch_embeddings\.projection\.weight", TRANSFORMERS_RULES),
    "torchvision": (r"conv_proj\.weight", TORCHVISION_RULES),
}
TRANSFORMERS_PREFIXES = (
    "vit.",
    "deit.",
    "dinov2.",
    "dinov2_with_registers.",
)  # what transformers puts before the trunk's names
# Parts of a way of training, which answering does not need: MAE's decoder, mask tokens, poolers, projections.
DROPPED_NAME_PATTERN = r"decoder|mask_token|pooler\.|head_dist\.|head\.(?!weight$|bias$)|dino_head|ibot_head"


@dataclass(frozen=True)
class RenamedWeights:
    """Weights by timm's names, whose they were, and what was left out."""

    library: str
    weights: dict[str, Tensor]
    dropped_names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # of ModelConfig, where the names told them


def convert_to_timm_names(tensors: dict[str, Tensor], source_name: str) -> RenamedWeights:
    library = detect_library(tensors)
    if library is None:
        some = ", ".join(list(tensors)[:3])
        raise UserError(
            f"{source_name} does not have the parameter names of a ViT of timm, transformers or torchvision. "
            f"It has {len(tensors)} names, such as {some}."
        )
    rules = RULES_BY_LIBRARY[library][1]
    named = {
        _apply_rename_rules(_remove_transformers_prefix(name) if library == "transformers" else name, rules): t
        for name, t in tensors.items()
    }
    dropped = sorted(name for name in named if re.match(DROPPED_NAME_PATTERN, name))
    weights = _pack_qkv({name: tensor for name, tensor in named.items() if name not in dropped})
    settings = {"no_embed_class": True} if "register_tokens" in weights else {}
    notes = [
        words
        for words in (
            _convert_register_tokens(weights),
            _convert_distillation_token(weights),
            _drop_double_width_classifier(weights, dropped),
        )
        if words
    ]
    return RenamedWeights(library, weights, dropped, notes, settings)


def detect_library(tensors: dict[str, Tensor]) -> str | None:
    """By a name that only that library's ViTs have."""
    for library, (mark, _) in RULES_BY_LIBRARY.items():
        if any(re.fullmatch(mark, name) for name in tensors):
            return library
    return None


def _remove_transformers_prefix(weight_name: str) -> str:
    return next(
        (weight_name.removeprefix(base) for base in TRANSFORMERS_PREFIXES if weight_name.startswith(base)), weight_name
    )


def _apply_rename_rules(weight_name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for theirs, ours in rules:
        changed, found = re.subn(rf"^{theirs}", ours, weight_name)
        if found:
            return changed
    return weight_name


def _pack_qkv(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Three projections -> timm's one, in the order query, key, value."""
    packed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if found := re.fullmatch(r"(blocks\.\d+\.attn\.)q\.(weight|bias)", name):
            start, kind = found.groups()
            parts = [weights.get(f"{start}{part}.{kind}") for part in "qkv"]
            if any(part is None for part in parts):
                raise UserError(f"The weights contain {name}, but not the key and value of the same layer.")
            packed[f"{start}qkv.{kind}"] = torch.cat([part for part in parts if part is not None])
        elif not re.fullmatch(r"blocks\.\d+\.attn\.[kv]\.(weight|bias)", name):
            packed[name] = tensor
    return packed


def _convert_register_tokens(weights: dict[str, Tensor]) -> str | None:
    """DINOv2 adds positions before it puts registers in: the class token's position goes into the token itself."""
    if "register_tokens" not in weights:
        return None
    weights["reg_token"] = weights.pop("register_tokens")
    table = weights["pos_embed"]
    weights["cls_token"], weights["pos_embed"] = weights["cls_token"] + table[:, :1], table[:, 1:]
    return "the class token's position embedding was added to the class token, as timm does for DINOv2 with registers"


def _convert_distillation_token(weights: dict[str, Tensor]) -> str | None:
    """DeiT's second token becomes a register: other tokens read it as before."""
    if "dist_token" not in weights:
        return None
    weights["reg_token"] = weights.pop("dist_token")
    return "DeiT's distillation token became a register token; predictions use only the class token's head"


def _drop_double_width_classifier(weights: dict[str, Tensor], dropped_names: list[str]) -> str | None:
    """transformers' DINOv2 classifies by class token and mean of patches side by side; we read one of them."""
    head, width = weights.get("head.weight"), weights["patch_embed.proj.weight"].shape[0]
    if head is None or head.shape[1] == width:
        return None
    dropped_names += [name for name in ("head.weight", "head.bias") if weights.pop(name, None) is not None]
    return f"the classifier was removed: it needs {head.shape[1]} features, but a token has {width}"


def convert_to_transformers_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A plain ViT's weights in the names of transformers' ViTForImageClassification, as its files have them."""
    told: dict[str, Tensor] = {}
    fixed = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj.": "vit.embeddings.patch_embeddings.projection.",
        "norm.": "vit.layernorm.",
        "head.": "classifier.",
    }
    inner = {
        "norm1.": "layernorm_before.",
        "attn.proj.": "attention.output.dense.",
        "norm2.": "layernorm_after.",
        "mlp.fc1.": "intermediate.dense.",
        "mlp.fc2.": "output.dense.",
    }
    for name, tensor in weights.items():
        if found := re.fullmatch(r"blocks\.(\d+)\.(.*?)(weight|bias)", name):
            layer, part, kind = found.groups()
            start = f"vit.encoder.layer.{layer}."
            if part == "attn.qkv.":
                for word, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                    told[f"{start}attention.attention.{word}.{kind}"] = piece.contiguous()
            else:
                told[f"{start}{inner[part]}{kind}"] = tensor
        else:
            start = next(start for start in fixed if name.startswith(start))
            told[fixed[start] + name.removeprefix(start)] = tensor
    return told
