"""A model and TrainConfig -> its optimizers: which parameter is decayed, by which method, at which rate."""

from typing import Any

import torch
from torch import Tensor, nn

from vitascope.recipe.train import TrainConfig
from vitascope.training.adamw import AdamW, Optimizer, ParamGroup
from vitascope.training.muon import Muon, parts_of

UNDECAYED = ("cls_token", "reg_token", "pos_embed", "mask_token", "prototypes")


def make_optimizers(model: nn.Module, config: TrainConfig, extra: nn.Module | None = None) -> list[Optimizer]:
    """AdamW for all, or Muon for the blocks' matrices and AdamW for the rest. `scale` is each group's rate factor;
    `decayed`: the decay changes from step to step, and `decay_weights` does it."""
    depth = 1 + max(
        (int(name.split(".")[1]) for name, _ in model.named_parameters() if name[:7] == "blocks."), default=0
    )
    beside = extra.named_parameters("extra") if extra is not None else ()
    named = [item for item in (*model.named_parameters(), *beside) if item[1].requires_grad]
    scales = {name: config.layer_decay ** (depth + 1 - layer_of(name, depth)) for name, _ in named}
    muon = [item for item in named if config.optimizer == "muon" and is_block_matrix(*item)]
    taken = {name for name, _ in muon}
    rest = [item for item in named if item[0] not in taken]
    changing = config.final_weight_decay is not None
    decay = 0.0 if changing else config.weight_decay

    def decaying(name: str, weight: nn.Parameter) -> dict[str, Any]:
        decayed = is_decayed(name, weight)
        return {"weight_decay": decay * decayed, "decayed": changing and decayed}

    groups = _groups(rest, scales, decaying)
    optimizers: list[Optimizer] = [AdamW(groups, config.lr, config.betas)]
    if muon:
        groups = _groups(muon, scales, lambda name, _: {"parts": parts_of(name), "decayed": changing})
        optimizers.append(Muon(groups, config.muon_lr, config.momentum, decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"] * group["scale"]
    return optimizers


def layer_of(name: str, depth: int) -> int:
    """0 for the embedding, 1 … depth for the blocks, depth + 1 for what follows (BEiT's counting)."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return 0 if name.split(".")[0] in (*UNDECAYED, "patch_embed") else depth + 1


def is_decayed(name: str, weight: nn.Parameter) -> bool:
    return weight.ndim >= 2 and name.split(".")[-1] not in UNDECAYED


def is_block_matrix(name: str, weight: nn.Parameter) -> bool:
    return ".blocks." in f".{name}" and weight.ndim == 2


def set_rates(optimizers: list[Optimizer], factor: float | Tensor) -> None:
    """Every group's rate: its peak times the schedule's factor; in place where rates live on the device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(factor, Tensor):
                group["lr"].copy_(group["peak"] * factor)
            else:
                group["lr"] = group["peak"] * factor


@torch.no_grad()
def decay_weights(optimizers: list[Optimizer], decay: float | Tensor) -> None:
    """Before the step, as AdamW does it: every decayed weight shrinks by its rate times the decay."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group["decayed"]:
                torch._foreach_mul_(group["params"], 1 - group["lr"] * decay)  # pyright: ignore


def _groups(named: list[tuple[str, nn.Parameter]], scales: dict[str, float], settings: Any) -> list[ParamGroup]:
    """Parameters with the same settings and rate factor together."""
    groups: dict[tuple[object, ...], ParamGroup] = {}
    for name, weight in named:
        own = settings(name, weight) | {"scale": scales[name]}
        groups.setdefault(tuple(own.items()), {"params": [], **own})["params"].append(weight)
    return list(groups.values())
