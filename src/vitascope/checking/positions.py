"""The part `sinusoidal-positions`: sines and cosines of growing wavelength (Vaswani et al. 2017, section 3.5)."""

from typing import Any

import torch
from torch import Tensor, nn

from vitascope.checking.attention_layers import Reading
from vitascope.checking.building import arguments_for
from vitascope.checking.instances import Instances
from vitascope.checking.naming import called_with, compact
from vitascope.checking.reference import Options, Switch
from vitascope.checking.subject import Case, Inputs, Subject, Way

LENGTH = {
    "length",
    "seqlen",
    "maxlen",
    "numpositions",
    "npositions",
    "positions",
    "n",
    "t",
    "l",
    "numtokens",
    "maxlength",
}
LENGTH |= {
    "sequencelength",
    "seqlength",
    "ntokens",
    "tokens",
    "maxpositions",
    "numpatches",
    "maxseqlen",
    "count",
    "pos",
}
LENGTH |= {"maxposition", "position", "nposition", "len", "seq", "numpos", "npos", "contextlength", "blocksize", "rows"}
BASES = (1000.0, 100.0, 1e5, 100000.0, 2.718281828459045, 10.0, 1e6, 500.0)
WRONG = [
    Switch("sin-cos-swapped", {"swapped_waves": True}),
    *(Switch("wrong-frequency", {"rate": ("base", base)}) for base in BASES),
    *(Switch("wrong-frequency", {"rate": ("power", power)}) for power in (2.0, 0.5, -1.0, 4.0, 0.0)),
    Switch("wrong-frequency", {"rate": ("each", 1.0)}),
    Switch("wrong-frequency", {"rate": ("each", 2.0)}),
    Switch("wrong-frequency", {"rate": ("minus one", 1.0)}),
]


