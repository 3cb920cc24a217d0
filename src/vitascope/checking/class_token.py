"""The part `class-token`: prepend the class token and, optionally, add the position embeddings."""

from typing import Any

import torch
from torch import Tensor, nn

from vitascope.checking.dot_product import picked
from vitascope.checking.embedding import CLASS_TOKEN, POSITIONS, assemble
from vitascope.checking.instances import Instances
from vitascope.checking.naming import argument_roles, called_with, compact
from vitascope.checking.reference import Options, Switch
from vitascope.checking.subject import Case, Inputs, Subject, Way, drawn

SHAPES = {"1×1×feature": (1, 1), "feature": (), "1×feature": (1,)}


class ClassToken(Subject):
    """f(tokens, class_token[, positions]), or a module that owns its token."""

    part = "class-token"

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name, self.thing = name, thing
        self.is_module = isinstance(thing, type | nn.Module)
        if self.is_module:
            sizes = {"width": 12, "patches": 9, "length": 9, "dropout": 0.1, "image": 12, "patch": 4, "channels": 3}
            self.instances = Instances(thing, sizes, ("width", "patches"))
        else:
            self.roles = _roles(thing)

    def native(self) -> str:
        return "torch.cat"

    def cases(self) -> list[Case]:
        cases = [Case("nine patches", {"batch": 2, "tokens": 9, "width": 12})]
        if self.is_module:
            return cases
        return [*cases, Case("one patch", {"batch": 3, "tokens": 1, "width": 5})]

    def tiny_cases(self) -> list[Case]:
        return [] if self.is_module else [Case("two patches", {"batch": 1, "tokens": 2, "width": 1}, tiny=True)]

    def inputs(self, case: Case) -> Inputs:
        s = case.sizes
        shapes: dict[str, tuple[int, ...]] = {"x": (s["batch"], s["tokens"], s["width"])}
        if not self.is_module:
            shapes["token"] = (1, 1, s["width"])
            if "positions" in self.roles.values():
                shapes["positions"] = (1, s["tokens"] + 1, s["width"])
        return drawn(case, shapes)

    def groups(self) -> list[list[Way]]:
        axes = "the tokens have shape batch × token × feature"
        if self.is_module:
            return [[Way((axes,), {"shape": ()})]]
        return [[Way((axes, f"the class token has shape {name}"), {"shape": shape})] for name, shape in SHAPES.items()]

    def as_passed(self, way: Way, case: Case, inputs: Inputs) -> Inputs:
        if self.is_module:
            return inputs
        return inputs | {"token": inputs["token"].reshape(*way.settings["shape"], case.sizes["width"])}

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        s = case.sizes
        wanted = (s["batch"], s["tokens"] + 1, s["width"])
        if self.is_module:
            return picked(self.instances.make({}, self.dtype, self.training)(inputs["x"]), wanted)
        return picked(called_with(self.thing, self.as_passed(way, case, inputs), self.roles), wanted)

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        token, table = inputs.get("token"), inputs.get("positions")
        if self.is_module:
            token, table = token_and_table(self.instances.make({}, self.dtype), case.sizes["tokens"], 12)
        return assemble(inputs["x"], token, table, options)

    def switches(self, way: Way) -> list[Switch]:
        there = {"before", "not-class", "none", "rolled", "class-only", "twice"}
        return [CLASS_TOKEN[0], *(switch for switch in POSITIONS if switch.options["position"] in there)]

    def parameters(self, way: Way, case: Case) -> list[Tensor]:
        return list(self.instances.make({}, self.dtype).parameters()) if self.is_module else []

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        if theirs.shape != ours.shape:
            return [f"The output has shape {list(theirs.shape)} instead of {list(ours.shape)}."]
        good = [n for n in range(ours.shape[1]) if torch.allclose(theirs[:, n], ours[:, n])]
        indices = f": indices {good}" if good else ""
        return [f"{len(good)} of {ours.shape[1]} tokens are correct{indices}."]


def token_and_table(module: nn.Module, patches: int, width: int) -> tuple[Tensor | None, Tensor | None]:
    """A module's class token and position table, by name and shape."""
    plain = [(n, t) for part in module.modules() for n, t in vars(part).items() if isinstance(t, Tensor)]
    named = [*module.named_parameters(), *module.named_buffers(), *plain]
    tables = {n: p for n, p in named if p.is_floating_point()}
    alone = {n: t for n, t in tables.items() if t.numel() == width and t.ndim != 1} | {
        n: t for n, t in tables.items() if t.numel() == width and _says_token(n)
    }
    token = next((t for n, t in alone.items() if _says_token(n)), next(iter(alone.values()), None))
    long = {n: t for n, t in tables.items() if t.ndim in (2, 3) and t.shape[-1] == width and t.numel() > width}
    placed = [t for n, t in long.items() if any(word in compact(n) for word in ("pos", "pe"))]
    fitting = [t for t in placed if t.numel() // width >= patches]
    return token, fitting[0].reshape(-1, width) if fitting else None


def _says_token(name: str) -> bool:
    return "cls" in compact(name) or "class" in compact(name)


def _roles(function: Any) -> dict[str, str]:
    roles = argument_roles(function)
    for name in roles:
        if "pos" in compact(name):
            roles[name] = "positions"
        elif _says_token(name):
            roles[name] = "token"
    if "token" not in roles.values():
        roles[list(roles)[1 if len(roles) > 1 else 0]] = "token"
    if "x" not in roles.values():
        roles[next(name for name in roles if roles[name] not in ("token", "positions"))] = "x"
    return roles
