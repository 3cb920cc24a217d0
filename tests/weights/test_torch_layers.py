"""Ours and PyTorch's native layers are one, in both directions; transformers' and torchvision's ViT are ours too."""

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vitascope import ModelConfig, SelfAttention, UserError, VisionTransformer, from_torch, to_torch
from vitascope.model.attention_variants import add_lora
from vitascope.model.block import Block
from vitascope.model.config import ATTENTIONS, MLPS, NORMS
from vitascope.weights.parameter_names import convert_weights_to_timm_format

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def randomize_weights(module: nn.Module) -> nn.Module:
    """Weights away from zeros and ones, where mistakes could hide."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def compute_output_and_gradient(module: nn.Module, tokens: torch.Tensor, call) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = tokens.clone().requires_grad_()
    output = call(module, tokens)
    output.square().sum().backward()
    return output.detach(), tokens.grad


@dtypes
@pytest.mark.parametrize(("width", "heads", "tokens", "bias"), [(16, 1, 5, True), (24, 3, 7, False), (64, 8, 1, True)])
def test_attention_is_multihead_attention_both_ways(width, heads, tokens, bias, dtype) -> None:
    theirs = randomize_weights(nn.MultiheadAttention(width, heads, bias=bias, batch_first=True)).to(dtype)
    x = torch.randn(2, tokens, width, dtype=dtype)
    ours = from_torch(theirs)
    back = to_torch(ours)
    expected, expected_grad = compute_output_and_gradient(
        theirs, x, lambda module, t: module(t, t, t, need_weights=False)[0]
    )
    for module, call in ((ours, lambda m, t: m(t)), (back, lambda m, t: m(t, t, t, need_weights=False)[0])):
        output, grad = compute_output_and_gradient(module, x, call)
        assert (output - expected).abs().max() < TOLERANCE[dtype]
        assert (grad - expected_grad).abs().max() < TOLERANCE[dtype] * 10
    _, maps = theirs(x, x, x, average_attn_weights=False)
    assert (ours.maps(x) - maps).abs().max() < TOLERANCE[dtype]


def test_pytorch_s_boolean_mask_is_the_inverse_of_vitascope_s() -> None:
    theirs = randomize_weights(nn.MultiheadAttention(16, 2, batch_first=True))
    x, allowed = torch.randn(1, 4, 16), torch.ones(4, 4).tril().bool()
    expected = theirs(x, x, x, attn_mask=~allowed, need_weights=False)[0]
    torch.testing.assert_close(from_torch(theirs)(x, allowed), expected, atol=1e-5, rtol=0)


@dtypes
def test_a_block_is_a_transformer_encoder_layer_both_ways(dtype) -> None:
    theirs = nn.TransformerEncoderLayer(48, 3, 100, 0.1, "gelu", batch_first=True, norm_first=True)
    theirs = randomize_weights(theirs).to(dtype)
    x = torch.randn(2, 7, 48, dtype=dtype)
    ours = from_torch(theirs.train())
    assert ours.training and ours.norm1.eps == 1e-5
    back = to_torch(ours)
    assert (ours.attn.attn_drop.p, ours.mlp.drop.p) == (back.self_attn.dropout, back.dropout.p) == (0.1, 0.1)
    ours, theirs = ours.eval(), theirs.eval()
    expected, expected_grad = compute_output_and_gradient(theirs, x, lambda module, t: module(t))
    for module in (ours, to_torch(ours)):
        output, grad = compute_output_and_gradient(module, x, lambda m, t: m(t))
        assert (output - expected).abs().max() < TOLERANCE[dtype]
        assert (grad - expected_grad).abs().max() / expected_grad.abs().max() < TOLERANCE[dtype]


@dtypes
def test_the_model_is_transformers_vit(dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=16, patch_size=4
    )
    theirs = randomize_weights(transformers.ViTModel(config, add_pooling_layer=False)).to(dtype)
    ours = VisionTransformer(
        ModelConfig(
            img_size=16, patch_size=4, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2, norm_eps=1e-12, num_classes=0
        )
    ).to(dtype)
    ours.load_state_dict(convert_weights_to_timm_format(theirs.state_dict(), "theirs").weights)
    images = torch.randn(2, 3, 16, 16, dtype=dtype)
    difference = ours.eval().forward_features(images) - theirs(images).last_hidden_state
    assert difference.abs().max() < TOLERANCE[dtype]


@dtypes
def test_the_model_is_torchvisions_vit(dtype) -> None:
    theirs = torchvision.models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=5
    )
    theirs = randomize_weights(theirs).to(dtype)
    config = ModelConfig(img_size=16, patch_size=4, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2, num_classes=5)
    ours = VisionTransformer(config).to(dtype).eval()
    ours.load_state_dict(convert_weights_to_timm_format(theirs.state_dict(), "theirs").weights)
    images = torch.randn(2, 3, 16, 16, dtype=dtype)
    assert (ours(images) - theirs(images)).abs().max() < TOLERANCE[dtype]


@given(
    settings=st.fixed_dictionaries(
        {
            "attention": st.sampled_from(ATTENTIONS),
            "norm": st.sampled_from(NORMS),
            "mlp": st.sampled_from(MLPS),
            "init_values": st.sampled_from([None, 0.1]),
            **{
                name: st.booleans()
                for name in ("qk_norm", "causal", "output_projection", "qkv_bias", "proj_bias", "class_token")
            },
            "drop_path_rate": st.sampled_from([0.0, 0.1]),
        }
    )
)
def test_every_block_is_converted_or_refused_in_a_sentence(settings) -> None:
    try:
        block = randomize_weights(Block(ModelConfig(embed_dim=8, num_heads=2, global_pool="avg", **settings), 0.0))
        theirs = to_torch(block)
    except UserError:
        return
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(theirs(x), block(x), atol=1e-4, rtol=1e-4)


def make_lora_attention() -> SelfAttention:
    layers = nn.ModuleList([SelfAttention(8, 2)])
    add_lora(layers, 2, 1.0)
    return layers[0]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: from_torch(nn.Linear(2, 2)), "Linear has no counterpart"),
        (lambda: from_torch(nn.MultiheadAttention(8, 2, kdim=4)), "Only plain self-attention"),
        (lambda: from_torch(nn.TransformerEncoderLayer(8, 2, 16)), "norm_first=True"),
        (lambda: from_torch(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)), "activation='gelu'"),
        (
            lambda: from_torch(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, activation="gelu", bias=False)),
            "bias=True",
        ),
        (
            lambda: to_torch(Block(ModelConfig(embed_dim=8, num_heads=2, qkv_bias=False, proj_bias=False))),
            "Without bias, nn.TransformerEncoderLayer's norms",
        ),
        (lambda: to_torch(SelfAttention(8, 2, qk_norm=True)), "supports neither QK-norm nor causal"),
        (lambda: to_torch(SelfAttention(8, 2, local=True)), "does not support LSA"),
        (lambda: to_torch(Block(ModelConfig(embed_dim=8, num_heads=2, attention="lsa"))), "does not support LSA"),
        (lambda: to_torch(make_lora_attention()), "The projection is a LoraProjection"),
        (lambda: to_torch(SelfAttention(8, 2, qkv_bias=False)), "Make qkv_bias and proj_bias equal"),
        (lambda: to_torch(SelfAttention(8, 2, proj_drop_rate=0.5)), "no dropout after its projection"),
        (
            lambda: to_torch(Block(ModelConfig(embed_dim=8, num_heads=2, mlp="relu2"))),
            "supports only LayerNorm and GELU",
        ),
        (lambda: to_torch(Block(ModelConfig(embed_dim=8, num_heads=2), drop_path_rate=0.1)), "no stochastic depth"),
        (lambda: to_torch(nn.Linear(2, 2)), "Linear has no counterpart"),
    ],
)
def test_layers_without_counterpart_are_refused(call, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        call()