def table(length: int, width: int, options: Options) -> Tensor:
    """(position, feature)."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    kind, value = options.get("rate", ("power", 1.0))
    base, power = (value, 1.0) if kind == "base" else (10000.0, value)
    share = 2 * pair / (width - 2 if kind == "minus one" or options.get("tensor2tensor") else width)
    sines, cosines = share * power, share * power
    if kind == "each":  # every feature, not every pair, has a rate of its own
        sines, cosines = value * 2 * pair / width, value * (2 * pair + 1) / width
    position = torch.arange(length, dtype=torch.float64)[:, None] + (1 if options.get("from_one") else 0)
    waves = [torch.sin(position * base**-sines), torch.cos(position * base**-cosines)]
    waves = waves[::-1] if options.get("swapped_waves") else waves
    return torch.cat(waves, dim=1) if options.get("halves") else torch.stack(waves, dim=2).flatten(1)


class Sinusoidal(Subject):
    """f(length, width), or a module that adds its table to the tokens."""

    part = "sinusoidal-positions"

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name, self.thing = name, thing
        self.is_module = isinstance(thing, type | nn.Module)
        if self.is_module:
            self.instances = Instances(thing, {"width": 8, "length": 12, "dropout": 0.1}, ("width", "length"))
            self.takes_length = (
                not isinstance(thing, nn.Module)
                and 12 in arguments_for(thing, self.instances.sizes, ("width", "length")).values()
            )
        else:
            self.roles = _roles(thing)

    def native(self) -> str:
        return "the formula of Vaswani et al. (2017)"

    def cases(self) -> list[Case]:
        width = self.instances.fixed.get("width", 8) if self.is_module and isinstance(self.thing, nn.Module) else 8
        if self.is_module and isinstance(self.thing, nn.Module):
            return [Case(f"5 positions, width {width}", {"length": 5, "width": width})]
        return [
            Case("12 positions, width 8", {"length": 12, "width": 8}),
            Case("5 positions, width 16", {"length": 5, "width": 16}),
            Case("one position", {"length": 1, "width": 8}),
        ]

    def tiny_cases(self) -> list[Case]:
        return [Case(_size(n, d), {"length": n, "width": d}, tiny=True) for n, d in ((1, 2), (2, 2), (2, 4))]

    def inputs(self, case: Case) -> Inputs:
        return {}

    def groups(self) -> list[list[Way]]:
        if not self.is_module:
            return [[Way((), {})]]
        batch = Way(("the tokens have shape batch × token × feature",), {"axes": "batch"})
        return [[batch, Way(("the tokens have shape token × batch × feature",), {"axes": "token"})]]

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        length, width = case.sizes["length"], case.sizes["width"]
        if self.is_module:
            module = self.instances.make(dict(case.sizes), self.dtype, self.training)
            zeros = torch.zeros(3, length, width, dtype=self.dtype)
            given = zeros.transpose(0, 1) if way.settings["axes"] == "token" else zeros
            out = module(given)
            out = out[:, 0] if way.settings["axes"] == "token" and out.ndim == 3 else out
        else:
            values = {"length": length, "width": width, "base": 10000.0, "device": torch.device("cpu")}
            out = called_with(self.thing, values, self.roles)
        out = torch.as_tensor(out) if not isinstance(out, Tensor) else out
        while out.ndim > 2:
            out = (
                out[0]
                if out.shape[0] in (1, 3) and out.shape[0] != length
                else out.squeeze(1)
                if out.shape[1] == 1
                else out[0]
            )
        return out.to(self.dtype)

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        return table(case.sizes["length"], case.sizes["width"], options).to(self.dtype)

    def readings(self, way: Way) -> list[Reading]:
        return [
            ({}, ("sine and cosine features alternate",)),
            ({"halves": True}, ("the first half of the features is sine, the second half is cosine",)),
            (
                {"halves": True, "tensor2tensor": True},
                ("first half sine, second half cosine, with the frequencies of tensor2tensor",),
            ),
        ]

    def switches(self, way: Way) -> list[Switch]:
        return WRONG

    def guessed(self, way: Way | None) -> list[str]:
        """Every feature a sine or a cosine of the position, but of other angles: a wrong frequency."""
        if way is None:
            return []
        case = self.cases()[0]
        found = self.theirs(way, case, {})
        if found.shape != (case.sizes["length"], case.sizes["width"]) or found.shape[0] < 4:
            return []
        zero, one = found[0].abs() < 1e-5, (found[0] - 1).abs() < 1e-5
        # 2 cos(w) links three neighbours of any sine or cosine of w · position
        twice = found[2] / found[1].where(found[1].abs() > 1e-9, torch.ones(()).to(found)) + one / found[1].where(
            found[1].abs() > 1e-9, torch.ones(()).to(found)
        )
        waves = torch.allclose(found[3], twice * found[2] - found[1], atol=1e-3)
        if not ((zero | one).all() and waves):
            return []
        order = (one[1::2].all() and zero[0::2].all()) or one[found.shape[1] // 2 :].all()
        return ["wrong-frequency"] if order else ["sin-cos-swapped", "wrong-frequency"]

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        if theirs.shape != ours.shape:
            return [f"The table has shape {list(theirs.shape)} instead of {list(ours.shape)}."]
        good = [n for n in range(ours.shape[1]) if torch.allclose(theirs[:, n], ours[:, n], atol=1e-4)]
        indices = f": indices {good}" if good else ""
        values = ", ".join(f"{value:.4g}" for value in theirs[0].tolist()[:8])
        return [
            f"{len(good)} of {ours.shape[1]} features are correct{indices}.",
            f"Position 0 has the values {values}.",
        ]


def _size(length: int, width: int) -> str:
    return f"{length} {'position' if length == 1 else 'positions'}, width {width}"


def _roles(function: Any) -> dict[str, str]:
    import inspect

    roles = {}
    for name, parameter in inspect.signature(function).parameters.items():
        word = compact(name)
        if parameter.default is not parameter.empty and "length" in roles.values() and word in LENGTH:
            roles[name] = "base"  # n=10000 beside a length
        elif word in LENGTH:
            roles[name] = "length"
        elif word in ("base", "theta", "temperature", "maxperiod", "device", "dtype"):
            roles[name] = "device" if word == "device" else "base" if word != "dtype" else "dtype"
        else:
            roles[name] = "width" if "width" not in roles.values() else word
    if "length" not in roles.values():
        roles[next(iter(roles))] = "length"
        rest = [name for name in roles if roles[name] not in ("length", "base", "device")]
        roles |= {rest[0]: "width"} if rest else {}
    return roles
