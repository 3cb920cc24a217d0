"""Build each library's vision transformer of a given shape, as its users would."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from vitascope import ModelConfig

# Supported by every library: class token, learned positions, GELU, MLP ratio 4. These are our defaults.
SMALL_CONFIG = ModelConfig(img_size=32, patch_size=4, num_classes=10)
SHAPES = {
    "16×2": replace(SMALL_CONFIG, img_size=8, embed_dim=16, depth=2, num_heads=2),  # for tests of the benchmark itself
    "192×12": replace(SMALL_CONFIG, embed_dim=192, num_heads=3),
    "256×8": replace(SMALL_CONFIG, embed_dim=256, depth=8, num_heads=4),
    "384×7": replace(SMALL_CONFIG, embed_dim=384, depth=7, num_heads=6),
    "ViT-S/16": ModelConfig(embed_dim=384, num_heads=6),
    "ViT-B/16": ModelConfig(),
}


def build_vitascope(model_config: ModelConfig) -> nn.Module:
    from vitascope import VisionTransformer

    return VisionTransformer(model_config)


def build_timm(model_config: ModelConfig) -> nn.Module:
    from vitascope.weights.write_formats import build_timm_model

    return build_timm_model(model_config)


def build_transformers(model_config: ModelConfig) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=model_config.embed_dim,
        num_hidden_layers=model_config.depth,
        num_attention_heads=model_config.num_heads,
        intermediate_size=4 * model_config.embed_dim,
        image_size=model_config.image_shape[0],
        patch_size=model_config.patch_shape[0],
        num_labels=model_config.num_classes,  # pyright: ignore[reportCallIssue]
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ViTForImageClassification(config)

        def forward(self, images: Tensor) -> Tensor:
            return self.model(images).logits

    return Logits()


def build_torchvision(model_config: ModelConfig) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=model_config.image_shape[0],
        patch_size=model_config.patch_shape[0],
        num_layers=model_config.depth,
        num_heads=model_config.num_heads,
        hidden_dim=model_config.embed_dim,
        mlp_dim=4 * model_config.embed_dim,
        num_classes=model_config.num_classes,
    )


def build_vit_pytorch(model_config: ModelConfig) -> nn.Module:
    from vit_pytorch import ViT

    return ViT(
        image_size=model_config.image_shape[0],
        patch_size=model_config.patch_shape[0],
        num_classes=model_config.num_classes,
        dim=model_config.embed_dim,
        depth=model_config.depth,
        heads=model_config.num_heads,
        mlp_dim=4 * model_config.embed_dim,
        dim_head=model_config.embed_dim // model_config.num_heads,
    )


MODEL_BUILDERS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "ours": build_vitascope,
    "timm": build_timm,
    "transformers": build_transformers,
    "torchvision": build_torchvision,
    "vit-pytorch": build_vit_pytorch,
}
