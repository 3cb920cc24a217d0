"""`vitascope check` and `exercise`: is your attention right, and which mistake does it have."""

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

exercises = typer.Typer(help="Skeletons to fill in and check.", no_args_is_help=True)


def check(
    file: Annotated[str | None, typer.Argument(metavar="FILE.py[:NAME]", help="A file, or one thing in it.")] = None,
    part: Annotated[str | None, typer.Option(help="What it is, where its name does not tell.")] = None,
    folder: Annotated[Path | None, typer.Option("--all", help="Check every .py file of a folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    seconds: Annotated[float, typer.Option(help="The most time for the file's start, and for each part.")] = 60.0,
    memory: Annotated[float, typer.Option(help="The most memory for a file, in GiB (on Linux).")] = 4.0,
) -> None:
    """Compare your code with PyTorch's layers, and name the mistake where it differs.

    Exit code 0: all right; 1: something is wrong; 2: the file could not be used.

    Example: vitascope check my_attention.py
    """
    if (file is None) == (folder is None):
        raise UserError("Say which file to check, or --all FOLDER.")
    if seconds <= 0 or memory <= 0:
        raise UserError("--seconds and --memory must be above 0.")
    if part is not None:
        from vitascope.checking.finding import PARTS
        from vitascope.errors import did_you_mean

        if part not in PARTS:
            raise UserError(f"--part {part} is unknown. {did_you_mean(part, PARTS)}")
    limits = {"part": part, "seconds": seconds, "memory": memory}
    code = _all(folder, limits, as_json) if folder is not None else _one(file or "", limits, as_json)
    raise typer.Exit(code)


def _one(words: str, limits: dict[str, Any], as_json: bool) -> int:
    from vitascope.checking.isolation import check_file

    path, _, name = words.rpartition(":") if ".py:" in words else (words, "", "")
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder: vitascope check --all {path}")
    if as_json and not Path(path).is_file():
        print(json.dumps({"parts": [], "error": f"There is no file {path}."}, indent=1))
        return 2
    reports = check_file(Path(path), name or None, **limits)
    if as_json:
        print(json.dumps(reports.as_json(), indent=1))
        return reports.exit_code
    for report in reports.parts:
        print(f"{report}\n")
    if reports.passed_over and not name:
        print(f"Passed over (say {path}:NAME --part PART): {', '.join(reports.passed_over)}")
    if reports.error is not None:
        print(f"vitascope: {path} could not be used: {reports.error}", file=sys.stderr)
    elif len(reports.parts) > 1:
        print(f"{sum(report.passed for report in reports.parts)} of {len(reports.parts)} parts are right.")
    return reports.exit_code


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
    from vitascope.checking.exercise import UNCHECKED, points

    rows = []
    for path, reports in found.items():
        name = str(path.relative_to(folder))
        total = points(reports.parts)
        words = f"{sum(point.given for point in total)} of {sum(point.of for point in total)}"
        lines = [[one.name, one.part, "right" if one.passed else ", ".join(one.mistakes)] for one in reports.parts]
        if reports.error is not None:
            lines.append(["", "", "holds no part" if reports.is_empty else f"could not be used: {reports.error}"])
        rows += [[name if n == 0 else "", *line, words if n == 0 else ""] for n, line in enumerate(lines)]
    console().print(table(f"Checked in {folder}", ["file", "name", "part", "verdict", "sheet E's points"], rows))
    print(UNCHECKED)


@exercises.command("list")
def list_exercises() -> None:
    """The exercises there are."""
    from vitascope.checking.exercise import EXERCISES, UNCHECKED

    rows = [[name, words] for name, words in EXERCISES.items()]
    console().print(table("Exercises: vitascope exercise start NAME", ["name", "what"], rows))
    print(UNCHECKED)


@exercises.command("start")
def start_exercise(
    name: Annotated[str, typer.Argument(help="An exercise, as `exercise list` names it.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; else NAME.py.")] = None,
) -> None:
    """Write a skeleton with `...` to fill in."""
    from vitascope.checking.exercise import start

    path = start(name, out)
    print(f"{path}: replace every ... in it, then: vitascope check {path}")
