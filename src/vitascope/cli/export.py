"""`vitascope export`: export a trained model to a file, a folder or the Hugging Face hub."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vitascope.cli.evaluate import RunPath
from vitascope.cli.loading import loaded
from vitascope.cli.numbers import duration
from vitascope.cli.tables import console, table

if TYPE_CHECKING:
    from vitascope.export.speed import Timing
    from vitascope.export.written import Written

app = typer.Typer(
    help="Export a trained model: ONNX, torch.export, timm, transformers or the Hugging Face hub.",
    no_args_is_help=True,
)
Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@app.command()
def onnx(
    run: RunPath,
    out: Annotated[
        Path | None, typer.Option(help="Output file. Default: RUN/export/model.onnx, or model-int8.onnx.")
    ] = None,
    maps: Annotated[bool, typer.Option("--maps", help="Also output all attention maps.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Quantize to 8-bit integers and report the accuracy.")] = False,
    opset: Annotated[int | None, typer.Option(help="ONNX opset version, 18 to 25. Default: 20.")] = None,
    as_json: Json = False,
) -> None:
    """Export to ONNX for any batch size. The output is verified with onnxruntime.

    Example: vitascope export onnx runs/digits --int8
    """
    _export(run, "int8" if int8 else "onnx", out, as_json, maps=maps, opset=opset)


@app.command()
def torch(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="Output file. Default: RUN/export/model.pt2.")] = None,
    as_json: Json = False,
) -> None:
    """Export to a .pt2 file (torch.export) for any batch size. The output is verified."""
    _export(run, "torch", out, as_json)


@app.command()
def folder(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="Output folder.")],
    form: Annotated[
        str, typer.Option("--for", help="Library that loads it: vitascope, timm or transformers.")
    ] = "vitascope",
) -> None:
    """Export to a folder with config.json, model.safetensors and a model card. The folder is verified."""
    from vitascope.evaluation.card import use_of

    place = loaded(run).save_pretrained(out, form=form)
    print(f"Folder: {place}\n\n{use_of(form, str(place))}")


@app.command()
def hub(
    run: RunPath,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Repository name, such as user/my-model.")],
    form: Annotated[
        str, typer.Option("--for", help="Library that loads it: vitascope, timm or transformers.")
    ] = "vitascope",
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Upload the model to the Hugging Face hub. Log in first with: hf auth login."""
    print(f"Repository: {loaded(run).push_to_hub(repository, form=form, private=private)}")


def _export(
    run: Path, form: str, out: Path | None, as_json: bool, *, maps: bool = False, opset: int | None = None
) -> None:
    from vitascope.export.everything import export_run

    model = loaded(run)
    with Console(stderr=True).status("Exporting, verifying and timing …"):
        written = export_run(model, form, out, maps=maps, opset=opset)
    if as_json:
        print(json.dumps(written.as_dict()))
    else:
        console().print(table(f"Export of {model.name} ({written.format})", ["", "result"], _rows(written)))


def _rows(written: "Written") -> list[list[str]]:
    size = f"{written.bytes / 2**20:.2f} MiB"
    judged = written.int8 and written.int8.accuracy
    if written.int8:
        size += f" (float32: {written.int8.float32_bytes / 2**20:.2f} MiB)"
    errors = ", ".join(f"{name} {error:.1e}" for name, error in written.differences.items())
    rows = [["file", str(written.path)], ["size", size]]
    images = f"on {written.compared_on} images in batches of 1, 2 and 7"
    rows.append(["relative error" if written.int8 else "verified, relative error", f"{errors}, {images}"])
    if judged:
        points = 100 * (judged.int8 - judged.float32)
        rows.append(["accuracy", f"{judged.int8:.2%}, float32 {judged.float32:.2%} ({points:+.2f} percentage points)"])
        rows.append(["same prediction", f"{judged.agreement:.2%} of {judged.images:,} {judged.which} images"])
    elif written.int8:
        rows.append(["accuracy", "not measured: the run's images are not available"])
    for timing in written.speed:
        images = "time for 1 image" if timing.batch == 1 else f"time for {timing.batch} images"
        rows.append([images, f"{_describe_times(timing)}; one CPU thread each"])
    return rows


def _describe_times(timing: "Timing") -> str:
    """torch 6.8 ms; onnxruntime 4.14 ms (1.64 times as fast)."""
    times = {name: duration(milliseconds / 1000) for name, milliseconds in timing.milliseconds.items()}
    parts = [f"torch {times['torch']}"]
    for name, ratio in timing.times_as_fast.items():
        factor = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times as slow"
        parts.append(f"{name} {times[name]} ({factor})")
    return "; ".join(parts)
