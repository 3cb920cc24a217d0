"""Check `multi-head-attention` and `self-attention-2d` written as modules, compared with nn.MultiheadAttention."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.dot_product import (
    describe_attention_mistake_symptoms,
    select_matching_or_first_tensor,
)
from vitascope.coursework.checker.layers import (
    assign_weights_by_variant,
    get_norm_weight_bias_eps,
    guess_in_proj_indexing_mistake_ids,
    list_attention_mistakes,
    list_correct_attention_variants,
)
from vitascope.coursework.checker.masks import MASK_FORMATS, list_expanded_masks, list_plausible_mask_formats
from vitascope.coursework.checker.module_factory import ModuleFactory
from vitascope.coursework.checker.part_checker import (
    IMAGES_INDEPENDENT,
    LARGE_MASKED_SCORES,
    CallConvention,
    Case,
    CorrectVariant,
    MaskKind,
    MaskPolarity,
    NamedTensors,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
    TinySizes,
    UserInputs,
    choose_mask_kind_if_required,
    draw_seeded_inputs_for_case,
    format_observation,
    make_allowed_mask_if_masked,
    make_tiny_attention_cases,
)
from vitascope.coursework.checker.recognition import UserCode, get_source_or_empty, guess_argument_roles
from vitascope.coursework.checker.reference import (
    QueryKeyValue,
    ReferenceVariant,
    SimulatedMistake,
    run_reference_multi_head_attention_variant,
)
from vitascope.coursework.checker.weights import find_linear_layers_and_matrices, find_norms

AXIS_ORDERS = {
    "batch": "the input has shape batch × token × feature",
    "token": "the input has shape token × batch × feature, as in nn.MultiheadAttention",
    "single": "the input has shape token × feature",
    "grid": "the input has shape batch × channel × height × width",
    "grid-last": "the input has shape batch × height × width × channel",
}


class AttentionModuleChecker(PartChecker):
    """Check a class or an instance that holds its weights."""

    part = "multi-head-attention"
    axis_order_groups: tuple[tuple[str, ...], ...] = (("batch", "token"), ("single",))

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name = name
        sizes = {"width": 12, "heads": 3, "dropout": 0.1, "batch_first": True, "length": 16}
        self.module_factory = ModuleFactory(user_code, sizes | {"key_width": 4, "value_width": 4})
        self.sample_module = self.module_factory.get_or_build_module({"width": 12, "heads": 3})
        self.argument_roles = guess_argument_roles(self.sample_module.forward)
        masks = [argument for argument, role in self.argument_roles.items() if role == "mask"]
        self.mask_formats = (
            list_plausible_mask_formats(masks[0], type(self.sample_module), mask_polarity) if masks else []
        )
        self.default_mask_kind: MaskKind | None = choose_mask_kind_if_required(
            self.sample_module.forward, self.argument_roles
        )
        if isinstance(self.sample_module, nn.MultiheadAttention):
            self.mask_formats = ["blocked"]

    def get_reference_name(self) -> str:
        return "nn.MultiheadAttention"

    def list_cases(self) -> list[Case]:
        def make_sizes(width: int, heads: int, batch: int, tokens: int) -> dict[str, int]:
            return {"batch": batch, "width": width, "heads": heads, "rows": 1, "columns": tokens}

        cases = [
            Case(
                "three heads, five tokens", make_sizes(12, 3, 2, 5) | self._get_grid_sizes(2, 3), self.default_mask_kind
            ),
            Case("one head", make_sizes(8, 1, 2, 4) | self._get_grid_sizes(2, 2), self.default_mask_kind),
            Case("other sizes", make_sizes(15, 5, 3, 7) | self._get_grid_sizes(3, 5), self.default_mask_kind),
            Case("one token", make_sizes(12, 3, 2, 1) | self._get_grid_sizes(1, 1), self.default_mask_kind),
        ]
        if self.mask_formats:
            masked = make_sizes(12, 3, 2, 5) | self._get_grid_sizes(2, 3)
            cases += [Case("mask", masked, "random"), Case(LARGE_MASKED_SCORES, masked, "high_scores")]
        return [adapted for case in cases if (adapted := self.module_factory.resize_case_if_possible(case)) is not None]

    def _get_grid_sizes(self, num_rows: int, num_columns: int) -> dict[str, int]:
        return {} if self.part == "multi-head-attention" else {"rows": num_rows, "columns": num_columns}

    def list_tiny_example_cases(self) -> list[Case]:
        sizes = [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 2, 3)]
        cases = make_tiny_attention_cases([TinySizes(*size) for size in sizes], self.default_mask_kind)
        return [adapted for case in cases if (adapted := self.module_factory.resize_case_if_possible(case)) is not None]

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        s = case.sizes
        inputs = draw_seeded_inputs_for_case(case, {"x": (s["batch"], s["rows"] * s["columns"], s["width"])})
        if case.mask_kind == "high_scores":  # the masked last token is 300 times larger
            inputs["x"][:, -1] *= 300.0
        return inputs

    def list_convention_groups(self) -> list[list[CallConvention]]:
        return [
            [
                CallConvention(
                    (AXIS_ORDERS[axis_order],)
                    if mask_format is None
                    else (AXIS_ORDERS[axis_order], MASK_FORMATS[mask_format].description),
                    {"axis_order": axis_order, "mask_format": mask_format},
                )
                for axis_order in group
                for mask_format in self.mask_formats or [None]
            ]
            for group in self._list_axis_order_groups()
        ]

    def _list_axis_order_groups(self) -> list[tuple[str, ...]]:
        return (
            [("token",)] if getattr(self.sample_module, "batch_first", None) is False else list(self.axis_order_groups)
        )

    def get_or_build_module(self, case: Case) -> nn.Module:
        return self.module_factory.get_or_build_module(case.sizes, self.dtype, self.training)

    def reshape_inputs_for_user_code(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> UserInputs:
        return {"x": self.convert_to_user_axes(inputs["x"], convention.settings["axis_order"], case)}

    def permute_output_to_user_axes(self, convention: CallConvention, case: Case, result: Tensor) -> Tensor:
        return self.convert_to_user_axes(result, convention.settings["axis_order"], case)

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        module, axis_order = self.get_or_build_module(case), convention.settings["axis_order"]
        x = self.reshape_inputs_for_user_code(convention, case, inputs)["x"]
        values: dict[str, Any] = dict.fromkeys(("x", "q", "k", "v"), x) | {"heads": case.sizes["heads"]}
        allowed = make_allowed_mask_if_masked(case, inputs["x"].shape[1], inputs["x"].shape[1])
        if allowed is None:
            return self.convert_from_user_axes(
                select_matching_or_first_tensor(self.call_module_by_argument_roles(module, values), tuple(x.shape)),
                axis_order,
                case,
            )
        mask, error = MASK_FORMATS[convention.settings["mask_format"]].convert(allowed, self.dtype), None
        for candidate in list_expanded_masks(mask, (case.sizes["batch"], case.sizes["heads"])):
            try:
                result = self.call_module_by_argument_roles(module, values | {"mask": candidate})
                return self.convert_from_user_axes(
                    select_matching_or_first_tensor(result, tuple(x.shape)), axis_order, case
                )
            except (RuntimeError, ValueError, IndexError, AssertionError) as raised:
                error = error or raised
        raise error or RuntimeError("no mask shape was accepted")

    def call_module_by_argument_roles(self, module: nn.Module, values_by_role: dict[str, Any]) -> Any:
        """Call the module by argument roles; a required argument with an unknown name gets the tokens."""
        named, parameters = {}, inspect.signature(module.forward).parameters
        for argument, role in self.argument_roles.items():
            required = parameters[argument].default is inspect.Parameter.empty
            if role in values_by_role and (required or role == "mask"):
                named[argument] = values_by_role[role]
            elif required:
                named[argument] = values_by_role["x"]
        return module(**named) if named else module(values_by_role["x"])

    def convert_to_user_axes(self, x: Tensor, axis_order: str, case: Case) -> Tensor:
        return {"batch": x, "token": x.transpose(0, 1), "single": x[0]}[axis_order]

    def convert_from_user_axes(self, x: Tensor, axis_order: str, case: Case) -> Tensor:
        if axis_order == "token" and x.ndim == 3:
            return x.transpose(0, 1)
        return x[None] if axis_order == "single" else x

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        module, x = self.get_or_build_module(case), inputs["x"]
        x = x[:1] if convention.settings["axis_order"] == "single" else x
        allowed = make_allowed_mask_if_masked(case, x.shape[1], x.shape[1])
        if variant_or_mistakes.get("causal"):
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            allowed = causal if allowed is None else allowed & causal
        if variant_or_mistakes.get("norm_inside"):
            x = F.layer_norm(x, x.shape[-1:], *get_norm_weight_bias_eps(find_norms(module)[0].norm))
        weights = assign_weights_by_variant(
            find_linear_layers_and_matrices(module), variant_or_mistakes, case.sizes["heads"]
        )
        return run_reference_multi_head_attention_variant(
            QueryKeyValue(x, x, x), weights, case.sizes["heads"], allowed, variant_or_mistakes
        )

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        variants = list_correct_attention_variants(
            self.sample_module, find_linear_layers_and_matrices(self.sample_module)
        )
        if find_norms(self.sample_module):
            inside = [
                CorrectVariant(
                    dict(variant.options) | {"norm_inside": True},
                    (*variant.assumptions, "the module normalises its input itself"),
                )
                for variant in variants
            ]
            return [*inside, *variants]
        return variants

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        mistakes = list_attention_mistakes(
            self.sample_module, find_linear_layers_and_matrices(self.sample_module), has_mask=bool(self.mask_formats)
        )
        return [
            mistake
            for mistake in mistakes
            if mistake.mistake_id != "missing-output-projection" or not self.find_missing_layer_mistakes(convention)
        ]

    def find_missing_layer_mistakes(self, convention: CallConvention) -> list[SimulatedMistake]:
        """Detect a missing output projection; it is optional for a single head."""
        linear_layers = find_linear_layers_and_matrices(self.sample_module)
        weights = assign_weights_by_variant(
            linear_layers, self.list_correct_reference_variants(convention)[0].options, 3
        )
        if self.module_factory.has_heads and "wo" not in weights:
            return [SimulatedMistake("missing-output-projection", {"projected": False})]
        return []

    def get_user_weights_by_name(self, case: Case) -> NamedTensors:
        return dict(self.get_or_build_module(case).named_parameters())

    def get_user_parameters(self, convention: CallConvention, case: Case) -> list[Tensor]:
        return list(self.get_or_build_module(case).parameters())

    def guess_mistake_ids_without_simulation(self, convention: CallConvention | None) -> list[str]:
        return guess_in_proj_indexing_mistake_ids(get_source_or_empty(type(self.sample_module)))

    def describe_symptoms(self, convention: CallConvention, user_result: Tensor, reference_result: Tensor) -> list[str]:
        lines = describe_attention_mistake_symptoms(self, convention, user_result, reference_result)
        case = self.list_cases()[0]
        x = self.make_float64_inputs(case)["x"].to(self.dtype)
        order = torch.arange(x.shape[1]).flip(0)
        is_equivariant = torch.allclose(
            self.run_user_code_and_restore_axes(convention, case, {"x": x[:, order]}), user_result[:, order], atol=1e-4
        )
        requirement = "permuting the tokens permutes the output in the same way (unless the attention is causal)"
        lines.append(format_observation(is_equivariant, requirement))
        alone = self.run_user_code_and_restore_axes(
            convention, case, {"x": torch.cat([x[:1], torch.zeros_like(x[1:])])}
        )
        is_independent = torch.allclose(alone[:1], user_result[:1], atol=1e-4)
        return [*lines, format_observation(is_independent, IMAGES_INDEPENDENT)]


class Attention2dChecker(AttentionModuleChecker):
    """Check self-attention over all positions of a feature map."""

    part = "self-attention-2d"
    axis_order_groups = (("grid",), ("grid-last",))

    def get_reference_name(self) -> str:
        return "nn.MultiheadAttention over all positions"

    def convert_to_user_axes(self, x: Tensor, axis_order: str, case: Case) -> Tensor:
        grid = x.unflatten(1, (case.sizes["rows"], case.sizes["columns"]))
        return grid.permute(0, 3, 1, 2) if axis_order == "grid" else grid

    def convert_from_user_axes(self, x: Tensor, axis_order: str, case: Case) -> Tensor:
        if x.ndim == 3:
            return x
        return x.permute(0, 2, 3, 1).flatten(1, 2) if axis_order == "grid" else x.flatten(1, 2)
