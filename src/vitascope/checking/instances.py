"""Create instances of a user's class in several sizes with random weights; a given instance is copied."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitascope.checking.building import build, heads_of, takes
from vitascope.checking.subject import Case, seeded, shuffle_weights
from vitascope.checking.weights import linear_maps, norms_of


class Instances:
    """Instances of one class, created once for each size and dtype."""

    def __init__(self, thing: Any, sizes: Mapping[str, Any], order: tuple[str, ...] = ("width", "heads")) -> None:
        self.thing, self.sizes, self.order = thing, dict(sizes), order
        self.made: dict[tuple[Any, ...], nn.Module] = {}
        self.fixed: dict[str, int] = {}
        if isinstance(thing, nn.Module):
            self.fixed = {"width": width_of(thing), "heads": heads_of(thing) or 1}
            self.has_heads = heads_of(thing) is not None
        else:
            self.has_heads = takes(thing, "heads", self.sizes) or "heads" in order[: self._unnamed()]
            if not self.has_heads:
                self.fixed = {"heads": heads_of(self.make({})) or 1}
                self.has_heads = self.fixed["heads"] > 1

    def _unnamed(self) -> int:
        from vitascope.checking.building import arguments_for

        asked = arguments_for(self.thing, self.sizes, self.order)
        return 2 if list(asked.values()).count(self.sizes.get("heads")) else 0

    def make(self, sizes: Mapping[str, int], dtype: torch.dtype = torch.float64, training: bool = False) -> nn.Module:
        """Return an instance, by default in eval mode."""
        wanted = {name: sizes.get(name, size) for name, size in self.sizes.items()}
        for narrow in {"key_width", "value_width"} & wanted.keys():
            wanted[narrow] = wanted["width"] // wanted["heads"]
        key = (*wanted.values(), dtype)
        if key not in self.made:
            with seeded("building"):
                fresh = isinstance(self.thing, nn.Module)
                module = copy.deepcopy(self.thing) if fresh else build(self.thing, wanted, self.order)
            module = module.to(dtype=torch.float64)
            shuffle_weights(module)
            self.made[key] = module.to(dtype=dtype)
        return self.made[key].train(training)

    def fitted(self, case: Case) -> Case | None:
        """The case with sizes that cannot be changed put in; None where it would not be a new one."""
        sizes = dict(case.sizes) | {name: size for name, size in self.fixed.items() if name in case.sizes}
        if sizes == dict(case.sizes):
            return case
        if case.tiny or case.name == "one head":
            return None
        if sizes["width"] % sizes["heads"]:
            return None
        return replace(case, sizes=sizes, name=case.name.replace("three heads, ", ""))


def width_of(module: nn.Module) -> int:
    """The features an instance works with: its norm's, or its first linear map's input."""
    for _, norm in norms_of(module):
        if isinstance(norm, nn.LayerNorm):
            return int(norm.normalized_shape[-1])
    maps = linear_maps(module)
    return maps[0].shape[1] if maps else 12
