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

from vitascope.data.dataset import Split
from vitascope.data.preprocessing import Preprocessing
from vitascope.export.onnx_file import DEFAULT_OPSET, TOLERANCE, check_onnx_export_possible, load_onnx, trace_to_onnx
from vitascope.export.report import AccuracyComparison, ExportReport, Int8Report, build_metadata, suppress_export_logs
from vitascope.export.verify import (
    ExportedModel,
    RunSample,
    compare_speed,
    compute_relative_errors,
    reject_inaccurate_export,
    select_comparison_images,
)
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_atomically
from vitascope.shapes import Images, Logits
from vitascope.weights.model_info import ModelInfo

BATCH_SIZE = 64
REDUCE_RANGE = True  # weights of 7 bits: on processors without VNNI, sums of 8-bit products overflow 16 bits
NUM_CALIBRATION_IMAGES = 256  # training images for the static scales
NUM_SELECTION_IMAGES = 1000  # training images on which the kind of quantisation is chosen


def write_int8(
    model: VisionTransformer,
    model_info: ModelInfo,
    path: Path,
    *,
    run_name: str = "",
    maps: bool = False,
    opset: int = DEFAULT_OPSET,
    run_sample: RunSample | None = None,
    training_samples: Split | None = None,
) -> ExportReport:
    """Write a quantised file; the float32 file is verified first. Without training images: dynamic quantisation."""
    check_onnx_export_possible(model, path, opset)
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "model.onnx"
        trace_to_onnx(model, whole, build_metadata(model_info, run_name), maps=maps, opset=opset)
        images, which = select_comparison_images(model, model_info.preparation, run_sample)
        reject_inaccurate_export(compute_relative_errors(model, load_onnx(whole), images), TOLERANCE)
        short, method = quantise_most_accurately(whole, model_info.preparation, training_samples)
        apart = compute_relative_errors(model, load_onnx(short), images)
        accuracy = (
            compare_accuracy(load_onnx(whole), load_onnx(short), model_info.preparation, *run_sample)
            if run_sample
            else None
        )
        ways = {"onnxruntime": load_onnx(whole, num_threads=1), "onnxruntime, int8": load_onnx(short, num_threads=1)}
        speed, content = compare_speed(model, ways), short.read_bytes()
        told = Int8Report(method, whole.stat().st_size, accuracy)
    write_atomically(path, content)
    return ExportReport(path, f"ONNX, opset {opset}, int8 ({method})", len(content), apart, which, speed, told)


def quantise_most_accurately(
    float32_path: Path, preprocessing: Preprocessing, training_samples: Split | None
) -> tuple[Path, str]:
    """Return the quantised file with the best accuracy on training images, and its kind."""
    if training_samples is None:
        return quantise_dynamic(float32_path), "dynamic"
    some = training_samples.select_evenly(NUM_SELECTION_IMAGES)
    truth = compute_exported_logits(load_onnx(float32_path), preprocessing, some)
    calibration = preprocessing(training_samples.select_evenly(NUM_CALIBRATION_IMAGES).images)
    files = {name: way(float32_path, calibration) for name, way in QUANTISERS.items()}

    def worth(name: str) -> tuple[int, int, float]:
        """Rank by accuracy, then agreement with float32 predictions, then difference of the logits."""
        said = compute_exported_logits(load_onnx(files[name]), preprocessing, some)
        right, alike = ((said.argmax(1) == wanted).sum().item() for wanted in (some.labels, truth.argmax(1)))
        return int(right), int(alike), -(said - truth).abs().mean().item()

    best = max(files, key=worth)
    return files[best], best


def quantise_dynamic(float32_path: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file, told = float32_path.with_name("dynamic.onnx"), {"per_channel": True, "op_types_to_quantize": ["MatMul"]}
    with suppress_export_logs():
        quantize_dynamic(
            _load_onnx_without_shapes(float32_path),
            file,
            weight_type=QuantType.QInt8,
            reduce_range=REDUCE_RANGE,
            **told,
        )
    return file


def quantise_static(float32_path: Path, calibration_images: Images) -> Path:
    """Quantise products with weights only; query × key and attention × value stay float32."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        """Yield training images in batches."""

        batches = iter(calibration_images.split(BATCH_SIZE))

        def get_next(self) -> Any:
            images = next(self.batches, None)
            return None if images is None else {"images": images.numpy()}

    file = float32_path.with_name("static.onnx")
    with suppress_export_logs():
        quantize_static(
            _load_onnx_without_shapes(float32_path),
            file,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=REDUCE_RANGE,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
            op_types_to_quantize=["MatMul"],
            extra_options={"MatMulConstBOnly": True},
        )
    return file


QUANTISERS: dict[str, Callable[[Path, Images], Path]] = {
    "dynamic": lambda whole, calibration: quantise_dynamic(whole),
    "static": quantise_static,
}


def compare_accuracy(
    float32_model: ExportedModel,
    int8_model: ExportedModel,
    preprocessing: Preprocessing,
    samples: Split,
    samples_description: str,
) -> AccuracyComparison:
    """Compare the accuracy of both files on the same images."""
    said = [compute_exported_logits(ask, preprocessing, samples).argmax(1) for ask in (float32_model, int8_model)]
    right = [(answers == samples.labels).float().mean().item() for answers in said]
    return AccuracyComparison(
        len(samples), samples_description, *right, agreement=(said[0] == said[1]).float().mean().item()
    )


def compute_exported_logits(exported_model: ExportedModel, preprocessing: Preprocessing, samples: Split) -> Logits:
    return torch.cat([exported_model(preprocessing(stored))[0] for stored in samples.images.split(BATCH_SIZE)])


def _load_onnx_without_shapes(onnx_path: Path) -> Any:
    """Remove the stored shapes: onnxruntime's quantiser transposes matrices and then rejects them."""
    import onnx

    model = onnx.load(onnx_path)
    del model.graph.value_info[:]
    return model
