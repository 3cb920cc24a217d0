"""`vitascope export`: a trained model as a file or folder for other programs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vitascope.cli.evaluate import RunPath
from vitascope.cli.loading import loaded
from vitascope.cli.tables import console, table

if TYPE_CHECKING:
    from vitascope.export.written import Written

app = typer.Typer(
    help="A trained model for other programs: ONNX, torch.export, a folder for timm or transformers, the hub.",
    no_args_is_help=True,
)
Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@app.command()
def onnx(
    run: RunPath,
    out: Annotated[
        Path | None, typer.Option(help="An .onnx file; else RUN/export/model.onnx or model-int8.onnx.")
    ] = None,
    maps: Annotated[bool, typer.Option("--maps", help="Also give out all attention maps.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Products of 8-bit integers; tells what that costs.")] = False,
    opset: Annotated[int | None, typer.Option(help="ONNX's version of its operators, 18 to 25; else 20.")] = None,
    as_json: Json = False,
) -> None:
    """An ONNX file for any batch, compared with the model in onnxruntime before it is written."""
    _export(run, "int8" if int8 else "onnx", out, as_json, maps=maps, opset=opset)


@app.command()
def torch(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(help="A .pt2 file; else RUN/export/model.pt2.")] = None,
    as_json: Json = False,
) -> None:
    """A .pt2 file for any batch (torch.export), compared with the model before it is written."""
    _export(run, "torch", out, as_json)


@app.command()
def folder(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    form: Annotated[str, typer.Option("--for", help="Who loads it: vitascope, timm or transformers.")] = "vitascope",
) -> None:
    """A folder with config.json, model.safetensors and a card, for Vitascope, timm or transformers; opened again."""
    from vitascope.evaluation.card import use_of

    place = loaded(run).save_pretrained(out, form=form)
    print(f"Folder: {place}\n\n{use_of(form, str(place))}")


@app.command()
def hub(
    run: RunPath,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="somebody/something on the Hugging Face hub.")],
    form: Annotated[str, typer.Option("--for", help="Who loads it: vitascope, timm or transformers.")] = "vitascope",
    private: Annotated[bool, typer.Option("--private", help="Only its owner sees it.")] = False,
) -> None:
    """The same folder as a repository on the Hugging Face hub; log in before with: hf auth login."""

    print(f"Repository: {loaded(run).push_to_hub(repository, form=form, private=private)}")


def _export(
    run: Path, form: str, out: Path | None, as_json: bool, *, maps: bool = False, opset: int | None = None
) -> None:
    from vitascope.export.everything import export_run

    model = loaded(run)
    with Console(stderr=True).status("Writing the file, comparing it with the model, taking its time …"):
        written = export_run(model, form, out, maps=maps, opset=opset)
    if as_json:
        print(json.dumps(written.as_dict()))
    else:
        console().print(table(f"{written.format}, from {model.name}", ["what", "found"], _rows(written)))


def _rows(written: "Written") -> list[list[str]]:
    size = f"{written.bytes / 2**20:.2f} MiB"
    judged = written.int8 and written.int8.accuracy
    if written.int8:
        size += f" (float32: {written.int8.float32_bytes / 2**20:.2f} MiB)"
    found, word = ("apart", "by") if written.int8 else ("verified", "to")
    apart = ", ".join(f"{name} {word} {far:.1e}" for name, far in written.differences.items())
    rows = [["written", str(written.path)], ["size", size]]
    rows.append([found, f"{apart} of the largest, on {written.compared_on} images in batches of 1, 2 and 7"])
    if judged:
        points = 100 * (judged.int8 - judged.float32)
        rows.append(["accuracy", f"{judged.int8:.2%}, float32 {judged.float32:.2%} ({points:+.2f} points)"])
        rows.append(["same answer", f"{judged.agreement:.2%} of {judged.images:,} {judged.which} images"])
    elif written.int8:
        rows.append(["accuracy", "not measured: the run's images are not here"])
    for timing in written.speed:
        ratios = ", ".join(
            f"{name} {timing.milliseconds[name]:.2f} ms (×{ratio:.2f})" for name, ratio in timing.times_as_fast.items()
        )
        images = "1 image" if timing.batch == 1 else f"{timing.batch} images"
        rows.append([images, f"torch {timing.milliseconds['torch']:.2f} ms, {ratios}; one thread each"])
    return rows
