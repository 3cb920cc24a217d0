"""The part `patchify`: split images into patches as F.unfold does, with an optional projection."""

import inspect
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.checking.attention_layers import Reading
from vitascope.checking.dot_product import picked
from vitascope.checking.embedding import PATCHES, PIXELS, patches_of, projected
from vitascope.checking.instances import Instances
from vitascope.checking.naming import called_with, compact
from vitascope.checking.reference import Options, Switch
from vitascope.checking.subject import Case, Inputs, Subject, Way, drawn

AXES = {
    "batch": "the images have shape batch × channel × height × width",
    "last": "the images have shape batch × height × width × channel",
    "single": "the image has shape channel × height × width",
    "single-last": "the image has shape height × width × channel",
}


class Patchify(Subject):
    """A function, or a class with or without a projection."""

    part = "patchify"

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name, self.thing = name, thing
        self.sizes = {"width": 12, "patch": 4, "image": 12, "channels": 3, "dropout": 0.1}
        self.instances = Instances(thing, self.sizes, ("patch",)) if isinstance(thing, type | nn.Module) else None
        self.patch = None if self.instances is None else _patch_of(self.instances.make({}))

    def native(self) -> str:
        return "F.unfold"

    def _sizes(self, channels: int, height: int, width: int, patch: int) -> dict[str, int]:
        return {"batch": 2, "channels": channels, "height": height, "width_": width, "patch": patch}

    def cases(self) -> list[Case]:
        if self.instances is not None:
            return [Case("12×12 images", self._sizes(3, 12, 12, self.patch or 4))]
        fixed = self._fixed_patch()
        cases = [
            Case("12×12 images", self._sizes(3, 12, 12, 4)),
            Case("grayscale 9×9 images", self._sizes(1, 9, 9, 3)),
            Case("one patch", self._sizes(3, 4, 4, 4)),
            Case("8×12 images", self._sizes(3, 8, 12, 4), required=False),
        ]
        return cases if fixed is None else [Case("square images", self._sizes(3, 3 * fixed, 3 * fixed, fixed))]

    def _fixed_patch(self) -> int | None:
        """A function without a patch size takes its own, mostly 4 or 16: the one that runs."""
        if "patch" in self._roles().values() or "side" in self._roles().values():
            return None
        for size in (4, 16, 8, 2, 7, 14):
            try:
                result = self.thing(torch.zeros(2, 3, 3 * size, 3 * size))
            except Exception:
                continue
            if isinstance(result, Tensor) and result.numel() == 2 * 27 * size * size and 9 in result.shape:
                return size
        return 4

    def _roles(self) -> dict[str, str]:
        roles = {}
        for number, name in enumerate(inspect.signature(self.thing).parameters):
            word = compact(name)
            if number == 0 and "patchsize" not in word:
                roles[name] = "x"
            elif word in ("npatches", "numpatches", "patchesperside", "n"):
                roles[name] = "side"
            elif "patch" in word or word in ("p", "ps", "size", "k", "kernelsize", "patchh", "patchw"):
                roles[name] = "patch"
            else:
                roles[name] = "x" if "x" not in roles.values() else word
        return roles

    def tiny_cases(self) -> list[Case]:
        tiny = [
            Case(f"a {h}×{w} image in patches of {p}×{p}", self._sizes(1, h, w, p) | {"batch": 1}, tiny=True)
            for h, w, p in ((2, 2, 1), (4, 4, 2))
        ]
        return tiny if self.instances is None and self.cases()[0].name != "square images" else []

    def inputs(self, case: Case) -> Inputs:
        s = case.sizes
        shape = (s["batch"], s["channels"], s["height"], s["width_"])
        if case.tiny:  # numbered pixels
            return {"x": torch.arange(s["height"] * s["width_"], dtype=torch.float64).view(shape)}
        return drawn(case, {"x": shape})

    def groups(self) -> list[list[Way]]:
        return [[Way((words,), {"axes": axes})] for axes, words in AXES.items()]

    def as_passed(self, way: Way, case: Case, inputs: Inputs) -> Inputs:
        axes = way.settings["axes"]
        x = inputs["x"][0] if axes.startswith("single") else inputs["x"]
        return {"x": x.movedim(-3, -1) if axes.endswith("last") else x}

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        axes, s = way.settings["axes"], case.sizes
        x = self.as_passed(way, case, inputs)["x"]
        count = s["height"] * s["width_"] // s["patch"] ** 2
        batch = 1 if axes.startswith("single") else s["batch"]
        if self.instances is not None:
            out = picked(self.instances.make({}, self.dtype, self.training)(x), (batch, count, 12))
            return out.flatten(2).transpose(1, 2) if out.ndim == 4 and out.shape[1] != count else out
        values = {"x": x, "patch": s["patch"], "side": s["height"] // s["patch"]}
        out = called_with(self.thing, values, self._roles())
        out = torch.stack(list(out)) if isinstance(out, list) else picked(out, (batch, count, 0))
        if out.numel() != batch * x[..., 0].numel() * x.shape[-1] // batch:
            return out
        return _folded(out, batch, count, s["patch"])

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        x = inputs["x"][:1] if way.settings["axes"].startswith("single") else inputs["x"]
        size = case.sizes["patch"]
        if not options.keys() - {"pixels"}:
            cut = F.unfold(x, size, stride=size).transpose(1, 2).unflatten(2, (x.shape[1], size, size))
            order = " ".join({"c": "channel", "h": "height", "w": "width"}[one] for one in options["pixels"])
            patches = rearrange(cut, f"batch patch channel height width -> batch patch ({order})")
        else:
            patches = patches_of(x, size, options)
        if self.instances is None:
            return patches
        weight = _projection(self.instances.make({}, self.dtype, self.training))
        return patches if weight is None else projected(patches, *weight)

    def readings(self, way: Way) -> list[Reading]:
        return [({"pixels": order}, (f"the pixel order in a patch is {words}",)) for order, words in PIXELS.items()]

    def switches(self, way: Way) -> list[Switch]:
        return PATCHES

    def parameters(self, way: Way, case: Case) -> list[Tensor]:
        return [] if self.instances is None else list(self.instances.make({}, self.dtype).parameters())

    def guessed(self, way: Way | None) -> list[str]:
        """Use numbered pixels to test whether each patch is one square of the image."""
        if way is None or self.instances is not None:
            return []
        case = self.cases()[0]
        size, side = case.sizes["patch"], case.sizes["height"]
        shape = tuple(case.sizes[name] for name in ("batch", "channels", "height", "width_"))
        numbered = torch.arange(shape[0] * shape[1] * side * side, dtype=self.dtype).view(shape)
        try:
            out = self.theirs(way, case, {"x": numbered})[0].long()
        except (RuntimeError, IndexError):
            return []
        row, column = out % (side * side) // side // size, out % side // size
        whole = (row == row[:, :1]).all() and (column == column[:, :1]).all()
        return [] if whole or out.shape[0] != (side // size) ** 2 else ["pixels-interleaved"]


def _folded(out: Tensor, batch: int, count: int, patch: int) -> Tensor:
    """Patches that kept their axes are flattened by us."""
    if out.ndim == 3 and out.shape[:2] != (batch, count) and out.shape[2] == count and out.shape[0] == batch:
        return out.transpose(1, 2)
    if (patch and out.shape[0] == batch) or batch == 1:
        return out.reshape(batch, count, -1)
    return out


def _patch_of(module: nn.Module) -> int | None:
    return next((int(part.kernel_size[0]) for part in module.modules() if isinstance(part, nn.Conv2d)), None)


def _projection(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    return (layers[0].weight, layers[0].bias) if layers else None
