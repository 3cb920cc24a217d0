"""Convert PyTorch's attention and encoder layers to Vitascope's SelfAttention and Block, and back."""

from torch import nn
from torch.nn import functional as F

from vitascope.errors import UserError
from vitascope.model.attention import SelfAttention
from vitascope.model.block import Block, LayerScale
from vitascope.model.config import ModelConfig
from vitascope.model.mlp import ACTIVATIONS
from vitascope.weights.model_info import StateDict

ATTENTION_NAME_PREFIXES = {"in_proj_": "qkv.", "out_proj.": "proj."}  # both pack queries, keys and values in this order
BLOCK_NAME_PREFIXES = {f"self_attn.{name}": f"attn.{new_name}" for name, new_name in ATTENTION_NAME_PREFIXES.items()}
BLOCK_NAME_PREFIXES |= {"linear1.": "mlp.fc1.", "linear2.": "mlp.fc2.", "norm1.": "norm1.", "norm2.": "norm2."}


def from_torch(layer: nn.Module) -> SelfAttention | Block:
    """Return Vitascope's layer that computes the same, with a copy of the weights."""
    if isinstance(layer, nn.MultiheadAttention):
        return _convert_attention_from_torch(layer)
    if isinstance(layer, nn.TransformerEncoderLayer):
        return _convert_block_from_torch(layer)
    raise UserError(
        f"{type(layer).__name__} has no counterpart. Give an nn.MultiheadAttention or an nn.TransformerEncoderLayer."
    )


def to_torch(layer: nn.Module) -> nn.MultiheadAttention | nn.TransformerEncoderLayer:
    """Return PyTorch's layer (batch first) that computes the same, with a copy of the weights."""
    if isinstance(layer, SelfAttention):
        if layer.proj_drop.p:
            raise UserError("nn.MultiheadAttention has no dropout after its projection. Set proj_drop_rate=0.")
        return _convert_attention_to_torch(layer)
    if isinstance(layer, Block):
        return _convert_block_to_torch(layer)
    raise UserError(f"{type(layer).__name__} has no counterpart in PyTorch. Give a SelfAttention or a Block.")


def _convert_attention_from_torch(layer: nn.MultiheadAttention) -> SelfAttention:
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise UserError(
            "Only plain self-attention can be converted, without kdim, vdim, add_bias_kv and add_zero_attn."
        )
    bias = layer.in_proj_bias is not None
    attention = SelfAttention(
        layer.embed_dim, layer.num_heads, qkv_bias=bias, proj_bias=bias, attn_drop_rate=layer.dropout
    ).to(layer.in_proj_weight)
    attention.load_state_dict(_replace_name_prefixes(layer.state_dict(), ATTENTION_NAME_PREFIXES))
    return attention.train(layer.training)


def _convert_attention_to_torch(layer: SelfAttention) -> nn.MultiheadAttention:
    supported = isinstance(layer.proj, nn.Linear) and isinstance(layer.q_norm, nn.Identity) and not layer.causal
    if not supported:
        raise UserError(
            "nn.MultiheadAttention needs an output projection and supports neither QK-norm nor causal attention."
        )
    if layer.scale is not None:
        raise UserError("nn.MultiheadAttention does not support LSA, its mask and learned scale. Use attention=plain.")
    if not isinstance(layer.qkv, nn.Linear):
        raise UserError(f"The projection is a {type(layer.qkv).__name__}, not nn.Linear. Merge LoRA updates first.")
    bias = layer.qkv.bias is not None
    if bias != (layer.proj.bias is not None):
        raise UserError("nn.MultiheadAttention has one bias setting. Make qkv_bias and proj_bias equal.")
    attention = nn.MultiheadAttention(
        layer.embed_dim, layer.num_heads, dropout=layer.attn_drop.p, bias=bias, batch_first=True
    ).to(layer.qkv.weight)
    attention.load_state_dict(_replace_name_prefixes(layer.state_dict(), _invert_mapping(ATTENTION_NAME_PREFIXES)))
    return attention.train(layer.training)


def _convert_block_from_torch(layer: nn.TransformerEncoderLayer) -> Block:
    if not layer.norm_first:
        raise UserError("Vitascope's block is pre-norm. Make the layer with norm_first=True.")
    if layer.activation not in (F.gelu, "gelu"):
        raise UserError("Vitascope's block uses GELU. Make the layer with activation='gelu'.")
    if layer.linear1.bias is None:
        raise UserError(
            "Without bias, PyTorch's norms have none either, but Vitascope's norms do. Make the layer with bias=True."
        )
    width = layer.linear1.in_features
    config = ModelConfig(
        embed_dim=width,
        num_heads=layer.self_attn.num_heads,
        mlp_ratio=layer.linear1.out_features / width,
        norm_eps=layer.norm1.eps,
        attn_drop_rate=layer.self_attn.dropout,
        proj_drop_rate=layer.dropout.p,
    )
    block = Block(config).to(layer.linear1.weight)
    block.load_state_dict(_replace_name_prefixes(layer.state_dict(), BLOCK_NAME_PREFIXES))
    return block.train(layer.training)


def _convert_block_to_torch(layer: Block) -> nn.TransformerEncoderLayer:
    supported = layer.mlp.activation is ACTIVATIONS["gelu"] and not isinstance(layer.ls1, LayerScale)
    if not isinstance(layer.norm1, nn.LayerNorm) or not supported:
        raise UserError("nn.TransformerEncoderLayer supports only LayerNorm and GELU, without LayerScale.")
    if layer.drop_path1.rate or not layer.attn.attn_drop.p == layer.attn.proj_drop.p == layer.mlp.drop.p:
        raise UserError("nn.TransformerEncoderLayer has a single dropout rate and no stochastic depth.")
    attention = _convert_attention_to_torch(layer.attn)  # raises an error for what PyTorch does not support
    if attention.in_proj_bias is None:
        raise UserError("Without bias, nn.TransformerEncoderLayer's norms have none either, but Vitascope's norms do.")
    encoder_layer = nn.TransformerEncoderLayer(
        attention.embed_dim,
        attention.num_heads,
        layer.mlp.fc1.out_features,
        dropout=layer.mlp.drop.p,
        activation="gelu",
        layer_norm_eps=layer.norm1.eps,
        batch_first=True,
        norm_first=True,
    ).to(layer.mlp.fc1.weight)
    encoder_layer.load_state_dict(_replace_name_prefixes(layer.state_dict(), _invert_mapping(BLOCK_NAME_PREFIXES)))
    return encoder_layer.train(layer.training)


def _replace_name_prefixes(state_dict: StateDict, new_prefixes: dict[str, str]) -> StateDict:
    """Replace each name's prefix, a key of `new_prefixes`, by its value."""
    prefix = {name: next(start for start in new_prefixes if name.startswith(start)) for name in state_dict}
    return {new_prefixes[prefix[name]] + name.removeprefix(prefix[name]): tensor for name, tensor in state_dict.items()}


def _invert_mapping(mapping: dict[str, str]) -> dict[str, str]:
    return {value: key for key, value in mapping.items()}
