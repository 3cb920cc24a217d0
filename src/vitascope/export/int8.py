"""Export to ONNX with int8 matrix products, and measure the loss of accuracy.

Two kinds of quantisation: dynamic (scales per call, from the tokens) and static (scales fixed, from training images).
The one with the better accuracy on training images is used. Its accuracy is reported on validation images, if there
are any.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vitascope.data.preparation import Preparation
from vitascope.data.source import Split
from vitascope.export.description import described
from vitascope.export.faithful import Ask, Judged, differences, images_to_compare, refuse_unfaithful
from vitascope.export.onnx_file import OPSET, TOLERANCE, ask_onnx, check_onnx, trace
from vitascope.export.speed import compare_speed
from vitascope.export.written import Accuracy, Int8, Written, quietly
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_whole
from vitascope.shapes import Images, Logits
from vitascope.weights.facts import ModelFacts

BATCH = 64
SAFE = True  # weights of 7 bits: on processors without VNNI, sums of 8-bit products overflow 16 bits
CALIBRATED_ON = 256  # training images for the static scales
CHOSEN_ON = 1000  # training images on which the kind of quantisation is chosen


def write_int8(
    model: VisionTransformer,
    facts: ModelFacts,
    path: Path,
    *,
    run: str = "",
    maps: bool = False,
    opset: int = OPSET,
    judged: Judged | None = None,
    training: Split | None = None,
) -> Written:
    """Write a quantised file; the float32 file is verified first. Without training images: dynamic quantisation."""
    check_onnx(model, path, opset)
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "model.onnx"
        trace(model, whole, described(facts, run), maps=maps, opset=opset)
        images, which = images_to_compare(model, facts.preparation, judged)
        refuse_unfaithful(differences(model, ask_onnx(whole), images), TOLERANCE)
        short, method = quantised(whole, facts.preparation, training)
        apart = differences(model, ask_onnx(short), images)
        accuracy = compared(ask_onnx(whole), ask_onnx(short), facts.preparation, *judged) if judged else None
        ways = {"onnxruntime": ask_onnx(whole, threads=1), "onnxruntime, int8": ask_onnx(short, threads=1)}
        speed, content = compare_speed(model, ways), short.read_bytes()
        told = Int8(method, whole.stat().st_size, accuracy)
    write_whole(path, content)
    return Written(path, f"ONNX, opset {opset}, int8 ({method})", len(content), apart, which, speed, told)


def quantised(whole: Path, preparation: Preparation, training: Split | None) -> tuple[Path, str]:
    """Return the quantised file with the best accuracy on training images, and its kind."""
    if training is None:
        return quantise_dynamic(whole), "dynamic"
    some = training.evenly(CHOSEN_ON)
    truth = logits_of(ask_onnx(whole), preparation, some)
    calibration = preparation(training.evenly(CALIBRATED_ON).images)
    files = {name: way(whole, calibration) for name, way in WAYS.items()}

    def worth(name: str) -> tuple[int, int, float]:
        """Rank by accuracy, then agreement with float32 predictions, then difference of the logits."""
        said = logits_of(ask_onnx(files[name]), preparation, some)
        right, alike = ((said.argmax(1) == wanted).sum().item() for wanted in (some.labels, truth.argmax(1)))
        return int(right), int(alike), -(said - truth).abs().mean().item()

    best = max(files, key=worth)
    return files[best], best


def quantise_dynamic(whole: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file, told = whole.with_name("dynamic.onnx"), {"per_channel": True, "op_types_to_quantize": ["MatMul"]}
    with quietly():
        quantize_dynamic(_without_shapes(whole), file, weight_type=QuantType.QInt8, reduce_range=SAFE, **told)
    return file


def quantise_static(whole: Path, calibration: Images) -> Path:
    """Quantise products with weights only; query × key and attention × value stay float32."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        """Yield training images in batches."""

        batches = iter(calibration.split(BATCH))

        def get_next(self) -> Any:
            images = next(self.batches, None)
            return None if images is None else {"images": images.numpy()}

    file = whole.with_name("static.onnx")
    with quietly():
        quantize_static(
            _without_shapes(whole),
            file,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=SAFE,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
            op_types_to_quantize=["MatMul"],
            extra_options={"MatMulConstBOnly": True},
        )
    return file


WAYS: dict[str, Callable[[Path, Images], Path]] = {
    "dynamic": lambda whole, calibration: quantise_dynamic(whole),
    "static": quantise_static,
}


def compared(whole: Ask, short: Ask, preparation: Preparation, split: Split, which: str) -> Accuracy:
    """Compare the accuracy of both files on the same images."""
    said = [logits_of(ask, preparation, split).argmax(1) for ask in (whole, short)]
    right = [(answers == split.labels).float().mean().item() for answers in said]
    return Accuracy(len(split), which, *right, agreement=(said[0] == said[1]).float().mean().item())


def logits_of(ask: Ask, preparation: Preparation, split: Split) -> Logits:
    return torch.cat([ask(preparation(stored))[0] for stored in split.images.split(BATCH)])


def _without_shapes(whole: Path) -> Any:
    """Remove the stored shapes: onnxruntime's quantiser transposes matrices and then rejects them."""
    import onnx

    model = onnx.load(whole)
    del model.graph.value_info[:]
    return model
