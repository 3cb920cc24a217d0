"""Check the part `class-token`, and embed images with an option to simulate every known mistake."""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.dot_product import select_matching_or_first_tensor
from vitascope.coursework.checker.module_factory import ModuleFactory
from vitascope.coursework.checker.part_checker import (
    CallConvention,
    Case,
    MaskPolarity,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
    UserInputs,
    draw_seeded_inputs_for_case,
)
from vitascope.coursework.checker.recognition import (
    ArgumentRoles,
    UserCode,
    call_by_roles,
    guess_argument_roles,
    normalize_identifier,
)
from vitascope.coursework.checker.reference import ReferenceVariant, SimulatedMistake

PIXEL_ORDERS = {  # orders of the values inside a patch; all are correct
    "chw": "channel, row, column",
    "hwc": "row, column, channel",
    "cwh": "channel, column, row",
    "whc": "column, row, channel",
}
AXIS_NAMES = {"c": "channel", "h": "height", "w": "width"}
INTERLEAVED_PATTERNS = {
    "both": "batch channel (height row) (width column)",
    "rows": "batch channel (height row) (column width)",
    "columns": "batch channel (row height) (width column)",
}
PATCH_MISTAKES = [
    SimulatedMistake("patches-in-column-order", {"order": "(column row)"}),
    *(
        SimulatedMistake("pixels-interleaved", {"cut": cut})
        for cut in (*INTERLEAVED_PATTERNS, "strips", "channel strips")
    ),
]
CLASS_TOKEN_MISTAKES = [
    SimulatedMistake("class-token-at-end", {"class_at": position})
    for position in ("end", "end, read first", "start, read last")
]
POSITION_MISTAKES = [
    SimulatedMistake("position-misplaced", {"position": position})
    for position in ("before", "end", "none", "not-class", "rolled", "class-only", "twice", "each-block")
]


