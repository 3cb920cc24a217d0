"""Compute logits, attention maps and hidden states of one forward pass, on a private copy of the model.

`vitascope.explain.maps` changes attributes of the modules while it records; the copy keeps the shared model unchanged.
"""

from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from vitascope.shapes import AttentionMaps, Images, Logits, Tokens

if TYPE_CHECKING:
    from vitascope.explain.maps import MapEditor


class Replay(NamedTuple):
    logits: Logits
    maps: list[AttentionMaps]  # one per block
    hidden_states: list[Tokens]  # all tokens before the first block, and after each block


def replay(model: nn.Module, images: Images, *, edit_maps: "MapEditor | None" = None) -> Replay:
    """Return the logits, attention maps and hidden states. `edit_maps`: as in `compute_logits_and_maps`."""
    from vitascope.explain.maps import compute_logits_and_maps
    from vitascope.explain.model_statistics import record_hidden_states

    private_model = deepcopy(model)
    logits, maps = compute_logits_and_maps(private_model, images, edit_maps)
    return Replay(logits, maps, record_hidden_states(private_model, images))
