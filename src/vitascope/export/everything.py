"""Export a run's model to a file, and verify it on the run's own images."""

from pathlib import Path

from vitascope.data.source import Split
from vitascope.errors import UserError, did_you_mean
from vitascope.evaluation.choosing import own_images, some_own_images
from vitascope.evaluation.trained import TrainedTransformer
from vitascope.export.int8 import write_int8
from vitascope.export.onnx_file import OPSET, write_onnx
from vitascope.export.torch_file import write_torch
from vitascope.export.written import Written
from vitascope.run.directory import Outside, Run

JUDGED = 1000  # images at most
NAMES = {"onnx": "model.onnx", "int8": "model-int8.onnx", "torch": "model.pt2"}


def export_run(
    model: TrainedTransformer, form: str, out: Path | None = None, *, maps: bool = False, opset: int | None = None
) -> Written:
    """Export as `form`: onnx, int8 (ONNX) or torch; to RUN/export/ by default. Test images are never used."""
    if form not in NAMES:
        raise UserError(f"There is no form '{form}'. {did_you_mean(form, NAMES)}")
    run, facts = model.run, model.facts
    path = out or run.file("export") / NAMES[form]
    told = {"run": _name(run), "judged": some_own_images(run, facts, JUDGED)}
    if form == "torch":
        return write_torch(model, facts, path, **told)
    told |= {"maps": maps, "opset": OPSET if opset is None else opset}
    if form == "onnx":
        return write_onnx(model, facts, path, **told)
    return write_int8(model, facts, path, training=_training_images(model), **told)


def _name(run: Run) -> str:
    """Return the run's name, e.g. digits/2026-…-seed0, or the name of external weights."""
    name = run.path.resolve().name
    return name if isinstance(run, Outside) else f"{run.recipe.name}/{name}"


def _training_images(model: TrainedTransformer) -> Split | None:
    try:
        return own_images(model.run, model.facts, "train")
    except UserError:  # the data is missing or has changed
        return None
