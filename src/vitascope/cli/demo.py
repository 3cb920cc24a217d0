"""`vitascope demo`: the anatomy of a small ViT, and its agreement with timm."""

from vitascope.cli.anatomy import print_stages
from vitascope.cli.tables import console, table
from vitascope.model.anatomy import anatomy
from vitascope.model.config import ModelConfig
from vitascope.recipe.reading import read_model

SETTINGS = {
    "as it is": {},
    "registers": {"reg_tokens": 4},
    "QK-norm, LayerScale": {"qk_norm": True, "init_values": 0.1},
    "mean pooling": {"global_pool": "avg"},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "32×64 pixels": {"img_size": (32, 64)},
}


def demo() -> None:
    """Show a model from image to logits, and prove it equal to timm's with the same weights."""
    config = read_model("cifar10")
    print_stages(anatomy(config), config, all_blocks=False)
    print()
    _print_agreement(config)
    print("Next: vitascope anatomy --help, vitascope draw positions, vitascope doctor")


def _print_agreement(config: ModelConfig) -> None:
    from dataclasses import replace

    import torch

    from vitascope.weights.agreement import agreement_with_timm

    columns = ["cifar10's model", "logits, float64", "gradients, float64", "logits, float32", "gradients, float32"]
    rows = []
    for name, changes in SETTINGS.items():
        both = [agreement_with_timm(replace(config, **changes), dtype) for dtype in (torch.float64, torch.float32)]
        rows.append([name, *[f"{number:.0e}" for found in both for number in (found.logits, found.gradients)]])
    title = "Ours beside timm's with the same weights: the largest difference"
    console().print(table(title, columns, rows, right=set(columns[1:])))
