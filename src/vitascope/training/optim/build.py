"""Build the optimizers of a model: trainable parameters, weight decay, learning rates by layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.attention_variants import add_lora
from vitascope.model.vit import VisionTransformer
from vitascope.recipe.choices import load_optimizer
from vitascope.recipe.train import TrainConfig
from vitascope.training.optim.optimizer import NamedParams, Optimizer, ParamGroup

NO_DECAY_NAMES = ("cls_token", "reg_token", "pos_embed", "mask_token", "prototypes")


def make_optimizers(model: nn.Module, config: TrainConfig, extra_module: nn.Module | None = None) -> list[Optimizer]:
    """Create the optimizers that train.optimizer names, for all trainable parameters.

    A group's `scale` is its learning rate factor. `decayed`: its weight decay changes from step to step and is applied
    by `apply_scheduled_weight_decay`."""
    depth = 1 + max(
        (int(name.split(".")[1]) for name, _ in model.named_parameters() if name[:7] == "blocks."), default=0
    )
    extra_params = extra_module.named_parameters("extra") if extra_module is not None else ()
    named = [item for item in (*model.named_parameters(), *extra_params) if item[1].requires_grad]
    scales = {name: config.layer_decay ** (depth + 1 - get_layer_index(name, depth)) for name, _ in named}
    decay_changes = config.final_weight_decay is not None
    decay = 0.0 if decay_changes else config.weight_decay

    def make_groups(named_params: NamedParams, make_settings: Callable[[str], dict[str, Any]]) -> list[ParamGroup]:
        def make_all_settings(name: str, weight: nn.Parameter) -> dict[str, Any]:
            decayed = has_weight_decay(name, weight)
            return {"weight_decay": decay * decayed, "decayed": decay_changes and decayed} | make_settings(name)

        return _make_param_groups(named_params, scales, make_all_settings)

    optimizers = load_optimizer(config.optimizer).build(named, config, make_groups)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"] * group["scale"]
    return optimizers


def get_layer_index(param_name: str, depth: int) -> int:
    """Return 0 for the embedding, 1 … depth for the blocks, depth + 1 for the layers after them (as BEiT)."""
    if param_name.startswith("blocks."):
        return int(param_name.split(".")[1]) + 1
    return 0 if param_name.split(".")[0] in (*NO_DECAY_NAMES, "patch_embed") else depth + 1


def has_weight_decay(param_name: str, weight: nn.Parameter) -> bool:
    return weight.ndim >= 2 and param_name.split(".")[-1] not in NO_DECAY_NAMES


def set_learning_rates(optimizers: list[Optimizer], lr_factor: float | Tensor) -> None:
    """Set every group's learning rate to its peak times the factor, in place if the rates are tensors."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(lr_factor, Tensor):
                group["lr"].copy_(group["peak"] * lr_factor)
            else:
                group["lr"] = group["peak"] * lr_factor


@torch.no_grad()
def apply_scheduled_weight_decay(optimizers: list[Optimizer], weight_decay: float | Tensor) -> None:
    """Multiply every decayed weight by 1 − lr · weight_decay before the step, as AdamW does."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group["decayed"]:
                torch._foreach_mul_(group["params"], 1 - group["lr"] * weight_decay)  # pyright: ignore


def _make_param_groups(
    named_params: list[tuple[str, nn.Parameter]],
    lr_scales: dict[str, float],
    make_settings: Callable[[str, nn.Parameter], dict[str, Any]],
) -> list[ParamGroup]:
    """Group parameters with the same settings and learning rate factor."""
    groups: dict[tuple[object, ...], ParamGroup] = {}
    for name, weight in named_params:
        settings = make_settings(name, weight) | {"scale": lr_scales[name]}
        groups.setdefault(tuple(settings.items()), {"params": [], **settings})["params"].append(weight)
    return list(groups.values())


def set_trainable_and_add_lora(model: VisionTransformer, config: TrainConfig) -> None:
    """Set requires_grad of every parameter, and add LoRA. The classifier is always trained."""
    depth = model.config.depth
    if config.freeze > depth:
        raise UserError(f"train.freeze={config.freeze} is too large: the model has {depth} blocks.")
    if config.tune == "lora":
        add_lora(model, config.lora_rank, config.lora_alpha)
    for name, weight in model.named_parameters():
        weight.requires_grad = _is_trainable(name, config, depth)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError("No parameter would be trained: the model has no classifier (num_classes=0).")


def _is_trainable(param_name: str, config: TrainConfig, depth: int) -> bool:
    if param_name.startswith("head."):
        return True
    if config.freeze and get_layer_index(param_name, depth) <= config.freeze:
        return False
    return config.tune == "full" or (config.tune == "lora" and ".lora_" in param_name)


def set_train_mode_except_frozen(model: VisionTransformer) -> None:
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


class ParameterCounts(NamedTuple):
    """Numbers of parameters of a model."""

    trainable: int
    total: int


def count_trainable_and_all_parameters(model: nn.Module) -> ParameterCounts:
    """Count the trainable parameters and all parameters."""
    weights = list(model.parameters())
    trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
    return ParameterCounts(trainable, sum(weight.numel() for weight in weights))
