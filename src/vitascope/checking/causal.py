"""The part `causal-mask`: a mask that blocks attention to later tokens, boolean or additive."""

from typing import Any

import torch
from torch import Tensor, nn

from vitascope.checking.attention_layers import Reading
from vitascope.checking.naming import polarity_in, prose_of
from vitascope.checking.reference import Options, Switch
from vitascope.checking.subject import Case, Inputs, Subject, Way

LEAST = -1000.0  # a masked score must be lowered by at least this amount


class CausalMask(Subject):
    """f(number of tokens)."""

    part = "causal-mask"

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name = name
        self.thing = thing() if isinstance(thing, type) and issubclass(thing, nn.Module) else thing
        self.told = polarity_in(prose_of(thing))

    def native(self) -> str:
        return "torch.tril"

    def cases(self) -> list[Case]:
        one = Case("one token", {"tokens": 1}, "causal", required=False)
        return [*(Case(f"{n} tokens", {"tokens": n}, "causal") for n in (5, 2, 7)), one]

    def tiny_cases(self) -> list[Case]:
        return [Case("two tokens", {"tokens": 2}, "causal", tiny=True)]

    def inputs(self, case: Case) -> Inputs:
        return {}

    def groups(self) -> list[list[Way]]:
        return [[Way((), {"given": "number"})], [Way((), {"given": "tensor"})]]

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        n = case.sizes["tokens"]
        given = n if way.settings["given"] == "number" else torch.zeros(2, n, 4)
        out = self.thing(given)
        out = out if isinstance(out, Tensor) else torch.as_tensor(out)
        while out.ndim > 2:
            out = out[0]
        return out.double()

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        n = case.sizes["tokens"]
        may = torch.ones(n, n, dtype=torch.bool).tril()
        if options.get("turned"):
            may = may.T if options["turned"] == "transposed" else ~may
        low, high = options["values"]
        return torch.full((n, n), float(low), dtype=torch.float64).masked_fill(~may, float(options.get("fill", high)))

    def readings(self, way: Way) -> list[Reading]:
        found = self._values(way)
        lowest = min(found) if found else -torch.inf
        forms: list[tuple[str | None, float, float, str]] = [
            ("may", 1, 0, "True (or 1) means that attention is allowed"),
            ("blocked", 0, 1, "True (or 1) means masked out"),
            (None, 0, lowest if lowest <= LEAST else -torch.inf, "the mask is additive: it is added to the scores"),
        ]
        if found and lowest < 0:  # only an additive mask has negative values
            forms = forms[2:]
        fitting = [form for form in forms if form[0] in (None, self.told or form[0])]
        return [({"values": (low, high)}, (words,)) for _, low, high, words in fitting]

    def _values(self, way: Way) -> list[float]:
        try:
            return self.theirs(way, self.cases()[0], {}).flatten().unique().tolist()
        except Exception:
            return []

    def switches(self, way: Way) -> list[Switch]:
        leaks = [value for value in self._values(way) if LEAST < value < 0 or (value > 0 and value != 1)]
        return [
            *(Switch("mask-inverted", {"turned": how}) for how in ("transposed", "not")),
            *(Switch("mask-too-small", {"fill": value}) for value in leaks),
        ]

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        if theirs.shape != ours.shape:
            return [f"The mask has shape {list(theirs.shape)} instead of {list(ours.shape)}."]
        values = ", ".join(f"{value:g}" for value in theirs.flatten().unique().tolist()[:6])
        return [f"The mask contains the values {values}. Its first row is {theirs[0].tolist()}."]

    def polarity(self) -> str | None:
        """What True means in the user's mask: may (attention is allowed), blocked, or None if unknown."""
        for way in (group[0] for group in self.groups()):
            try:
                out = self.theirs(way, self.cases()[0], {})
            except Exception:
                continue
            triangle = torch.ones_like(out).tril()
            if torch.equal(out, triangle):
                return "may"
            if torch.equal(out, 1 - triangle):
                return "blocked"
        return None
