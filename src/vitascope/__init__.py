"""Vitascope: build, train, study and look inside vision transformers on small image data.

The few names users type live here and are loaded when first used, so `import vitascope` is instant and free of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitascope import explain, export
    from vitascope.coursework.checker.check import check
    from vitascope.errors import UserError
    from vitascope.inference.classifier import Classifier
    from vitascope.inference.open_model import from_pretrained, load, open_model
    from vitascope.model.attention import SelfAttention
    from vitascope.model.attention_variants import SelfAttention2d, SingleHeadAttention
    from vitascope.model.config import ModelConfig
    from vitascope.model.patches import patchify, unpatchify
    from vitascope.model.scaled_dot_product import attend, causal_mask
    from vitascope.model.vit import VisionTransformer
    from vitascope.training.train import resume, train
    from vitascope.weights.adaptation import adapt
    from vitascope.weights.torch_layers import from_torch, to_torch

__version__ = "0.1.0"

_HOMES = {
    "Classifier": "inference.classifier",
    "ModelConfig": "model.config",
    "SelfAttention": "model.attention",
    "SelfAttention2d": "model.attention_variants",
    "SingleHeadAttention": "model.attention_variants",
    "UserError": "errors",
    "VisionTransformer": "model.vit",
    "adapt": "weights.adaptation",
    "attend": "model.scaled_dot_product",
    "causal_mask": "model.scaled_dot_product",
    "check": "coursework.checker.check",
    "from_pretrained": "inference.open_model",
    "from_torch": "weights.torch_layers",
    "load": "inference.open_model",
    "open_model": "inference.open_model",
    "patchify": "model.patches",
    "resume": "training.train",
    "to_torch": "weights.torch_layers",
    "train": "training.train",
    "unpatchify": "model.patches",
}

_PARTS = ("explain", "export")  # parts of their own: vitascope.explain.attention_maps(model, images)

__all__ = [
    "Classifier",
    "ModelConfig",
    "SelfAttention",
    "SelfAttention2d",
    "SingleHeadAttention",
    "UserError",
    "VisionTransformer",
    "__version__",
    "adapt",
    "attend",
    "causal_mask",
    "check",
    "explain",
    "export",
    "from_pretrained",
    "from_torch",
    "load",
    "open_model",
    "patchify",
    "resume",
    "to_torch",
    "train",
    "unpatchify",
]


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return import_module(f"vitascope.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'vitascope' has no attribute {name!r}")
    return getattr(import_module(f"vitascope.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
