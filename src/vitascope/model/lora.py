"""LoRA: train a low-rank update of the packed query-key-value projection; its weight is frozen."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.model.attention import SelfAttention


class LoraProjection(nn.Module):
    """W = W₀ + α/r · B A for queries and for values, W₀ frozen (Hu et al. 2022, section 4.1; B starts at 0).

    `weight` is the complete W, so that code that reads the weight of the projection gets the effective one.
    """

    def __init__(self, projection: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        width = projection.in_features
        self.base = nn.Parameter(projection.weight.detach().clone(), requires_grad=False)
        self.bias = projection.bias
        self.lora_down = nn.Parameter(projection.weight.new_empty(2, rank, width).uniform_(-(width**-0.5), width**-0.5))
        self.lora_up = nn.Parameter(projection.weight.new_zeros(2, width, rank))  # queries, values
        self.scaling = alpha / rank

    @property
    def weight(self) -> Tensor:
        query, value = self.scaling * torch.bmm(self.lora_up, self.lora_down)
        return self.base + torch.cat([query, torch.zeros_like(query), value])

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(tokens, self.weight, self.bias)


def add_lora(model: nn.Module, rank: int, alpha: float) -> None:
    """Replace the projection of every attention layer by a LoraProjection. The outputs are unchanged at first."""
    for module in list(model.modules()):
        if isinstance(module, SelfAttention) and isinstance(module.qkv, nn.Linear):
            module.qkv = LoraProjection(module.qkv, rank, alpha)  # pyright: ignore[reportAttributeAccessIssue]


def make_lora_merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with the LoRA updates added to the weights, for a model without LoRA."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, LoraProjection):
            for part in ("base", "lora_down", "lora_up"):
                del state[f"{name}.{part}"]
            state[f"{name}.weight"] = module.weight.detach()
    return state
