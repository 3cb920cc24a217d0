"""Tokens -> Tokens: the feed-forward half of a block, the same for every token."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from vitascope import kernels
from vitascope.model.precision import to_autocast_dtype
from vitascope.shapes import Tokens


def relu_squared(hidden: Tensor) -> Tensor:
    """So et al. 2021 (Primer)."""
    return F.relu(hidden).square()


def swiglu(hidden: Tensor) -> Tensor:
    """The first half gates the second (Shazeer 2020); packed in one layer as in timm's SwiGLUPacked."""
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu2": relu_squared, "swiglu": swiglu}


class Mlp(nn.Module):
    """Widen, bend, narrow. `kernel` names the code that is preferred where it can be used: one of KERNELS."""

    KERNELS = ("default", "fused")

    def __init__(self, *, embed_dim: int, hidden_width: int, activation: str, bias: bool, drop_rate: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden_width, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.drop = nn.Dropout(drop_rate)
        self.fc2 = nn.Linear(hidden_width // 2 if activation == "swiglu" else hidden_width, embed_dim, bias=bias)
        self.kernel = "default"

    def forward(self, tokens: Tokens) -> Tokens:
        dropping = self.training and self.drop.p > 0
        if self.kernel == "fused" and self.activation is relu_squared and not dropping:
            narrow = to_autocast_dtype(tokens)
            if kernels.can_fuse_mlp(narrow, self.fc1.out_features):
                from vitascope.kernels.relu2_mlp import relu2_mlp

                return relu2_mlp(narrow, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        hidden = self.drop(self.activation(self.fc1(tokens)))
        return self.drop(self.fc2(hidden))
