"""Choose the trainable parameters: all, the last blocks, LoRA, or only the classifier."""

from torch import nn

from vitascope.errors import UserError
from vitascope.model.lora import add_lora
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.train import TrainConfig
from vitascope.training.optimizers import layer_of


def set_learning(model: VisionTransformer, config: TrainConfig) -> None:
    """Set requires_grad of every parameter, and add LoRA. The classifier is always trained."""
    depth = model.config.depth
    if config.freeze > depth:
        raise UserError(f"train.freeze={config.freeze} is too large: the model has {depth} blocks.")
    if config.tune == "lora":
        add_lora(model, config.lora_rank, config.lora_alpha)
    for name, weight in model.named_parameters():
        weight.requires_grad = _learns(name, config, depth)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError("No parameter would be trained: the model has no classifier (num_classes=0).")


def _learns(name: str, config: TrainConfig, depth: int) -> bool:
    if name.startswith("head."):
        return True
    if config.freeze and layer_of(name, depth) <= config.freeze:
        return False
    return config.tune == "full" or (config.tune == "lora" and ".lora_" in name)


def train_mode(model: VisionTransformer) -> None:
    """Set training mode. Frozen parts stay in eval mode, without dropout and stochastic depth."""
    model.train()
    tokens = (model.cls_token, model.reg_token, model.pos_embed)
    embedding = [*model.patch_embed.parameters(), *(weight for weight in tokens if weight is not None)]
    if not any(weight.requires_grad for weight in embedding):
        model.patch_embed.eval()
        model.pos_drop.eval()
    for block in model.blocks:
        if not any(weight.requires_grad for weight in block.parameters()):
            block.eval()


def count_learning(model: nn.Module) -> tuple[int, int]:
    """(trainable parameters, all parameters)."""
    weights = list(model.parameters())
    return sum(weight.numel() for weight in weights if weight.requires_grad), sum(weight.numel() for weight in weights)
