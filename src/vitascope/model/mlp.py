"""Tokens -> Tokens: the feed-forward layers of a block, applied to each token."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from vitascope import kernels
from vitascope.model.precision import to_autocast_dtype
from vitascope.shapes import Tokens


def relu_squared(hidden: Tensor) -> Tensor:
    """Return relu(x)² (So et al. 2021, Primer)."""
    return F.relu(hidden).square()


def swiglu(hidden: Tensor) -> Tensor:
    """Multiply the second half of the features by silu(first half) (Shazeer 2020; timm's SwiGLUPacked)."""
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu2": relu_squared, "swiglu": swiglu}


class Mlp(nn.Module):
    """Linear, activation (e.g. GELU), Linear. `kernel`, one of KERNELS, is used where it is available."""

    KERNELS = ("default", "fused")

    def __init__(self, *, embed_dim: int, hidden_width: int, activation: str, bias: bool, drop_rate: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden_width, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.drop = nn.Dropout(drop_rate)
        self.fc2 = nn.Linear(hidden_width // 2 if activation == "swiglu" else hidden_width, embed_dim, bias=bias)
        self.kernel = "default"

    def forward(self, tokens: Tokens) -> Tokens:
        uses_dropout = self.training and self.drop.p > 0
        if self.kernel == "fused" and self.activation is relu_squared and not uses_dropout:
            cast_tokens = to_autocast_dtype(tokens)
            if kernels.can_fuse_mlp(cast_tokens, self.fc1.out_features):
                from vitascope.kernels.relu2_mlp import relu2_mlp

                return relu2_mlp(cast_tokens, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        hidden = self.drop(self.activation(self.fc1(tokens)))
        return self.drop(self.fc2(hidden))
