"""Write a model as one file, with torch.export (.pt2) or as ONNX: any batch size, metadata, verified when written."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from vitascope.errors import UserError, shorten_error_message
from vitascope.export.verify import (
    METADATA_FILE,
    OUTPUT_NAMES,
    ExportedModel,
    ExportReport,
    build_string_metadata,
    check_path_and_create_folder,
    compute_max_relative_error_per_output,
    raise_if_export_inaccurate,
    select_run_or_random_images,
    suppress_logs_and_warnings,
    time_candidates_with_one_thread,
)
from vitascope.inference.fast import copy_as_frozen_cpu_model
from vitascope.model.anatomy import count_parameters
from vitascope.model.explicit_blocks import ExplicitAttention, apply_and_record_blocks
from vitascope.model.token_merging import make_singleton_groups
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_atomically
from vitascope.run.images import RunSample
from vitascope.shapes import AttentionMapsByBlock, Logits
from vitascope.weights.model_info import ModelInfo

PT2_SUFFIX = ".pt2"
PT2_TOLERANCE = 1e-5  # relative to the largest logit
ONNX_SUFFIX = ".onnx"
ONNX_TOLERANCE = 1e-4  # relative to the largest logit
REQUIRED_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
DEFAULT_OPSET = 20
SUPPORTED_OPSETS = range(18, 26)  # supported by the exporter and by onnxruntime
MAX_FILE_BYTES = 2**31  # bytes in one ONNX file
DynamicShapes = tuple[dict[int, torch.export.Dim]]  # of each input: axis -> dimension with any size


class TransformerWithMaps(VisionTransformer):
    """The model with explicit attention, so that it also returns the attention maps."""

    def forward(self, images: Tensor) -> tuple[Logits, AttentionMapsByBlock]:  # pyright: ignore[reportIncompatibleMethodOverride]
        explicit = ExplicitAttention(compare_with_fused=False)  # compared when the file is verified
        results = apply_and_record_blocks(self, make_singleton_groups(self.embed(images)), explicit)
        maps_by_block = torch.stack([result.maps for result in results if result.maps is not None], dim=1)
        return self.forward_head(self.norm(results[-1].groups.tokens)), maps_by_block


def copy_model_for_export(model: VisionTransformer, *, maps: bool = False) -> VisionTransformer:
    """Return a plain copy of the model; raise a UserError if its export could not be verified."""
    if model.training:
        raise UserError("The model is in training mode, so dropout is active. Call model.eval() first.")
    if model.config.token_reduction:
        raise UserError(
            "A model that merges or drops tokens cannot be exported: rounding can change which tokens are kept, so the "
            "file could not be verified. Export it with all tokens: merge_tokens=0, drop_tokens=0."
        )
    return copy_as_frozen_cpu_model(model, TransformerWithMaps if maps else VisionTransformer)


def make_two_zero_images(model: VisionTransformer) -> Tensor:
    """Return two images to trace with; a single image would fix the batch size to one."""
    return torch.zeros(2, model.config.in_chans, *model.config.image_shape)


def make_dynamic_batch_shapes() -> DynamicShapes:
    """Return the dynamic shapes of the export: the batch size."""
    return ({0: torch.export.Dim("batch", min=1)},)


def write_torch(
    model: VisionTransformer,
    model_info: ModelInfo,
    path: Path,
    *,
    run_name: str = "",
    run_sample: RunSample | None = None,
) -> ExportReport:
    """Write the file: prepared images -> logits. Its metadata is in vitascope.json inside the file."""
    check_path_and_create_folder(path, PT2_SUFFIX)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        trace_and_save_torch_export(model, file, build_string_metadata(model_info, run_name))
        exported_model = load_torch_export_as_function(file)
        images, description = select_run_or_random_images(model, model_info.preparation, run_sample)
        errors = compute_max_relative_error_per_output(model, exported_model, images)
        raise_if_export_inaccurate(errors, PT2_TOLERANCE)
        speed = time_candidates_with_one_thread(model, {"torch.export": exported_model})
        content = file.read_bytes()
    write_atomically(path, content)
    return ExportReport(path, "torch.export", len(content), errors, description, speed)


def trace_and_save_torch_export(model: VisionTransformer, pt2_path: Path, metadata: dict[str, str]) -> None:
    """Trace the model with torch.export, without references to our source code."""
    plain_model = copy_model_for_export(model)
    with suppress_logs_and_warnings():
        program = torch.export.export(
            plain_model, (make_two_zero_images(plain_model),), dynamic_shapes=make_dynamic_batch_shapes()
        )
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)
        torch.export.save(program, pt2_path, extra_files={METADATA_FILE: json.dumps(metadata, ensure_ascii=False)})


def load_torch_export_as_function(pt2_path: Path) -> ExportedModel:
    """Return the file as a function."""
    with suppress_logs_and_warnings():
        module = torch.export.load(pt2_path).module()

    @torch.no_grad()
    def run_model(images: Tensor) -> Sequence[Tensor]:
        return [module(images)]

    return run_model


def write_onnx(
    model: VisionTransformer,
    model_info: ModelInfo,
    path: Path,
    *,
    run_name: str = "",
    maps: bool = False,
    opset: int = DEFAULT_OPSET,
    run_sample: RunSample | None = None,
) -> ExportReport:
    """Write `images` (float32, prepared) -> `logits`, and optionally `maps`: batch × block × head × query × key."""
    check_onnx_export_and_create_folder(model, path, opset)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        trace_and_save_onnx(model, file, build_string_metadata(model_info, run_name), maps=maps, opset=opset)
        images, description = select_run_or_random_images(model, model_info.preparation, run_sample)
        errors = compute_max_relative_error_per_output(model, load_onnx_as_function(file), images)
        raise_if_export_inaccurate(errors, ONNX_TOLERANCE)
        speed = time_candidates_with_one_thread(model, {"onnxruntime": load_onnx_as_function(file, num_threads=1)})
        content = file.read_bytes()
    write_atomically(path, content)
    return ExportReport(path, f"ONNX, opset {opset}", len(content), errors, description, speed)


def check_onnx_export_and_create_folder(model: VisionTransformer, path: Path, opset: int) -> None:
    """Check the packages, the opset, the size and the path before exporting."""
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(f'ONNX export needs {" and ".join(missing)}. Install with: pip install "vitascope[onnx]"')
    if opset not in SUPPORTED_OPSETS:
        raise UserError(
            f"--opset {opset} is not supported. Choose one from {SUPPORTED_OPSETS[0]} to {SUPPORTED_OPSETS[-1]}."
        )
    num_bytes = 4 * count_parameters(model.config)
    if num_bytes > MAX_FILE_BYTES:
        raise UserError(
            f"The weights have {num_bytes / 2**30:.1f} GiB; an ONNX file can hold 2 GiB. Use: vitascope export torch"
        )
    check_path_and_create_folder(path, ONNX_SUFFIX)


def trace_and_save_onnx(
    model: VisionTransformer, onnx_path: Path, metadata: dict[str, str], *, maps: bool, opset: int
) -> None:
    """Trace the model to ONNX operators, without references to our source code."""
    plain_model = copy_model_for_export(model, maps=maps)
    with suppress_logs_and_warnings():
        program: Any = torch.onnx.export(
            plain_model,
            (make_two_zero_images(plain_model),),
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=["images"],
            output_names=list(OUTPUT_NAMES[: 1 + maps]),
            dynamic_shapes=make_dynamic_batch_shapes(),
        )
        program.model.graph.metadata_props.clear()
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()
        program.model.metadata_props.update(metadata)
        program.save(onnx_path, external_data=False)


def load_onnx_as_function(onnx_path: Path, num_threads: int = 0) -> ExportedModel:
    """Return the file as a function, run by onnxruntime on the CPU; 0 threads: its default."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3  # errors only
    try:
        session: Any = onnxruntime.InferenceSession(onnx_path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no name of their own
        reason = shorten_error_message(error, 200)
        raise UserError(f"onnxruntime {onnxruntime.__version__} cannot read the file: {reason}") from error

    def run_model(images: Tensor) -> Sequence[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {"images": images.numpy()})]

    return run_model
