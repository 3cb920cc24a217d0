"""`vitascope adapt`: adapt pretrained weights to other image sizes and report what changes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, cast

import typer

from vitascope.cli.console import abbreviate_count, create_console, create_table
from vitascope.errors import UserError, suggest_choice
from vitascope.model.config import Size, check_and_convert_size
from vitascope.number_format import format_percent

if TYPE_CHECKING:
    from vitascope.weights.adaptation_report import AdaptationReport, TensorChange, UpscalingCost
    from vitascope.weights.model_info import ModelSettings

SIZE_SETTINGS = ("img_size", "patch_size")
ADAPT_SETTINGS = (*SIZE_SETTINGS, "in_chans", "num_classes", "num_heads")
# What is compared, and what is normal. The percentages are those of DeiT-tiny; a test measures them again.
PATCH_SIZE_ERROR = (
    "patch_embed.proj.weight, patch size: "
    "the outputs of the new filters for resized patches are compared with those of the old filters for the "
    "original patches. The error is computed for images whose neighbouring pixels have a correlation of 0.95, as in "
    "photos; no images are read. Typical values: 0 % for larger patches, 20 % for half the "
    "side length, 40 % for a quarter of it."
)
GRAYSCALE_ERROR = (
    "patch_embed.proj.weight, one channel: "
    "this step alone does not change the output for grayscale images. "
    "The error is the part of the filters that responds to colour. Typical values: 50 to 85 %."
)
CHANNELS_ERROR = (
    "patch_embed.proj.weight, channels: "
    "the filters' effect on an image that repeats the old channels in order is compared with that before. "
    "Typical values: 0 % if the number of channels is a multiple of the old one, otherwise 25 to 65 %."
)
POSITIONS_ERROR = (
    "pos_embed: the table is resampled to the new grid and back, and compared with the original. Typical values: 3 % "
    "for a larger grid, 10 to 15 % for about half as many rows and columns, 36 % for 4×4 instead of 14×14."
)


class AdaptSettings(TypedDict, total=False):
    img_size: Size
    patch_size: Size
    in_chans: int
    num_classes: int
    num_heads: int


def adapt(
    weights: Annotated[str, typer.Argument(metavar="WEIGHTS", help="timm:NAME, hf:REPO, a file, a folder or a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…",
            help="New values of img_size, patch_size, in_chans or num_classes. num_heads: only to correct a wrongly "
            "guessed head count.",
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
    from vitascope.training.initial_weights import make_model_ref_absolute
    from vitascope.weights import adaptation
    from vitascope.weights.adaptation_report import plan_adaptation_or_explain_refusal
    from vitascope.weights.pretrained import read_pretrained_model

    settings = _parse_adapt_settings(overrides or [])
    num_heads, img_size = settings.pop("num_heads", None), settings.get("img_size")
    pretrained = read_pretrained_model(make_model_ref_absolute(weights), num_heads=num_heads, img_size=img_size)
    report = plan_adaptation_or_explain_refusal(pretrained, **cast("ModelSettings", settings))
    if report.refused:
        if as_json:
            print(json.dumps(asdict(report)))
        raise UserError(report.refused)
    adapted = adaptation.adapt(pretrained, **settings)
    if out is not None:
        save_model_folder(out, adapted.info, adapted.weights)
    if as_json:
        print(json.dumps(asdict(adapted.report)))
        return
    _print_adaptation_report(adapted.report)
    print("Nothing was saved. To save the adapted model, add --out FOLDER." if out is None else f"Adapted model: {out}")


def _parse_adapt_settings(overrides: list[str]) -> AdaptSettings:
    settings: dict[str, object] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in ADAPT_SETTINGS:
            raise UserError(f"'{override}' is not a setting of adapt. {suggest_choice(key, ADAPT_SETTINGS)}")
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UserError(f"{override}: give a whole number, or a pair such as [28,56].") from error
        if key in SIZE_SETTINGS and isinstance(value, int | list) and not isinstance(value, bool):
            value = check_and_convert_size(key, value)
        elif type(value) is not int:
            pair = ", or a pair such as [28,56]" if key in SIZE_SETTINGS else ""
            raise UserError(f"{override}: give a whole number{pair}.")
        settings[key] = value
    return cast(AdaptSettings, settings)


def _print_adaptation_report(report: "AdaptationReport") -> None:
    rows = [
        ["image size in pixels", _format_shape(report.image_before), _format_shape(report.image_after)],
        ["patch size in pixels", _format_shape(report.patch_before), _format_shape(report.patch_after)],
        ["patch grid", _format_shape(report.grid_before), _format_shape(report.grid_after)],
        ["tokens", str(report.tokens_before), str(report.tokens_after)],
        ["pixels covered by patches", "100 %", format_percent(report.pixels_seen, 0)],
        [
            "FLOPs per image (2 per multiply-add)",
            abbreviate_count(report.flops_before),
            abbreviate_count(report.flops_after),
        ],
    ]
    console = create_console()
    console.print(
        create_table(
            f"{report.weights} (format: {report.library})",
            ["", "before", "after"],
            rows,
            right_aligned={"before", "after"},
        )
    )
    rows = [_format_change_row(item) for item in report.resampled]
    if rows:
        columns = ["weight", "shape before", "shape after", "method", "relative error"]
        console.print(create_table("Changed weights", columns, rows, right_aligned={"relative error"}))
        print("Relative error: norm of the difference / norm of the original. 0 % means that nothing is lost.")
        for explanation in dict.fromkeys(filter(None, map(_explain_relative_error, report.resampled))):
            print(f"  {explanation}")
    for label, names in {"dropped": report.dropped, "new": report.new}.items():
        if names:
            print(f"{label}: {', '.join(names)}")
    for label, lines in {"assumed": report.assumed, "note": report.notes}.items():
        for line in lines:
            print(f"{label}: {line}")
    print(f"unchanged: {report.kept} tensors")
    if report.alternative:
        print(_describe_upscaling_alternative(report))


def _format_change_row(change: "TensorChange") -> list[str]:
    """Return the cells of a changed weight; a bias has no relative error."""
    error = format_percent(change.lost) if _explain_relative_error(change) else "–"
    return [change.name, _format_shape(change.before), _format_shape(change.after), change.how, error]


def _explain_relative_error(change: "TensorChange") -> str | None:
    """Say what is compared for this weight, and what is normal; None for a bias, which loses nothing."""
    if change.name == "pos_embed":
        return POSITIONS_ERROR
    if change.before[2:] != change.after[2:]:
        return PATCH_SIZE_ERROR
    if change.before[1:2] != change.after[1:2]:
        return GRAYSCALE_ERROR if change.after[1] == 1 else CHANNELS_ERROR
    return None


def _describe_upscaling_alternative(report: "AdaptationReport") -> str:
    """Describe the cost of upscaling the images instead of resampling the weights."""
    upscaling = cast("UpscalingCost", report.alternative)
    sizes = " and ".join(f"{name}={value}" for name, value in upscaling["settings"].items())
    changed = ", ".join(
        f"{name}={report.settings[name]}" for name in ("in_chans", "num_classes") if name in report.settings
    )
    text = (
        f"Alternative without resampling: keep {sizes}, and upscale the images. This needs "
        f"{upscaling['tokens']} tokens and {abbreviate_count(upscaling['flops'])} FLOPs per image"
        f"{f' with {changed}' if changed else ''} ({upscaling['times_flops']:g} times those of the "
        "adapted model)."
    )
    return text + (
        " The channels are still converted, with the relative error above." if upscaling["converts_channels"] else ""
    )


def _format_shape(shape: list[int]) -> str:
    return "×".join(map(str, shape))
