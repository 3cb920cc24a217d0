"""Check the part `sinusoidal-positions`: sines and cosines of the position (Vaswani et al. 2017, section 3.5)."""

import inspect

import torch
from torch import Tensor, nn

from vitascope.coursework.checker.module_factory import ModuleFactory
from vitascope.coursework.checker.part_checker import (
    CallConvention,
    Case,
    CorrectVariant,
    MaskPolarity,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
)
from vitascope.coursework.checker.recognition import ArgumentRoles, UserCode, call_by_roles, normalize_identifier
from vitascope.coursework.checker.reference import ReferenceVariant, SimulatedMistake

LENGTH_ARGUMENT_NAMES = {
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
LENGTH_ARGUMENT_NAMES |= {
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
LENGTH_ARGUMENT_NAMES |= {
    "maxposition",
    "position",
    "nposition",
    "len",
    "seq",
    "numpos",
    "npos",
    "contextlength",
    "blocksize",
    "rows",
}
WRONG_BASES = (1000.0, 100.0, 1e5, 100000.0, 2.718281828459045, 10.0, 1e6, 500.0)
SINUSOIDAL_MISTAKES = [
    SimulatedMistake("sin-cos-swapped", {"swapped_waves": True}),
    *(SimulatedMistake("wrong-frequency", {"rate": ("base", base)}) for base in WRONG_BASES),
    *(SimulatedMistake("wrong-frequency", {"rate": ("power", power)}) for power in (2.0, 0.5, -1.0, 4.0, 0.0)),
    SimulatedMistake("wrong-frequency", {"rate": ("each", 1.0)}),
    SimulatedMistake("wrong-frequency", {"rate": ("each", 2.0)}),
    SimulatedMistake("wrong-frequency", {"rate": ("minus one", 1.0)}),
]


def compute_sinusoidal_table_by_variant(length: int, width: int, variant_or_mistakes: ReferenceVariant) -> Tensor:
    """Return the table of shape position × feature."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    kind, value = variant_or_mistakes.get("rate", ("power", 1.0))
    base, power = (value, 1.0) if kind == "base" else (10000.0, value)
    exponent = 2 * pair / (width - 2 if kind == "minus one" or variant_or_mistakes.get("tensor2tensor") else width)
    sine_exponent, cosine_exponent = exponent * power, exponent * power
    if kind == "each":  # a different frequency for every feature instead of every pair
        sine_exponent, cosine_exponent = value * 2 * pair / width, value * (2 * pair + 1) / width
    position = torch.arange(length, dtype=torch.float64)[:, None] + (1 if variant_or_mistakes.get("from_one") else 0)
    waves = [torch.sin(position * base**-sine_exponent), torch.cos(position * base**-cosine_exponent)]
    waves = waves[::-1] if variant_or_mistakes.get("swapped_waves") else waves
    return torch.cat(waves, dim=1) if variant_or_mistakes.get("halves") else torch.stack(waves, dim=2).flatten(1)


class SinusoidalPositionsChecker(PartChecker):
    """Check f(length, width), or a module that adds its table to the tokens."""

    part = "sinusoidal-positions"

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name, self.user_code = name, user_code
        self.is_module = isinstance(user_code, type | nn.Module)
        if self.is_module:
            self.module_factory = ModuleFactory(
                user_code, {"width": 8, "length": 12, "dropout": 0.1}, ("width", "length")
            )
        else:
            self.argument_roles = _guess_position_argument_roles(user_code)

    def get_reference_name(self) -> str:
        return "the formula of Vaswani et al. (2017)"

    def list_cases(self) -> list[Case]:
        width = (
            self.module_factory.fixed_sizes.get("width", 8)
            if self.is_module and isinstance(self.user_code, nn.Module)
            else 8
        )
        if self.is_module and isinstance(self.user_code, nn.Module):
            return [Case(f"5 positions, width {width}", {"length": 5, "width": width})]
        return [
            Case("12 positions, width 8", {"length": 12, "width": 8}),
            Case("5 positions, width 16", {"length": 5, "width": 16}),
            Case("one position", {"length": 1, "width": 8}),
        ]

    def list_tiny_example_cases(self) -> list[Case]:
        return [Case(_format_size(n, d), {"length": n, "width": d}, tiny=True) for n, d in ((1, 2), (2, 2), (2, 4))]

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        return {}

    def list_convention_groups(self) -> list[list[CallConvention]]:
        if not self.is_module:
            return [[CallConvention((), {})]]
        batch = CallConvention(("the tokens have shape batch × token × feature",), {"axis_order": "batch"})
        return [[batch, CallConvention(("the tokens have shape token × batch × feature",), {"axis_order": "token"})]]

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        length, width = case.sizes["length"], case.sizes["width"]
        if self.is_module:
            module = self.module_factory.get_or_build_module(dict(case.sizes), self.dtype, self.training)
            zeros = torch.zeros(3, length, width, dtype=self.dtype)
            tokens = zeros.transpose(0, 1) if convention.settings["axis_order"] == "token" else zeros
            out = module(tokens)
            out = out[:, 0] if convention.settings["axis_order"] == "token" and out.ndim == 3 else out
        else:
            values = {"length": length, "width": width, "base": 10000.0, "device": torch.device("cpu")}
            out = call_by_roles(self.user_code, values, self.argument_roles)
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

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        return compute_sinusoidal_table_by_variant(case.sizes["length"], case.sizes["width"], variant_or_mistakes).to(
            self.dtype
        )

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        return [
            CorrectVariant({}, ("sine and cosine features alternate",)),
            CorrectVariant({"halves": True}, ("the first half of the features is sine, the second half is cosine",)),
            CorrectVariant(
                {"halves": True, "tensor2tensor": True},
                ("first half sine, second half cosine, with the frequencies of tensor2tensor",),
            ),
        ]

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        return SINUSOIDAL_MISTAKES

    def guess_mistake_ids_without_simulation(self, convention: CallConvention | None) -> list[str]:
        """Detect a wrong frequency: every feature is a sine or cosine of the position, but with other angles."""
        if convention is None:
            return []
        case = self.list_cases()[0]
        table = self.run_user_code_and_restore_axes(convention, case, {})
        if table.shape != (case.sizes["length"], case.sizes["width"]) or table.shape[0] < 4:
            return []
        zero, one = table[0].abs() < 1e-5, (table[0] - 1).abs() < 1e-5
        # f(p + 1) + f(p - 1) = 2 cos(w) f(p) for any sine or cosine of w · position
        divisor = table[1].where(table[1].abs() > 1e-9, torch.ones(()).to(table))
        twice_cosine = table[2] / divisor + one / divisor
        are_waves = torch.allclose(table[3], twice_cosine * table[2] - table[1], atol=1e-3)
        if not ((zero | one).all() and are_waves):
            return []
        is_correct_order = (one[1::2].all() and zero[0::2].all()) or one[table.shape[1] // 2 :].all()
        return ["wrong-frequency"] if is_correct_order else ["sin-cos-swapped", "wrong-frequency"]

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        if user_result.shape != reference_result.shape:
            return [f"The table has shape {list(user_result.shape)} instead of {list(reference_result.shape)}."]
        correct_indices = [
            n
            for n in range(reference_result.shape[1])
            if torch.allclose(user_result[:, n], reference_result[:, n], atol=1e-4)
        ]
        indices = f": indices {correct_indices}" if correct_indices else ""
        values = ", ".join(f"{value:.4g}" for value in user_result[0].tolist()[:8])
        return [
            f"{len(correct_indices)} of {reference_result.shape[1]} features are correct{indices}.",
            f"Position 0 has the values {values}.",
        ]


def _format_size(length: int, width: int) -> str:
    return f"{length} {'position' if length == 1 else 'positions'}, width {width}"


def _guess_position_argument_roles(function: UserCode) -> ArgumentRoles:
    roles = {}
    for name, parameter in inspect.signature(function).parameters.items():
        normalized = normalize_identifier(name)
        if (
            parameter.default is not parameter.empty
            and "length" in roles.values()
            and normalized in LENGTH_ARGUMENT_NAMES
        ):
            roles[name] = "base"  # n=10000 after a length
        elif normalized in LENGTH_ARGUMENT_NAMES:
            roles[name] = "length"
        elif normalized in ("base", "theta", "temperature", "maxperiod", "device", "dtype"):
            roles[name] = "device" if normalized == "device" else "base" if normalized != "dtype" else "dtype"
        else:
            roles[name] = "width" if "width" not in roles.values() else normalized
    if "length" not in roles.values():
        roles[next(iter(roles))] = "length"
        rest = [name for name in roles if roles[name] not in ("length", "base", "device")]
        roles |= {rest[0]: "width"} if rest else {}
    return roles
