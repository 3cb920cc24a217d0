"""`vitascope check` and `vitascope exercise`: check a user's code and name its mistakes."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitascope.cli.tables import console, table
from vitascope.errors import UserError

if TYPE_CHECKING:
    from vitascope.checking.result import Reports

exercises = typer.Typer(help="List the exercises, or write an exercise file to fill in.", no_args_is_help=True)


def check(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE.py[:NAME]", help="File to check. NAME: check only this function or class."),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="Part that the code implements. Default: recognised by name.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--all", help="Check every .py file in a folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    seconds: Annotated[
        float, typer.Option(help="Computing time limit in seconds, for loading the file and for each part.")
    ] = 60.0,
    memory: Annotated[float, typer.Option(help="Memory limit per file, in GiB (Linux only).")] = 4.0,
) -> None:
    """Compare your transformer code with PyTorch's layers and name its mistakes.

    Parts that can be checked: attention, multi-head-attention,
    self-attention-2d, causal-mask, patchify, sinusoidal-positions,
    feed-forward, transformer-block, class-token, vit.

    Exit code 0: everything is correct. 1: a mistake was found. 2: a file could not be checked.

    Example: vitascope check my_attention.py
    """
    if (file is None) == (folder is None):
        raise UserError("Give one file (vitascope check FILE.py) or one folder (vitascope check --all FOLDER).")
    if seconds <= 0 or memory <= 0:
        raise UserError("--seconds and --memory must be greater than 0.")
    if part is not None:
        from vitascope.checking.finding import PARTS
        from vitascope.errors import did_you_mean

        if part not in PARTS:
            raise UserError(f"There is no part {part}. {did_you_mean(part, PARTS)}")
    limits = {"part": part, "seconds": seconds, "memory": memory}
    code = _all(folder, limits, as_json) if folder is not None else _one(file or "", limits, as_json)
    raise typer.Exit(code)


def _one(words: str, limits: dict[str, Any], as_json: bool) -> int:
    from vitascope.checking.isolation import check_file

    path, _, name = words.rpartition(":") if ".py:" in words else (words, "", "")
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder. To check all files in it, run: vitascope check --all {path}")
    if as_json and not Path(path).is_file():
        print(json.dumps({"parts": [], "error": f"There is no file {path}."}, indent=1))
        return 2
    reports = check_file(Path(path), name or None, **limits)
    if as_json:
        print(json.dumps(reports.as_json(), indent=1))
        return reports.exit_code
    for report in reports.parts:
        print(f"{report}\n")
    how = _how_to_check(path, reports.passed_over, limits["part"]) if reports.passed_over else ""
    if how and not reports.is_empty:
        print(f"Not recognised: {', '.join(reports.passed_over)}.{how}")
    if reports.error is not None:
        more = how if reports.is_empty else ""
        print(f"vitascope: {path} could not be checked. {reports.error}{more}", file=sys.stderr)
    elif len(reports.parts) > 1:
        print(f"{sum(report.passed for report in reports.parts)} of {len(reports.parts)} parts are correct.")
    return reports.exit_code


def _how_to_check(path: str, names: list[str], part: str | None) -> str:
    """The command that checks a function whose part is not recognised by its name."""
    from vitascope.checking.finding import PARTS

    others = "" if part else f" (other parts: {', '.join(PARTS[1:])})"
    which = "it" if len(names) == 1 else "one of them"
    return f" To check {which}, run: vitascope check {path}:{names[0]} --part {part or PARTS[0]}{others}"


def _all(folder: Path, limits: dict[str, Any], as_json: bool) -> int:
    from vitascope.checking.isolation import check_file

    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.")
    found_there = (path.relative_to(folder) for path in folder.rglob("*.py"))
    paths = sorted(folder / path for path in found_there if not any(part[0] in "._" for part in path.parts))
    if not paths:
        raise UserError(f"There is no .py file in {folder}.")
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = dict(zip(paths, pool.map(lambda path: check_file(path, **limits), paths), strict=True))
    print(json.dumps(_graded(found, folder), indent=1)) if as_json else _print_graded(found, folder)
    return max((reports.exit_code for reports in found.values() if not reports.is_empty), default=2)


def _graded(found: "dict[Path, Reports]", folder: Path) -> dict[str, Any]:
    from vitascope.checking.exercise import points

    parts, files = [], []
    for path, reports in found.items():
        name = str(path.relative_to(folder))
        parts += [report.as_json() | {"file": name} for report in reports.parts]
        given = [point._asdict() for point in points(reports.parts)]
        files.append({"file": name, "error": reports.error, "points": sum(p["given"] for p in given), "for": given})
    return {"parts": parts, "files": files}


def _print_graded(found: "dict[Path, Reports]", folder: Path) -> None:
    from vitascope.checking.exercise import SHEET_E, UNCHECKED, points

    rows = []
    graded = {path for path, reports in found.items() if any(one.part in SHEET_E for one in reports.parts)}
    for path, reports in found.items():
        name = str(path.relative_to(folder))
        total = points(reports.parts)
        words = (
            f"{sum(point.given for point in total)} of {sum(point.of for point in total)}" if path in graded else "–"
        )
        lines = [
            [one.name, one.part, "correct" if one.passed else one.verdict or ", ".join(one.mistakes)]
            for one in reports.parts
        ]
        if reports.error is not None:
            lines.append(["", "", "nothing to check" if reports.is_empty else f"could not be checked. {reports.error}"])
        rows += [[name if n == 0 else "", *line, words if n == 0 else ""] for n, line in enumerate(lines)]
    console().print(table(f"Results for {folder}", ["file", "name", "part", "result", "points (sheet E)"], rows))
    if graded:
        print(UNCHECKED)


@exercises.command("list")
def list_exercises() -> None:
    """List the exercises."""
    from vitascope.checking.exercise import EXERCISES, UNCHECKED

    rows = [[name, words] for name, words in EXERCISES.items()]
    console().print(table("Exercises", ["name", "task"], rows))
    print(UNCHECKED)
    print("The sheets are coursework. To see what each one asks for, run: vitascope sheet --help")
    print("To start an exercise, run: vitascope exercise start NAME")


@exercises.command("start")
def start_exercise(
    name: Annotated[str, typer.Argument(help="Name of an exercise. See: vitascope exercise list.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: the exercise's name, e.g. sheet_e.py.")
    ] = None,
) -> None:
    """Write an exercise file. Replace each `...` in it with your own code."""
    from vitascope.checking.exercise import start

    path = start(name, out)
    print(f"Wrote {path}. Replace every ... in it. Then run: vitascope check {path}")
