"""A library's name and a shape -> its vision transformer, as its users would build it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from vitascope import ModelConfig
from vitascope.model.anatomy import anatomy


@dataclass(frozen=True)
class Shape:
    """Sizes that every library can build: a class token, learned positions, GELU, an MLP four times as wide."""

    embed_dim: int
    depth: int
    num_heads: int
    img_size: int = 32
    patch_size: int = 4
    num_classes: int = 10

    @property
    def flops(self) -> float:
        """Of a forward pass of one image, as papers count: matrix products, all tokens."""
        return sum(stage.flops for stage in anatomy(self.config()))

    def config(self) -> ModelConfig:
        return ModelConfig(
            embed_dim=self.embed_dim,
            depth=self.depth,
            num_heads=self.num_heads,
            img_size=self.img_size,
            patch_size=self.patch_size,
            num_classes=self.num_classes,
        )


SHAPES = {
    "16×2": Shape(16, 2, 2, 8),  # for tests of the benchmark itself
    "192×12": Shape(192, 12, 3),
    "256×8": Shape(256, 8, 4),
    "384×7": Shape(384, 7, 6),
    "ViT-S/16": Shape(384, 12, 6, 224, 16, 1000),
    "ViT-B/16": Shape(768, 12, 12, 224, 16, 1000),
}


def ours(shape: Shape) -> nn.Module:
    from vitascope import VisionTransformer

    return VisionTransformer(shape.config())


def timm(shape: Shape) -> nn.Module:
    from vitascope.weights.agreement import timm_twin

    return timm_twin(shape.config())


def transformers(shape: Shape) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=shape.embed_dim,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.num_heads,
        intermediate_size=4 * shape.embed_dim,
        image_size=shape.img_size,
        patch_size=shape.patch_size,
        num_labels=shape.num_classes,  # pyright: ignore[reportCallIssue]
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ViTForImageClassification(config)

        def forward(self, images: Tensor) -> Tensor:
            return self.model(images).logits

    return Logits()


def torchvision(shape: Shape) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=shape.img_size,
        patch_size=shape.patch_size,
        num_layers=shape.depth,
        num_heads=shape.num_heads,
        hidden_dim=shape.embed_dim,
        mlp_dim=4 * shape.embed_dim,
        num_classes=shape.num_classes,
    )


def vit_pytorch(shape: Shape) -> nn.Module:
    from vit_pytorch import ViT

    return ViT(
        image_size=shape.img_size,
        patch_size=shape.patch_size,
        num_classes=shape.num_classes,
        dim=shape.embed_dim,
        depth=shape.depth,
        heads=shape.num_heads,
        mlp_dim=4 * shape.embed_dim,
        dim_head=shape.embed_dim // shape.num_heads,
    )


LIBRARIES: dict[str, Callable[[Shape], nn.Module]] = {
    "ours": ours,
    "timm": timm,
    "transformers": transformers,
    "torchvision": torchvision,
    "vit-pytorch": vit_pytorch,
}
