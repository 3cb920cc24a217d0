"""Build each library's vision transformer of a given shape, as its users would."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from vitascope import ModelConfig

# Supported by every library: class token, learned positions, GELU, MLP ratio 4. These are our defaults.
SMALL = ModelConfig(img_size=32, patch_size=4, num_classes=10)
SHAPES = {
    "16×2": replace(SMALL, img_size=8, embed_dim=16, depth=2, num_heads=2),  # for tests of the benchmark itself
    "192×12": replace(SMALL, embed_dim=192, num_heads=3),
    "256×8": replace(SMALL, embed_dim=256, depth=8, num_heads=4),
    "384×7": replace(SMALL, embed_dim=384, depth=7, num_heads=6),
    "ViT-S/16": ModelConfig(embed_dim=384, num_heads=6),
    "ViT-B/16": ModelConfig(),
}


def ours(shape: ModelConfig) -> nn.Module:
    from vitascope import VisionTransformer

    return VisionTransformer(shape)


def timm(shape: ModelConfig) -> nn.Module:
    from vitascope.weights.agreement import timm_twin

    return timm_twin(shape)


def transformers(shape: ModelConfig) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=shape.embed_dim,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.num_heads,
        intermediate_size=4 * shape.embed_dim,
        image_size=shape.image_shape[0],
        patch_size=shape.patch_shape[0],
        num_labels=shape.num_classes,  # pyright: ignore[reportCallIssue]
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ViTForImageClassification(config)

        def forward(self, images: Tensor) -> Tensor:
            return self.model(images).logits

    return Logits()


def torchvision(shape: ModelConfig) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=shape.image_shape[0],
        patch_size=shape.patch_shape[0],
        num_layers=shape.depth,
        num_heads=shape.num_heads,
        hidden_dim=shape.embed_dim,
        mlp_dim=4 * shape.embed_dim,
        num_classes=shape.num_classes,
    )


def vit_pytorch(shape: ModelConfig) -> nn.Module:
    from vit_pytorch import ViT

    return ViT(
        image_size=shape.image_shape[0],
        patch_size=shape.patch_shape[0],
        num_classes=shape.num_classes,
        dim=shape.embed_dim,
        depth=shape.depth,
        heads=shape.num_heads,
        mlp_dim=4 * shape.embed_dim,
        dim_head=shape.embed_dim // shape.num_heads,
    )


LIBRARIES: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "ours": ours,
    "timm": timm,
    "transformers": transformers,
    "torchvision": torchvision,
    "vit-pytorch": vit_pytorch,
}
