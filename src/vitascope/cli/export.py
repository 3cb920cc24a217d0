"""`vitascope export`: export a trained model to a file, a folder or the Hugging Face hub."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vitascope.cli.console import create_console, create_table, format_duration, open_model_and_print_notes_to_stderr
from vitascope.cli.evaluate import ModelRef
from vitascope.number_format import format_number, format_percent

if TYPE_CHECKING:
    from vitascope.export.verify import ExportReport, Timing

app = typer.Typer(
    help="Export a trained model: ONNX, torch.export, timm, transformers or the Hugging Face hub.",
    no_args_is_help=True,
)
INT8_METHODS = {
    "static": "static quantization: activation ranges are fixed, measured on training images",
    "dynamic": "dynamic quantization: activation ranges are computed at run time",
}
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@app.command("onnx")
def export_onnx(
    run: ModelRef,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output file. Default: model.onnx or model-int8.onnx in RUN/export/, or in evaluated/NAME/export/ for "
            "a weights file."
        ),
    ] = None,
    maps: Annotated[bool, typer.Option("--maps", help="Also output all attention maps.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Quantize to 8-bit integers and report the accuracy.")] = False,
    opset: Annotated[int | None, typer.Option(help="ONNX opset version, 18 to 25. Default: 20.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Export to ONNX for any batch size. The output is verified with onnxruntime.

    Example: vitascope export onnx runs/digits --int8
    """
    _export_model_and_print_report(run, "int8" if int8 else "onnx", out, as_json, with_attention_maps=maps, opset=opset)


@app.command("torch")
def export_torch(
    run: ModelRef,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output file. Default: model.pt2 in RUN/export/, or in evaluated/NAME/export/ for a weights file."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export to a .pt2 file (torch.export) for any batch size. The output is verified."""
    _export_model_and_print_report(run, "torch", out, as_json)


@app.command("folder")
def export_folder(
    run: ModelRef,
    out: Annotated[Path, typer.Option(help="Output folder.")],
    target_library: Annotated[
        str, typer.Option("--for", help="Library that loads it: vitascope, timm or transformers.")
    ] = "vitascope",
) -> None:
    """Export to a folder with config.json, model.safetensors and a model card. The folder is verified."""
    from vitascope.evaluation.model_card import format_usage_code

    model = open_model_and_print_notes_to_stderr(run)
    folder = model.save_pretrained(out, library=target_library)
    print(f"Folder: {folder}\n\n{format_usage_code(target_library, str(folder), model.info)}")


@app.command("hub")
def push_to_hub(
    run: ModelRef,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Repository name, such as user/my-model.")],
    target_library: Annotated[
        str, typer.Option("--for", help="Library that loads it: vitascope, timm or transformers.")
    ] = "vitascope",
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Upload the model to the Hugging Face hub. Log in first with: hf auth login."""
    model = open_model_and_print_notes_to_stderr(run)
    print(f"Repository: {model.push_to_hub(repository, library=target_library, private=private)}")


def _export_model_and_print_report(
    model_ref: str,
    export_format: str,
    out_path: Path | None,
    as_json: bool,
    *,
    with_attention_maps: bool = False,
    opset: int | None = None,
) -> None:
    from vitascope.export import export_run

    model = open_model_and_print_notes_to_stderr(model_ref)
    with Console(stderr=True).status("Exporting, verifying and timing …"):
        report = export_run(model, export_format, out_path, maps=with_attention_maps, opset=opset)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        create_console().print(
            create_table(
                f"Export of {model.name} ({report.format})", ["", "result"], _format_export_report_rows(report)
            )
        )


def _format_export_report_rows(report: "ExportReport") -> list[list[str]]:
    size = f"{report.bytes / 2**20:.2f} MiB"
    comparison = report.int8 and report.int8.accuracy
    if report.int8:
        size += f" (float32: {report.int8.float32_bytes / 2**20:.2f} MiB)"
    errors = ", ".join(f"{name} {error:.1e} × their largest value" for name, error in report.differences.items())
    rows = [["file", str(report.path)], ["size", size]]
    if report.int8:
        rows.append(["int8 method", f"{report.int8.method}: {INT8_METHODS[report.int8.method]}"])
    images = f"on {report.compared_on} images in batches of 1, 2 and 7"
    label = "largest difference from PyTorch" if report.int8 else "verified, largest difference from PyTorch"
    rows.append([label, f"{errors}, {images}"])
    if comparison:
        points = 100 * (comparison.int8 - comparison.float32)
        accuracies = f"{format_percent(comparison.int8, 2)}, float32 {format_percent(comparison.float32, 2)}"
        rows.append(["accuracy", f"{accuracies} ({format_number(points, '+z.2f')} percentage points)"])
        rows.append(
            [
                "same prediction",
                f"{format_percent(comparison.agreement, 2)} of {comparison.images:,} {comparison.which} images",
            ]
        )
    elif report.int8:
        rows.append(["accuracy", "not measured: the run's images are not available"])
    for timing in report.speed:
        images = "time for 1 image" if timing.batch == 1 else f"time for {timing.batch} images"
        rows.append([images, f"{_format_times_and_speedups(timing)}; one CPU thread each"])
    return rows


def _format_times_and_speedups(timing: "Timing") -> str:
    """Return, for example, "torch 6.8 ms; onnxruntime 4.14 ms (1.64 times as fast as torch)"."""
    times = {name: format_duration(milliseconds / 1000) for name, milliseconds in timing.milliseconds.items()}
    parts = [f"torch {times['torch']}"]
    for name, ratio in timing.times_as_fast.items():
        parts.append(f"{name} {times[name]} ({_describe_speedup(ratio)})")
    return "; ".join(parts)


def _describe_speedup(speedup: float) -> str:
    """Return for example "1.64 times as fast as torch", "6 % slower than torch" or "as fast as torch"."""
    percent = round(100 * abs(1 / speedup - 1))
    if percent == 0:
        return "as fast as torch"
    if speedup > 1:
        return f"{speedup:.2f} times as fast as torch"
    return f"{percent} % slower than torch" if percent < 100 else f"{1 / speedup:.2f} times as slow as torch"