def extract_patches_by_variant(images: Tensor, patch_size: int, variant_or_mistakes: ReferenceVariant) -> Tensor:
    """(batch, channel, height, width) -> (batch, patch, pixel)."""
    batch, channels, height, width = images.shape
    count, pixels = (height // patch_size) * (width // patch_size), variant_or_mistakes.get("pixels", "chw")
    cut = variant_or_mistakes.get("cut")
    if cut == "strips":
        return images.reshape(batch, count, -1)
    if cut == "channel strips":
        return images.reshape(batch, channels, count, patch_size * patch_size).transpose(1, 2).flatten(2)
    input_pattern = INTERLEAVED_PATTERNS.get(cut or "", "batch channel (row height) (column width)")
    pixel_axes = " ".join(AXIS_NAMES[letter] for letter in pixels)
    output_pattern = f"batch {variant_or_mistakes.get('order', '(row column)')} ({pixel_axes})"
    return rearrange(images, f"{input_pattern} -> {output_pattern}", height=patch_size, width=patch_size)


def add_class_token_and_positions_by_variant(
    patch_tokens: Tensor,
    class_token: Tensor | None,
    position_table: Tensor | None,
    variant_or_mistakes: ReferenceVariant,
) -> Tensor:
    """Prepend the class token and add the position embeddings.

    A position table with one row per patch is not added to the class token."""
    position = variant_or_mistakes.get("position")
    first = None if class_token is None else class_token.reshape(1, 1, -1).expand(len(patch_tokens), 1, -1)
    if position_table is not None:
        position_table = position_table.reshape(1, *position_table.shape[-2:])
        inside = position_table[:, : patch_tokens.shape[1] + (0 if first is None else 1)]
        if first is None or position_table.shape[1] == patch_tokens.shape[1]:
            return _concat_class_token_if_any(
                patch_tokens + (0 if position in ("none", "end", "each-block") else position_table),
                first,
                variant_or_mistakes,
            )
        if position == "before":
            return _concat_class_token_if_any(
                patch_tokens + inside[:, : patch_tokens.shape[1]], first, variant_or_mistakes
            )
        if position == "not-class":
            return _concat_class_token_if_any(patch_tokens + inside[:, 1:], first, variant_or_mistakes)
        if position == "class-only":
            return _concat_class_token_if_any(patch_tokens, first + inside[:, :1], variant_or_mistakes)
        inside = inside.roll(1, 1) if position == "rolled" else inside * (2 if position == "twice" else 1)
        tokens = _concat_class_token_if_any(patch_tokens, first, variant_or_mistakes)
        return tokens if position in ("none", "end", "each-block") else tokens + inside
    return _concat_class_token_if_any(patch_tokens, first, variant_or_mistakes)


def _concat_class_token_if_any(
    patch_tokens: Tensor, class_token: Tensor | None, variant_or_mistakes: ReferenceVariant
) -> Tensor:
    if class_token is None:
        return patch_tokens
    at_end = variant_or_mistakes.get("class_at", "").startswith("end")
    return torch.cat([patch_tokens, class_token] if at_end else [class_token, patch_tokens], dim=1)


def select_first_or_last_token(tokens: Tensor, variant_or_mistakes: ReferenceVariant) -> Tensor:
    """Return the token that the user's head reads as the class token."""
    return tokens[:, -1 if variant_or_mistakes.get("class_at") in ("end", "start, read last") else 0]


def project_patches(patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply the weight of a convolution or a linear layer to flattened patches."""
    return F.linear(patches, weight.flatten(1), bias)


CLASS_TOKEN_SHAPES = {"1×1×feature": (1, 1), "feature": (), "1×feature": (1,)}


class ClassTokenChecker(PartChecker):
    """Check f(tokens, class_token[, positions]), or a module that holds its class token."""

    part = "class-token"

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name, self.user_code = name, user_code
        self.is_module = isinstance(user_code, type | nn.Module)
        if self.is_module:
            sizes = {"width": 12, "patches": 9, "length": 9, "dropout": 0.1, "image": 12, "patch": 4, "channels": 3}
            self.module_factory = ModuleFactory(user_code, sizes, ("width", "patches"))
        else:
            self.argument_roles = _guess_class_token_argument_roles(user_code)

    def get_reference_name(self) -> str:
        return "torch.cat"

    def list_cases(self) -> list[Case]:
        cases = [Case("nine patches", {"batch": 2, "tokens": 9, "width": 12})]
        if self.is_module:
            return cases
        return [*cases, Case("one patch", {"batch": 3, "tokens": 1, "width": 5})]

    def list_tiny_example_cases(self) -> list[Case]:
        return [] if self.is_module else [Case("two patches", {"batch": 1, "tokens": 2, "width": 1}, tiny=True)]

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        s = case.sizes
        shapes: dict[str, tuple[int, ...]] = {"x": (s["batch"], s["tokens"], s["width"])}
        if not self.is_module:
            shapes["token"] = (1, 1, s["width"])
            if "positions" in self.argument_roles.values():
                shapes["positions"] = (1, s["tokens"] + 1, s["width"])
        return draw_seeded_inputs_for_case(case, shapes)

    def list_convention_groups(self) -> list[list[CallConvention]]:
        axis_order = "the tokens have shape batch × token × feature"
        if self.is_module:
            return [[CallConvention((axis_order,), {"shape": ()})]]
        return [
            [CallConvention((axis_order, f"the class token has shape {name}"), {"shape": shape})]
            for name, shape in CLASS_TOKEN_SHAPES.items()
        ]

    def reshape_inputs_for_user_code(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> UserInputs:
        if self.is_module:
            return inputs
        return inputs | {"token": inputs["token"].reshape(*convention.settings["shape"], case.sizes["width"])}

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        s = case.sizes
        expected_shape = (s["batch"], s["tokens"] + 1, s["width"])
        if self.is_module:
            return select_matching_or_first_tensor(
                self.module_factory.get_or_build_module({}, self.dtype, self.training)(inputs["x"]), expected_shape
            )
        return select_matching_or_first_tensor(
            call_by_roles(
                self.user_code, self.reshape_inputs_for_user_code(convention, case, inputs), self.argument_roles
            ),
            expected_shape,
        )

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        token, table = inputs.get("token"), inputs.get("positions")
        if self.is_module:
            token, table = find_class_token_and_positions(
                self.module_factory.get_or_build_module({}, self.dtype), case.sizes["tokens"], 12
            )
        return add_class_token_and_positions_by_variant(inputs["x"], token, table, variant_or_mistakes)

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        positions = {"before", "not-class", "none", "rolled", "class-only", "twice"}
        return [
            CLASS_TOKEN_MISTAKES[0],
            *(mistake for mistake in POSITION_MISTAKES if mistake.options["position"] in positions),
        ]

    def get_user_parameters(self, convention: CallConvention, case: Case) -> list[Tensor]:
        return list(self.module_factory.get_or_build_module({}, self.dtype).parameters()) if self.is_module else []

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        if user_result.shape != reference_result.shape:
            return [f"The output has shape {list(user_result.shape)} instead of {list(reference_result.shape)}."]
        correct_indices = [
            n for n in range(reference_result.shape[1]) if torch.allclose(user_result[:, n], reference_result[:, n])
        ]
        indices = f": indices {correct_indices}" if correct_indices else ""
        return [f"{len(correct_indices)} of {reference_result.shape[1]} tokens are correct{indices}."]


class TokenAndPositions(NamedTuple):
    """The class token and the position table of a module, or None for what it does not have."""

    class_token: Tensor | None
    position_table: Tensor | None


def find_class_token_and_positions(module: nn.Module, num_patches: int, width: int) -> TokenAndPositions:
    """Find a module's class token and position table by name and shape."""
    attributes = [(n, t) for part in module.modules() for n, t in vars(part).items() if isinstance(t, Tensor)]
    named = [*module.named_parameters(), *module.named_buffers(), *attributes]
    tensors = {n: p for n, p in named if p.is_floating_point()}
    token_candidates = {n: t for n, t in tensors.items() if t.numel() == width and t.ndim != 1} | {
        n: t for n, t in tensors.items() if t.numel() == width and _is_class_token_name(n)
    }
    token = next(
        (t for n, t in token_candidates.items() if _is_class_token_name(n)), next(iter(token_candidates.values()), None)
    )
    tables = {n: t for n, t in tensors.items() if t.ndim in (2, 3) and t.shape[-1] == width and t.numel() > width}
    position_tables = [t for n, t in tables.items() if any(word in normalize_identifier(n) for word in ("pos", "pe"))]
    fitting = [t for t in position_tables if t.numel() // width >= num_patches]
    return TokenAndPositions(token, fitting[0].reshape(-1, width) if fitting else None)


def _is_class_token_name(name: str) -> bool:
    return "cls" in normalize_identifier(name) or "class" in normalize_identifier(name)


def _guess_class_token_argument_roles(function: UserCode) -> ArgumentRoles:
    roles = guess_argument_roles(function)
    for name in roles:
        if "pos" in normalize_identifier(name):
            roles[name] = "positions"
        elif _is_class_token_name(name):
            roles[name] = "token"
    if "token" not in roles.values():
        roles[list(roles)[1 if len(roles) > 1 else 0]] = "token"
    if "x" not in roles.values():
        roles[next(name for name in roles if roles[name] not in ("token", "positions"))] = "x"
    return roles
