"""Check the part `patchify`: split images into patches as F.unfold does, with an optional projection."""

import inspect
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vitascope.coursework.checker.dot_product import select_matching_or_first_tensor
from vitascope.coursework.checker.image_embedding import (
    PATCH_MISTAKES,
    PIXEL_ORDERS,
    extract_patches_by_variant,
    project_patches,
)
from vitascope.coursework.checker.module_factory import ModuleFactory
from vitascope.coursework.checker.part_checker import (
    CallConvention,
    Case,
    CorrectVariant,
    MaskPolarity,
    OutputInReferenceAxes,
    PartChecker,
    ReferenceInputs,
    UserInputs,
    draw_seeded_inputs_for_case,
)
from vitascope.coursework.checker.recognition import ArgumentRoles, UserCode, call_by_roles, normalize_identifier
from vitascope.coursework.checker.reference import ReferenceVariant, SimulatedMistake

AXIS_ORDERS = {
    "batch": "the images have shape batch × channel × height × width",
    "last": "the images have shape batch × height × width × channel",
    "single": "the image has shape channel × height × width",
    "single-last": "the image has shape height × width × channel",
}


class PatchifyChecker(PartChecker):
    """Check a function, or a class with or without a projection."""

    part = "patchify"

    def __init__(self, name: str, user_code: UserCode, mask_polarity: MaskPolarity | None = None) -> None:
        self.name, self.user_code = name, user_code
        self.constructor_sizes = {"width": 12, "patch": 4, "image": 12, "channels": 3, "dropout": 0.1}
        self.module_factory = (
            ModuleFactory(user_code, self.constructor_sizes, ("patch",))
            if isinstance(user_code, type | nn.Module)
            else None
        )
        self.patch_size = (
            None if self.module_factory is None else _find_patch_size(self.module_factory.get_or_build_module({}))
        )

    def get_reference_name(self) -> str:
        return "F.unfold"

    def _make_case_sizes(self, num_channels: int, height: int, width: int, patch_size: int) -> dict[str, int]:
        return {"batch": 2, "channels": num_channels, "height": height, "width_": width, "patch": patch_size}

    def list_cases(self) -> list[Case]:
        if self.module_factory is not None:
            return [Case("12×12 images", self._make_case_sizes(3, 12, 12, self.patch_size or 4))]
        fixed = self._find_fixed_patch_size()
        cases = [
            Case("12×12 images", self._make_case_sizes(3, 12, 12, 4)),
            Case("grayscale 9×9 images", self._make_case_sizes(1, 9, 9, 3)),
            Case("one patch", self._make_case_sizes(3, 4, 4, 4)),
            Case("8×12 images", self._make_case_sizes(3, 8, 12, 4), required=False),
        ]
        return (
            cases if fixed is None else [Case("square images", self._make_case_sizes(3, 3 * fixed, 3 * fixed, fixed))]
        )

    def _find_fixed_patch_size(self) -> int | None:
        """Find the patch size of a function that has no such argument: the first common size that runs."""
        if "patch" in self._guess_argument_roles().values() or "side" in self._guess_argument_roles().values():
            return None
        for size in (4, 16, 8, 2, 7, 14):
            try:
                result = self.user_code(torch.zeros(2, 3, 3 * size, 3 * size))
            except Exception:
                continue
            if isinstance(result, Tensor) and result.numel() == 2 * 27 * size * size and 9 in result.shape:
                return size
        return 4

    def _guess_argument_roles(self) -> ArgumentRoles:
        roles = {}
        for index, name in enumerate(inspect.signature(self.user_code).parameters):
            normalized = normalize_identifier(name)
            if index == 0 and "patchsize" not in normalized:
                roles[name] = "x"
            elif normalized in ("npatches", "numpatches", "patchesperside", "n"):
                roles[name] = "side"
            elif "patch" in normalized or normalized in ("p", "ps", "size", "k", "kernelsize", "patchh", "patchw"):
                roles[name] = "patch"
            else:
                roles[name] = "x" if "x" not in roles.values() else normalized
        return roles

    def list_tiny_example_cases(self) -> list[Case]:
        tiny = [
            Case(f"a {h}×{w} image in patches of {p}×{p}", self._make_case_sizes(1, h, w, p) | {"batch": 1}, tiny=True)
            for h, w, p in ((2, 2, 1), (4, 4, 2))
        ]
        return tiny if self.module_factory is None and self.list_cases()[0].name != "square images" else []

    def make_float64_inputs(self, case: Case) -> ReferenceInputs:
        s = case.sizes
        shape = (s["batch"], s["channels"], s["height"], s["width_"])
        if case.tiny:  # numbered pixels
            return {"x": torch.arange(s["height"] * s["width_"], dtype=torch.float64).view(shape)}
        return draw_seeded_inputs_for_case(case, {"x": shape})

    def list_convention_groups(self) -> list[list[CallConvention]]:
        return [[CallConvention((text,), {"axis_order": axis_order})] for axis_order, text in AXIS_ORDERS.items()]

    def reshape_inputs_for_user_code(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> UserInputs:
        axis_order = convention.settings["axis_order"]
        x = inputs["x"][0] if axis_order.startswith("single") else inputs["x"]
        return {"x": x.movedim(-3, -1) if axis_order.endswith("last") else x}

    def run_user_code_and_restore_axes(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs
    ) -> OutputInReferenceAxes:
        axis_order, s = convention.settings["axis_order"], case.sizes
        x = self.reshape_inputs_for_user_code(convention, case, inputs)["x"]
        count = s["height"] * s["width_"] // s["patch"] ** 2
        batch = 1 if axis_order.startswith("single") else s["batch"]
        if self.module_factory is not None:
            out = select_matching_or_first_tensor(
                self.module_factory.get_or_build_module({}, self.dtype, self.training)(x), (batch, count, 12)
            )
            return out.flatten(2).transpose(1, 2) if out.ndim == 4 and out.shape[1] != count else out
        values = {"x": x, "patch": s["patch"], "side": s["height"] // s["patch"]}
        out = call_by_roles(self.user_code, values, self._guess_argument_roles())
        out = (
            torch.stack(list(out)) if isinstance(out, list) else select_matching_or_first_tensor(out, (batch, count, 0))
        )
        if out.numel() != batch * x[..., 0].numel() * x.shape[-1] // batch:
            return out
        return _flatten_or_keep_patches(out, batch, count, s["patch"])

    def run_reference_variant(
        self, convention: CallConvention, case: Case, inputs: ReferenceInputs, variant_or_mistakes: ReferenceVariant
    ) -> OutputInReferenceAxes:
        x = inputs["x"][:1] if convention.settings["axis_order"].startswith("single") else inputs["x"]
        size = case.sizes["patch"]
        if not variant_or_mistakes.keys() - {"pixels"}:
            cut = F.unfold(x, size, stride=size).transpose(1, 2).unflatten(2, (x.shape[1], size, size))
            order = " ".join(
                {"c": "channel", "h": "height", "w": "width"}[axis] for axis in variant_or_mistakes["pixels"]
            )
            patches = rearrange(cut, f"batch patch channel height width -> batch patch ({order})")
        else:
            patches = extract_patches_by_variant(x, size, variant_or_mistakes)
        if self.module_factory is None:
            return patches
        weight = _find_first_weight_and_bias(self.module_factory.get_or_build_module({}, self.dtype, self.training))
        return patches if weight is None else project_patches(patches, *weight)

    def list_correct_reference_variants(self, convention: CallConvention) -> list[CorrectVariant]:
        return [
            CorrectVariant({"pixels": order}, (f"the pixel order in a patch is {text}",))
            for order, text in PIXEL_ORDERS.items()
        ]

    def list_mistakes_to_simulate(self, convention: CallConvention) -> list[SimulatedMistake]:
        return PATCH_MISTAKES

    def get_user_parameters(self, convention: CallConvention, case: Case) -> list[Tensor]:
        return (
            []
            if self.module_factory is None
            else list(self.module_factory.get_or_build_module({}, self.dtype).parameters())
        )

    def guess_mistake_ids_without_simulation(self, convention: CallConvention | None) -> list[str]:
        """Use numbered pixels to test whether each patch is one square of the image."""
        if convention is None or self.module_factory is not None:
            return []
        case = self.list_cases()[0]
        size, side = case.sizes["patch"], case.sizes["height"]
        shape = tuple(case.sizes[name] for name in ("batch", "channels", "height", "width_"))
        numbered = torch.arange(shape[0] * shape[1] * side * side, dtype=self.dtype).view(shape)
        try:
            out = self.run_user_code_and_restore_axes(convention, case, {"x": numbered})[0].long()
        except (RuntimeError, IndexError):
            return []
        row, column = out % (side * side) // side // size, out % side // size
        is_square = (row == row[:, :1]).all() and (column == column[:, :1]).all()
        return [] if is_square or out.shape[0] != (side // size) ** 2 else ["pixels-interleaved"]


def _flatten_or_keep_patches(output: Tensor, batch_size: int, num_patches: int, patch_size: int) -> Tensor:
    """Flatten the output to batch × patch × pixel if the patches still have their axes."""
    if (
        output.ndim == 3
        and output.shape[:2] != (batch_size, num_patches)
        and output.shape[2] == num_patches
        and output.shape[0] == batch_size
    ):
        return output.transpose(1, 2)
    if (patch_size and output.shape[0] == batch_size) or batch_size == 1:
        return output.reshape(batch_size, num_patches, -1)
    return output


def _find_patch_size(module: nn.Module) -> int | None:
    return next((int(part.kernel_size[0]) for part in module.modules() if isinstance(part, nn.Conv2d)), None)


class ProjectionWeights(NamedTuple):
    """The weight and bias of the patch projection."""

    weight: Tensor
    bias: Tensor | None


def _find_first_weight_and_bias(module: nn.Module) -> ProjectionWeights | None:
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    return ProjectionWeights(layers[0].weight, layers[0].bias) if layers else None
