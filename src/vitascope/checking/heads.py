"""The parts `multi-head-attention` and `self-attention-2d`, as modules: against nn.MultiheadAttention."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.checking.attention_layers import (
    Reading,
    attention_readings,
    attention_switches,
    norm_arguments,
    single_rows,
    weights_under,
)
from vitascope.checking.dot_product import attention_evidence, picked
from vitascope.checking.instances import Instances
from vitascope.checking.masks import FORMS, forms_for, tried_shapes
from vitascope.checking.naming import argument_roles, source_of
from vitascope.checking.reference import Options, Switch, multi_head
from vitascope.checking.subject import (
    ALONE,
    LARGE_MASKED_SCORES,
    NOT_ALONE,
    Case,
    Inputs,
    Subject,
    Way,
    allowed_pairs,
    drawn,
    observe,
    plain_mask,
    tiny_attention,
)
from vitascope.checking.weights import linear_maps, norms_of

AXES = {
    "batch": "the input has shape batch × token × feature",
    "token": "the input has shape token × batch × feature, as in nn.MultiheadAttention",
    "single": "the input has shape token × feature",
    "grid": "the input has shape batch × channel × height × width",
    "grid-last": "the input has shape batch × height × width × channel",
}


class AttentionModule(Subject):
    """A class or an instance with weights of its own."""

    part = "multi-head-attention"
    axes: tuple[tuple[str, ...], ...] = (("batch", "token"), ("single",))

    def __init__(self, name: str, thing: Any, polarity: str | None = None) -> None:
        self.name = name
        sizes = {"width": 12, "heads": 3, "dropout": 0.1, "batch_first": True, "length": 16}
        self.instances = Instances(thing, sizes | {"key_width": 4, "value_width": 4})
        self.sample = self.instances.make({"width": 12, "heads": 3})
        self.roles = argument_roles(self.sample.forward)
        masks = [argument for argument, role in self.roles.items() if role == "mask"]
        self.forms_of_mask = forms_for(masks[0], type(self.sample), polarity) if masks else []
        self.plain = plain_mask(self.sample.forward, self.roles)
        if isinstance(self.sample, nn.MultiheadAttention):
            self.forms_of_mask = ["blocked"]

    def native(self) -> str:
        return "nn.MultiheadAttention"

    def cases(self) -> list[Case]:
        def sizes(width: int, heads: int, batch: int, tokens: int) -> dict[str, int]:
            return {"batch": batch, "width": width, "heads": heads, "rows": 1, "columns": tokens}

        cases = [
            Case("three heads, five tokens", sizes(12, 3, 2, 5) | self._grid(2, 3), self.plain),
            Case("one head", sizes(8, 1, 2, 4) | self._grid(2, 2), self.plain),
            Case("other sizes", sizes(15, 5, 3, 7) | self._grid(3, 5), self.plain),
            Case("one token", sizes(12, 3, 2, 1) | self._grid(1, 1), self.plain),
        ]
        if self.forms_of_mask:
            masked = sizes(12, 3, 2, 5) | self._grid(2, 3)
            cases += [Case("mask", masked, "random"), Case(LARGE_MASKED_SCORES, masked, "loud")]
        return [fitted for case in cases if (fitted := self.instances.fitted(case)) is not None]

    def _grid(self, rows: int, columns: int) -> dict[str, int]:
        return {} if self.part == "multi-head-attention" else {"rows": rows, "columns": columns}

    def tiny_cases(self) -> list[Case]:
        grown = [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 2, 3)]
        cases = tiny_attention(grown, self.plain)
        return [fitted for case in cases if (fitted := self.instances.fitted(case)) is not None]

    def inputs(self, case: Case) -> Inputs:
        s = case.sizes
        given = drawn(case, {"x": (s["batch"], s["rows"] * s["columns"], s["width"])})
        if case.mask == "loud":  # the masked last token is 300 times larger
            given["x"][:, -1] *= 300.0
        return given

    def groups(self) -> list[list[Way]]:
        return [
            [
                Way((AXES[axes],) if form is None else (AXES[axes], FORMS[form][0]), {"axes": axes, "form": form})
                for axes in group
                for form in self.forms_of_mask or [None]
            ]
            for group in self._possible_axes()
        ]

    def _possible_axes(self) -> list[tuple[str, ...]]:
        return [("token",)] if getattr(self.sample, "batch_first", None) is False else list(self.axes)

    def module(self, case: Case) -> nn.Module:
        return self.instances.make(case.sizes, self.dtype, self.training)

    def as_passed(self, way: Way, case: Case, inputs: Inputs) -> Inputs:
        return {"x": self.turned(inputs["x"], way.settings["axes"], case)}

    def as_returned(self, way: Way, case: Case, result: Tensor) -> Tensor:
        return self.turned(result, way.settings["axes"], case)

    def theirs(self, way: Way, case: Case, inputs: Inputs) -> Tensor:
        module, axes = self.module(case), way.settings["axes"]
        x = self.as_passed(way, case, inputs)["x"]
        values: dict[str, Any] = dict.fromkeys(("x", "q", "k", "v"), x) | {"heads": case.sizes["heads"]}
        allowed = allowed_pairs(case, inputs["x"].shape[1], inputs["x"].shape[1])
        if allowed is None:
            return self.back(picked(self.called(module, values), tuple(x.shape)), axes, case)
        mask, error = FORMS[way.settings["form"]][1](allowed, self.dtype), None
        for tried in tried_shapes(mask, (case.sizes["batch"], case.sizes["heads"])):
            try:
                result = self.called(module, values | {"mask": tried})
                return self.back(picked(result, tuple(x.shape)), axes, case)
            except (RuntimeError, ValueError, IndexError, AssertionError) as raised:
                error = error or raised
        raise error or RuntimeError("no mask shape was accepted")

    def called(self, module: nn.Module, values: dict[str, Any]) -> Any:
        """Call the module by argument roles; a required argument with an unknown name gets the tokens."""
        named, parameters = {}, inspect.signature(module.forward).parameters
        for argument, role in self.roles.items():
            required = parameters[argument].default is inspect.Parameter.empty
            if role in values and (required or role == "mask"):
                named[argument] = values[role]
            elif required:
                named[argument] = values["x"]
        return module(**named) if named else module(values["x"])

    def turned(self, x: Tensor, axes: str, case: Case) -> Tensor:
        return {"batch": x, "token": x.transpose(0, 1), "single": x[0]}[axes]

    def back(self, x: Tensor, axes: str, case: Case) -> Tensor:
        if axes == "token" and x.ndim == 3:
            return x.transpose(0, 1)
        return x[None] if axes == "single" else x

    def ours(self, way: Way, case: Case, inputs: Inputs, options: Options) -> Tensor:
        module, x = self.module(case), inputs["x"]
        x = x[:1] if way.settings["axes"] == "single" else x
        allowed = allowed_pairs(case, x.shape[1], x.shape[1])
        if options.get("causal"):
            own = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            allowed = own if allowed is None else allowed & own
        if options.get("norm_inside"):
            x = F.layer_norm(x, x.shape[-1:], *norm_arguments(norms_of(module)[0][1]))
        weights = weights_under(linear_maps(module), options, case.sizes["heads"])
        return multi_head((x, x, x), weights, case.sizes["heads"], allowed, options)

    def readings(self, way: Way) -> list[Reading]:
        found = attention_readings(self.sample, linear_maps(self.sample))
        if norms_of(self.sample):
            inside = [
                (dict(o) | {"norm_inside": True}, (*w, "the module normalises its input itself")) for o, w in found
            ]
            return [*inside, *found]
        return found

    def switches(self, way: Way) -> list[Switch]:
        found = attention_switches(self.sample, linear_maps(self.sample), masked=bool(self.forms_of_mask))
        return [s for s in found if s.id != "missing-output-projection" or not self.forms(way)]

    def forms(self, way: Way) -> list[Switch]:
        """Detect a missing output projection; it is optional for a single head."""
        maps = linear_maps(self.sample)
        weights = weights_under(maps, self.readings(way)[0][0], 3)
        if self.instances.has_heads and "wo" not in weights:
            return [Switch("missing-output-projection", {"projected": False})]
        return []

    def weights_shown(self, case: Case) -> Inputs:
        return dict(self.module(case).named_parameters())

    def parameters(self, way: Way, case: Case) -> list[Tensor]:
        return list(self.module(case).parameters())

    def guessed(self, way: Way | None) -> list[str]:
        return single_rows(source_of(type(self.sample)))

    def evidence(self, way: Way, theirs: Tensor, ours: Tensor) -> list[str]:
        lines = attention_evidence(self, way, theirs, ours)
        case = self.cases()[0]
        x = self.inputs(case)["x"].to(self.dtype)
        order = torch.arange(x.shape[1]).flip(0)
        same = torch.allclose(self.theirs(way, case, {"x": x[:, order]}), theirs[:, order], atol=1e-4)
        other = (
            "Permuting the tokens does not permute the output in the same way (wrong unless the attention is causal)."
        )
        lines.append("Permuting the tokens permutes the output in the same way (correct)." if same else other)
        alone = self.theirs(way, case, {"x": torch.cat([x[:1], torch.zeros_like(x[1:])])})
        apart = torch.allclose(alone[:1], theirs[:1], atol=1e-4)
        return [*lines, observe(apart, ALONE, NOT_ALONE)]


class AttentionOverGrid(AttentionModule):
    """Self-attention over all positions of a feature map."""

    part = "self-attention-2d"
    axes = (("grid",), ("grid-last",))

    def native(self) -> str:
        return "nn.MultiheadAttention over all positions"

    def turned(self, x: Tensor, axes: str, case: Case) -> Tensor:
        grid = x.unflatten(1, (case.sizes["rows"], case.sizes["columns"]))
        return grid.permute(0, 3, 1, 2) if axes == "grid" else grid

    def back(self, x: Tensor, axes: str, case: Case) -> Tensor:
        if x.ndim == 3:
            return x
        return x.permute(0, 2, 3, 1).flatten(1, 2) if axes == "grid" else x.flatten(1, 2)
