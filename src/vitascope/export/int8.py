"""Export to ONNX with int8 matrix products, and measure the loss of accuracy.

Two kinds of quantisation: dynamic (scales per call, from the tokens) and static (scales fixed, from training images).
The one with the better accuracy on training images is used. Its accuracy is reported on validation images, if there
are any.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import torch
from numpy.typing import NDArray

from vitascope.data.dataset import Dataset
from vitascope.data.preprocessing import Preprocessing
from vitascope.export.formats import (
    DEFAULT_OPSET,
    ONNX_TOLERANCE,
    check_onnx_export_and_create_folder,
    load_onnx_as_function,
    trace_and_save_onnx,
)
from vitascope.export.verify import (
    AccuracyComparison,
    ExportedModel,
    ExportReport,
    Int8Report,
    build_string_metadata,
    compute_max_relative_error_per_output,
    raise_if_export_inaccurate,
    select_run_or_random_images,
    suppress_logs_and_warnings,
    time_candidates_with_one_thread,
)
from vitascope.model.vit import VisionTransformer
from vitascope.run.files import write_atomically
from vitascope.run.images import RunSample
from vitascope.shapes import Images, Logits
from vitascope.weights.model_info import ModelInfo

if TYPE_CHECKING:
    from onnx import ModelProto

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
    training_samples: Dataset | None = None,
) -> ExportReport:
    """Write a quantised file; the float32 file is verified first. Without training images: dynamic quantisation."""
    check_onnx_export_and_create_folder(model, path, opset)
    with TemporaryDirectory() as folder:
        float32_file = Path(folder) / "model.onnx"
        trace_and_save_onnx(model, float32_file, build_string_metadata(model_info, run_name), maps=maps, opset=opset)
        images, description = select_run_or_random_images(model, model_info.preparation, run_sample)
        float32_function = load_onnx_as_function(float32_file)
        raise_if_export_inaccurate(
            compute_max_relative_error_per_output(model, float32_function, images), ONNX_TOLERANCE
        )
        int8_file, method = quantise_by_most_accurate_method(float32_file, model_info.preparation, training_samples)
        int8_function = load_onnx_as_function(int8_file)
        errors = compute_max_relative_error_per_output(model, int8_function, images)
        accuracy = (
            compare_float32_and_int8_accuracy(float32_function, int8_function, model_info.preparation, run_sample)
            if run_sample
            else None
        )
        candidates = {
            "onnxruntime": load_onnx_as_function(float32_file, num_threads=1),
            "onnxruntime, int8": load_onnx_as_function(int8_file, num_threads=1),
        }
        speed, content = time_candidates_with_one_thread(model, candidates), int8_file.read_bytes()
        int8_report = Int8Report(method, float32_file.stat().st_size, accuracy)
    write_atomically(path, content)
    return ExportReport(
        path, f"ONNX, opset {opset}, int8 ({method})", len(content), errors, description, speed, int8_report
    )


class QuantisedFile(NamedTuple):
    path: Path
    method: str  # dynamic or static


class QuantisationScore(NamedTuple):
    """Larger is better; the fields are compared in this order."""

    num_correct: int
    num_agreeing: int  # with the predictions of float32
    negative_error: float  # of the logits


def quantise_by_most_accurate_method(
    float32_path: Path, preprocessing: Preprocessing, training_samples: Dataset | None
) -> QuantisedFile:
    """Return the quantised file with the best accuracy on training images; without images, a dynamic one."""
    if training_samples is None:
        return QuantisedFile(quantise_dynamic(float32_path), "dynamic")
    samples = training_samples.select_evenly(NUM_SELECTION_IMAGES)
    float32_logits = compute_exported_logits(load_onnx_as_function(float32_path), preprocessing, samples)
    calibration = preprocessing(training_samples.select_evenly(NUM_CALIBRATION_IMAGES).images)
    files = {name: quantise(float32_path, calibration) for name, quantise in QUANTISERS.items()}

    def score_file(name: str) -> QuantisationScore:
        logits = compute_exported_logits(load_onnx_as_function(files[name]), preprocessing, samples)
        num_correct, num_agreeing = (
            (logits.argmax(1) == labels).sum().item() for labels in (samples.labels, float32_logits.argmax(1))
        )
        return QuantisationScore(int(num_correct), int(num_agreeing), -(logits - float32_logits).abs().mean().item())

    method = max(files, key=score_file)
    return QuantisedFile(files[method], method)


def quantise_dynamic(float32_path: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file = float32_path.with_name("dynamic.onnx")
    with suppress_logs_and_warnings():
        quantize_dynamic(
            _load_onnx_without_shapes(float32_path),
            file,
            weight_type=QuantType.QInt8,
            reduce_range=REDUCE_RANGE,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
        )
    return file


def quantise_static(float32_path: Path, calibration_images: Images) -> Path:
    """Quantise products with weights only; query × key and attention × value stay float32."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        """Yield training images in batches."""

        batches = iter(calibration_images.split(BATCH_SIZE))

        def get_next(self) -> dict[str, NDArray] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
            images = next(self.batches, None)
            return None if images is None else {"images": images.numpy()}

    file = float32_path.with_name("static.onnx")
    with suppress_logs_and_warnings():
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
    "dynamic": lambda float32_path, calibration_images: quantise_dynamic(float32_path),
    "static": quantise_static,
}


def compare_float32_and_int8_accuracy(
    float32_model: ExportedModel,
    int8_model: ExportedModel,
    preprocessing: Preprocessing,
    run_sample: RunSample,
) -> AccuracyComparison:
    """Compare the accuracy of both files on the same images."""
    samples = run_sample.samples
    float32_labels, int8_labels = (
        compute_exported_logits(model, preprocessing, samples).argmax(1) for model in (float32_model, int8_model)
    )
    return AccuracyComparison(
        images=len(samples),
        which=run_sample.description,
        float32=(float32_labels == samples.labels).float().mean().item(),
        int8=(int8_labels == samples.labels).float().mean().item(),
        agreement=(float32_labels == int8_labels).float().mean().item(),
    )


def compute_exported_logits(exported_model: ExportedModel, preprocessing: Preprocessing, samples: Dataset) -> Logits:
    return torch.cat([exported_model(preprocessing(stored))[0] for stored in samples.images.split(BATCH_SIZE)])


def _load_onnx_without_shapes(onnx_path: Path) -> "ModelProto":
    """Remove the stored shapes: onnxruntime's quantiser transposes matrices and then rejects them."""
    import onnx

    model = onnx.load(onnx_path)
    del model.graph.value_info[:]
    return model
