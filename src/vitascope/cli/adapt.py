"""`vitascope adapt`: adapt pretrained weights to other image sizes and report what changes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitascope.cli.console import abbreviate_count, create_console, create_table
from vitascope.errors import UserError, suggest_choice
from vitascope.model.config import check_size

if TYPE_CHECKING:
    from vitascope.weights.adaptation import AdaptationReport

SIZE_SETTINGS = ("img_size", "patch_size")
ADAPT_SETTINGS = (*SIZE_SETTINGS, "in_chans", "num_classes", "num_heads")
RELATIVE_ERROR = (
    "Relative error: norm of the difference / norm of the original. For patch sizes: of the patch embeddings of "
    "typical photos. For channels: of the filters. For positions: after resampling back."
)


def adapt(
    weights: Annotated[str, typer.Argument(metavar="WEIGHTS", help="timm:NAME, hf:REPO, a file, a folder or a run.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…", help="New values of img_size, patch_size, in_chans, num_classes or num_heads."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the adapted model. Use it with weights=FOLDER.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")] = False,
) -> None:
    """Adapt pretrained weights to another image size, patch size, or number of channels or classes.

    The report lists the weights that are resampled, dropped or new, and how much information resampling loses.

    Example: vitascope adapt timm:deit_tiny_patch16_224 img_size=28 patch_size=4 in_chans=1
    """
    from vitascope.run.checkpoint import save_model_folder
    from vitascope.training.initial_weights import resolve_weights_path
    from vitascope.weights.adaptation import adapt as adapted
    from vitascope.weights.adaptation import plan_adaptation
    from vitascope.weights.pretrained import open_weights

    asked = _parse_overrides(words or [])
    heads, size = asked.pop("num_heads", None), asked.get("img_size")
    found = open_weights(resolve_weights_path(weights), num_heads=heads, img_size=size)
    report = plan_adaptation(found, **asked)
    if report.refused:
        if as_json:
            print(json.dumps(asdict(report)))
        raise UserError(report.refused)
    made = adapted(found, **asked)
    if out is not None:
        save_model_folder(out, made.info, made.weights)
    if as_json:
        print(json.dumps(asdict(made.report)))
        return
    _print_adaptation_report(made.report)
    if out is not None:
        print(f"Adapted model: {out}")


def _parse_overrides(overrides: list[str]) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    for word in overrides:
        key, _, value = word.partition("=")
        if key not in ADAPT_SETTINGS:
            raise UserError(f"'{word}' is not a setting of adapt. {suggest_choice(key, ADAPT_SETTINGS)}")
        try:
            asked[key] = json.loads(value)
        except ValueError as error:
            raise UserError(f"{word}: give a whole number, or a pair such as [28,56].") from error
        if key in SIZE_SETTINGS and isinstance(asked[key], int | list) and not isinstance(asked[key], bool):
            asked[key] = check_size(key, asked[key])
        elif type(asked[key]) is not int:
            pair = ", or a pair such as [28,56]" if key in SIZE_SETTINGS else ""
            raise UserError(f"{word}: give a whole number{pair}.")
    return asked


def _print_adaptation_report(report: "AdaptationReport") -> None:
    rows = [
        ["image size in pixels", _format_shape(report.image_before), _format_shape(report.image_after)],
        ["patch size in pixels", _format_shape(report.patch_before), _format_shape(report.patch_after)],
        ["patch grid", _format_shape(report.grid_before), _format_shape(report.grid_after)],
        ["tokens", str(report.tokens_before), str(report.tokens_after)],
        ["pixels used", "100%", f"{report.pixels_seen:.0%}"],
        ["FLOPs per image", abbreviate_count(report.flops_before), abbreviate_count(report.flops_after)],
    ]
    screen = create_console()
    screen.print(
        create_table(
            f"{report.weights} (format: {report.library})",
            ["", "before", "after"],
            rows,
            right_aligned={"before", "after"},
        )
    )
    rows = [
        [item.name, _format_shape(item.before), _format_shape(item.after), item.how, f"{item.lost:.1%}"]
        for item in report.resampled
    ]
    if rows:
        columns = ["weight", "shape before", "shape after", "method", "relative error"]
        screen.print(create_table("Changed weights", columns, rows, right_aligned={"relative error"}))
        print(RELATIVE_ERROR)
    parts = {"dropped": report.dropped, "new": report.new, "assumed": report.assumed, "note": report.notes}
    for name, lines in parts.items():
        for line in lines:
            print(f"{name}: {line}")
    print(f"unchanged: {report.kept} tensors")
    if report.alternative:
        print(_describe_alternative(report))


def _describe_alternative(report: "AdaptationReport") -> str:
    """Describe the cost of upscaling the images instead of resampling the weights."""
    other = report.alternative
    sizes = " and ".join(f"{name}={value}" for name, value in other["settings"].items())
    changed = ", ".join(
        f"{name}={report.settings[name]}" for name in ("in_chans", "num_classes") if name in report.settings
    )
    text = (
        f"Alternative without resampling: keep {sizes}, and upscale the images. This needs {other['tokens']} tokens "
        f"and {abbreviate_count(other['flops'])} FLOPs per image{f' with {changed}' if changed else ''} "
        f"({other['times_flops']:g} times the FLOPs)."
    )
    return text + (
        " The channels are still converted, with the relative error above." if other["converts_channels"] else ""
    )


def _format_shape(shape: list[int]) -> str:
    return "×".join(map(str, shape))
