"""Convert parameter names of transformers, torchvision, DINO, MAE and DINOv2 to timm's names, and back."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vitascope.errors import UserError
from vitascope.weights.model_info import ModelSettings, StateDict

RenameRules = tuple[tuple[str, str], ...]  # regular expression of the library's name, replacement with timm's name
Note = str  # a sentence for the user

# Names in files. The shorter names that transformers 5 has in memory (q_proj, layers.0) are read too.
TRANSFORMERS_RULES: RenameRules = (
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
TORCHVISION_RULES: RenameRules = (
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
TIMM_RULES: RenameRules = (
    (r"blocks\.(\d+)\.mlp\.w12\.", r"blocks.\1.mlp.fc1."),
    (r"blocks\.(\d+)\.mlp\.w3\.", r"blocks.\1.mlp.fc2."),
)


class LibraryNames(NamedTuple):
    typical_name: str  # regular expression of a name that only this library has
    rules: RenameRules


RULES_BY_LIBRARY = {
    "timm": LibraryNames(r"blocks\.0\.attn\.qkv\.weight", TIMM_RULES),
    "transformers": LibraryNames(r"(?:\w+\.)?embeddings\.patch_embeddings\.projection\.weight", TRANSFORMERS_RULES),
    "torchvision": LibraryNames(r"conv_proj\.weight", TORCHVISION_RULES),
}
TRANSFORMERS_PREFIXES = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.")
# Weights used only in training: MAE's decoder, mask tokens, poolers, projections.
DROPPED_NAME_PATTERN = r"decoder|mask_token|pooler\.|head_dist\.|head\.(?!weight$|bias$)|dino_head|ibot_head"


@dataclass(frozen=True)
class RenamedWeights:
    """Weights with timm's names. `library`: where the original names come from."""

    library: str
    weights: StateDict
    dropped_names: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    settings: ModelSettings = field(default_factory=dict)  # inferred from the names


def convert_weights_to_timm_format(tensors: StateDict, source_name: str) -> RenamedWeights:
    """Rename the weights. Weights that are used only in training are dropped."""
    library = detect_library_by_names(tensors)
    if library is None:
        some = ", ".join(list(tensors)[:3])
        raise UserError(
            f"{source_name} does not have the parameter names of a ViT of timm, transformers or torchvision. "
            f"It has {len(tensors)} names, such as {some}."
        )
    rules = RULES_BY_LIBRARY[library].rules
    renamed = {
        _rename_by_first_matching_rule(
            _remove_transformers_prefix(name) if library == "transformers" else name, rules
        ): t
        for name, t in tensors.items()
    }
    dropped = sorted(name for name in renamed if re.match(DROPPED_NAME_PATTERN, name))
    weights = _pack_qkv({name: tensor for name, tensor in renamed.items() if name not in dropped})
    settings = {"no_embed_class": True} if "register_tokens" in weights else {}
    notes = (
        _convert_registers_in_place(weights),
        _convert_distillation_token_in_place(weights),
        _drop_wide_classifier_in_place(weights, dropped),
    )
    return RenamedWeights(library, weights, dropped, [note for note in notes if note], settings)


def detect_library_by_names(tensors: StateDict) -> str | None:
    """Return the library whose typical parameter name is there."""
    for library, (typical_name, _) in RULES_BY_LIBRARY.items():
        if any(re.fullmatch(typical_name, name) for name in tensors):
            return library
    return None


def _remove_transformers_prefix(weight_name: str) -> str:
    return next(
        (weight_name.removeprefix(base) for base in TRANSFORMERS_PREFIXES if weight_name.startswith(base)), weight_name
    )


def _rename_by_first_matching_rule(weight_name: str, rules: RenameRules) -> str:
    for pattern, replacement in rules:
        renamed, num_replaced = re.subn(rf"^{pattern}", replacement, weight_name)
        if num_replaced:
            return renamed
    return weight_name


def _pack_qkv(weights: StateDict) -> StateDict:
    """Concatenate the projections of query, key and value to timm's single one."""
    packed: StateDict = {}
    for name, tensor in weights.items():
        if match := re.fullmatch(r"(blocks\.\d+\.attn\.)q\.(weight|bias)", name):
            start, kind = match.groups()
            parts = [weights.get(f"{start}{part}.{kind}") for part in "qkv"]
            if any(part is None for part in parts):
                raise UserError(f"The weights contain {name}, but not the key and value of the same layer.")
            packed[f"{start}qkv.{kind}"] = torch.cat([part for part in parts if part is not None])
        elif not re.fullmatch(r"blocks\.\d+\.attn\.[kv]\.(weight|bias)", name):
            packed[name] = tensor
    return packed


def _convert_registers_in_place(weights: StateDict) -> Note | None:
    """Rename register tokens in place, and add the class token's position embedding to the class token."""
    if "register_tokens" not in weights:
        return None
    weights["reg_token"] = weights.pop("register_tokens")
    table = weights["pos_embed"]
    weights["cls_token"], weights["pos_embed"] = weights["cls_token"] + table[:, :1], table[:, 1:]
    return "the class token's position embedding was added to the class token, as timm does for DINOv2 with registers"


def _convert_distillation_token_in_place(weights: StateDict) -> Note | None:
    """Convert DeiT's distillation token to a register token in place; attention is unchanged."""
    if "dist_token" not in weights:
        return None
    weights["reg_token"] = weights.pop("dist_token")
    return "DeiT's distillation token became a register token; predictions use only the class token's head"


def _drop_wide_classifier_in_place(weights: StateDict, dropped_names: list[str]) -> Note | None:
    """Drop the classifier of transformers' DINOv2: its input is the class token and the mean of the patches."""
    head, width = weights.get("head.weight"), weights["patch_embed.proj.weight"].shape[0]
    if head is None or head.shape[1] == width:
        return None
    dropped_names += [name for name in ("head.weight", "head.bias") if weights.pop(name, None) is not None]
    return f"the classifier was removed: it needs {head.shape[1]} features, but a token has {width}"


def convert_weights_to_transformers_format(weights: StateDict) -> StateDict:
    """Rename a plain ViT's weights to the names in files of transformers' ViTForImageClassification."""
    renamed: StateDict = {}
    outer_names = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj.": "vit.embeddings.patch_embeddings.projection.",
        "norm.": "vit.layernorm.",
        "head.": "classifier.",
    }
    block_names = {
        "norm1.": "layernorm_before.",
        "attn.proj.": "attention.output.dense.",
        "norm2.": "layernorm_after.",
        "mlp.fc1.": "intermediate.dense.",
        "mlp.fc2.": "output.dense.",
    }
    for name, tensor in weights.items():
        if match := re.fullmatch(r"blocks\.(\d+)\.(.*?)(weight|bias)", name):
            layer, part, kind = match.groups()
            start = f"vit.encoder.layer.{layer}."
            if part == "attn.qkv.":
                for projection, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                    renamed[f"{start}attention.attention.{projection}.{kind}"] = rows.contiguous()
            else:
                renamed[f"{start}{block_names[part]}{kind}"] = tensor
        else:
            start = next(start for start in outer_names if name.startswith(start))
            renamed[outer_names[start] + name.removeprefix(start)] = tensor
    return renamed
