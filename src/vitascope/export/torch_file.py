"""Export with torch.export (.pt2): dynamic batch size, usable without Vitascope, verified against the model."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from vitascope.evaluation.eval_data import RunSample
from vitascope.export.export_model import copy_model_for_export, make_dynamic_batch_shapes, make_two_zero_images
from vitascope.export.report import (
    METADATA_FILE,
    ExportReport,
    build_string_metadata,
    check_path_and_create_folder,
    suppress_logs_and_warnings,
)
from vitascope.export.verify import (
    ExportedModel,
    compare_single_thread_speed,
    compute_max_relative_errors,
    raise_if_export_inaccurate,
    select_run_or_random_images,
)
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_atomically
from vitascope.weights.model_info import ModelInfo

SUFFIX = ".pt2"
TOLERANCE = 1e-5  # relative to the largest logit


def write_torch(
    model: VisionTransformer,
    model_info: ModelInfo,
    path: Path,
    *,
    run_name: str = "",
    run_sample: RunSample | None = None,
) -> ExportReport:
    """Write the file: prepared images -> logits. Its metadata is in vitascope.json inside the file."""
    check_path_and_create_folder(path, SUFFIX)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        trace_and_save_torch_export(model, file, build_string_metadata(model_info, run_name))
        exported_model = load_torch_export_as_function(file)
        images, description = select_run_or_random_images(model, model_info.preparation, run_sample)
        errors = compute_max_relative_errors(model, exported_model, images)
        raise_if_export_inaccurate(errors, TOLERANCE)
        speed = compare_single_thread_speed(model, {"torch.export": exported_model})
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
