"""Export a trained model as one file for other programs; verified before it is written."""

from pathlib import Path

from vitascope.data.dataset import Dataset
from vitascope.errors import UserError, suggest_choice
from vitascope.export.formats import DEFAULT_OPSET, write_onnx, write_torch
from vitascope.export.int8 import write_int8
from vitascope.export.verify import ExportReport
from vitascope.inference.classifier import Classifier
from vitascope.run.directory import ExternalWeightsRun, Run
from vitascope.run.images import load_run_split_if_any, try_to_sample_run_images

__all__ = ["ExportReport", "export_run", "write_int8", "write_onnx", "write_torch"]

MAX_COMPARED_IMAGES = 1000  # images at most
DEFAULT_FILE_NAMES = {"onnx": "model.onnx", "int8": "model-int8.onnx", "torch": "model.pt2"}


def export_run(
    model: Classifier,
    file_format: str,
    output_path: Path | None = None,
    *,
    maps: bool = False,
    opset: int | None = None,
) -> ExportReport:
    """Export as `file_format`: onnx, int8 (ONNX) or torch; to RUN/export/ by default. Test images are never used."""
    if file_format not in DEFAULT_FILE_NAMES:
        raise UserError(f"There is no export format '{file_format}'. {suggest_choice(file_format, DEFAULT_FILE_NAMES)}")
    run, model_info = model.run, model.info
    path = output_path or run.get_path("export") / DEFAULT_FILE_NAMES[file_format]
    run_name, run_sample = (
        _format_recipe_and_run_name(run),
        try_to_sample_run_images(run, model_info, MAX_COMPARED_IMAGES),
    )
    if file_format == "torch":
        return write_torch(model.vision_transformer, model_info, path, run_name=run_name, run_sample=run_sample)
    opset = DEFAULT_OPSET if opset is None else opset
    if file_format == "onnx":
        return write_onnx(
            model.vision_transformer,
            model_info,
            path,
            run_name=run_name,
            maps=maps,
            opset=opset,
            run_sample=run_sample,
        )
    return write_int8(
        model.vision_transformer,
        model_info,
        path,
        run_name=run_name,
        maps=maps,
        opset=opset,
        run_sample=run_sample,
        training_samples=_try_to_load_training_images(model),
    )


def _format_recipe_and_run_name(run: Run) -> str:
    """Return the run's name, e.g. digits/2026-…-seed0, or the name of external weights."""
    name = run.path.resolve().name
    return name if isinstance(run, ExternalWeightsRun) else f"{run.recipe.name}/{name}"


def _try_to_load_training_images(model: Classifier) -> Dataset | None:
    try:
        return load_run_split_if_any(model.run, model.info, "train")
    except UserError:  # the data is missing or has changed
        return None
