"""Export to one ONNX file with a dynamic batch size and metadata, verified against the model."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from vitascope.errors import UserError, shorten_error_message
from vitascope.evaluation.eval_data import RunSample
from vitascope.export.export_model import copy_model_for_export, make_dynamic_batch_shapes, make_two_zero_images
from vitascope.export.report import (
    ExportReport,
    build_string_metadata,
    check_path_and_create_folder,
    suppress_logs_and_warnings,
)
from vitascope.export.verify import (
    OUTPUT_NAMES,
    ExportedModel,
    compare_single_thread_speed,
    compute_max_relative_errors,
    raise_if_export_inaccurate,
    select_run_or_random_images,
)
from vitascope.model.anatomy import count_parameters
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_atomically
from vitascope.weights.model_info import ModelInfo

REQUIRED_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
SUFFIX = ".onnx"
DEFAULT_OPSET = 20
SUPPORTED_OPSETS = range(18, 26)  # supported by the exporter and by onnxruntime
TOLERANCE = 1e-4  # relative to the largest logit
MAX_FILE_BYTES = 2**31  # bytes in one ONNX file


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
    check_onnx_export_possible(model, path, opset)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        trace_and_save_onnx(model, file, build_string_metadata(model_info, run_name), maps=maps, opset=opset)
        images, description = select_run_or_random_images(model, model_info.preparation, run_sample)
        errors = compute_max_relative_errors(model, load_onnx_as_function(file), images)
        raise_if_export_inaccurate(errors, TOLERANCE)
        speed = compare_single_thread_speed(model, {"onnxruntime": load_onnx_as_function(file, num_threads=1)})
        content = file.read_bytes()
    write_atomically(path, content)
    return ExportReport(path, f"ONNX, opset {opset}", len(content), errors, description, speed)


def check_onnx_export_possible(model: VisionTransformer, path: Path, opset: int) -> None:
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
    check_path_and_create_folder(path, SUFFIX)


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
