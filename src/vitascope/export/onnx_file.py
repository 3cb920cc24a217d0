"""Export to one ONNX file with a dynamic batch size and metadata, verified against the model."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from vitascope.errors import UserError, first_line
from vitascope.export.answering import answering, any_batch, example
from vitascope.export.description import described
from vitascope.export.faithful import OUTPUTS, Ask, Judged, differences, images_to_compare, refuse_unfaithful
from vitascope.export.speed import compare_speed
from vitascope.export.written import Written, check_place, quietly
from vitascope.model.anatomy import total_parameters
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_whole
from vitascope.weights.facts import ModelFacts

PACKAGES = ("onnx", "onnxruntime", "onnxscript")
ENDING = ".onnx"
OPSET = 20
OPSETS = range(18, 26)  # supported by the exporter and by onnxruntime
TOLERANCE = 1e-4  # relative to the largest logit
LARGEST = 2**31  # bytes in one ONNX file


def write_onnx(
    model: VisionTransformer,
    facts: ModelFacts,
    path: Path,
    *,
    run: str = "",
    maps: bool = False,
    opset: int = OPSET,
    judged: Judged | None = None,
) -> Written:
    """Write `images` (float32, prepared) -> `logits`, and optionally `maps`: batch × block × head × query × key."""
    check_onnx(model, path, opset)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        trace(model, file, described(facts, run), maps=maps, opset=opset)
        images, which = images_to_compare(model, facts.preparation, judged)
        apart = differences(model, ask_onnx(file), images)
        refuse_unfaithful(apart, TOLERANCE)
        speed = compare_speed(model, {"onnxruntime": ask_onnx(file, threads=1)})
        content = file.read_bytes()
    write_whole(path, content)
    return Written(path, f"ONNX, opset {opset}", len(content), apart, which, speed)


def check_onnx(model: VisionTransformer, path: Path, opset: int) -> None:
    """Check the packages, the opset, the size and the path before exporting."""
    lacking = [name for name in PACKAGES if find_spec(name) is None]
    if lacking:
        raise UserError(f'ONNX export needs {" and ".join(lacking)}. Install with: pip install "vitascope[onnx]"')
    if opset not in OPSETS:
        raise UserError(f"--opset {opset} is not supported. Choose one from {OPSETS[0]} to {OPSETS[-1]}.")
    weights = 4 * total_parameters(model.config)
    if weights > LARGEST:
        raise UserError(
            f"The weights have {weights / 2**30:.1f} GiB; an ONNX file can hold 2 GiB. Use: vitascope export torch"
        )
    check_place(path, ENDING)


def trace(model: VisionTransformer, file: Path, words: dict[str, str], *, maps: bool, opset: int) -> None:
    """Trace the model to ONNX operators, without references to our source code."""
    twin = answering(model, maps=maps)
    with quietly():
        program: Any = torch.onnx.export(
            twin,
            (example(twin),),
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=["images"],
            output_names=list(OUTPUTS[: 1 + maps]),
            dynamic_shapes=any_batch(),
        )
        program.model.graph.metadata_props.clear()
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()
        program.model.metadata_props.update(words)
        program.save(file, external_data=False)


def ask_onnx(file: Path, threads: int = 0) -> Ask:
    """Return the file as a function, run by onnxruntime on the CPU; 0 threads: its default."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    try:
        session: Any = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no name of their own
        reason = first_line(error, 200)
        raise UserError(f"onnxruntime {onnxruntime.__version__} cannot read the file: {reason}") from error

    def ask(images: Tensor) -> Sequence[Tensor]:
        return [torch.from_numpy(answer) for answer in session.run(None, {"images": images.numpy()})]

    return ask
