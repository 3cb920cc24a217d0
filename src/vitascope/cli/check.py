"""`vitascope check` and `vitascope exercise`: check a user's code and name its mistakes."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from vitascope.cli.console import ExitCode, create_console, create_table
from vitascope.errors import UserError

if TYPE_CHECKING:
    from vitascope.coursework.checker.report import FileReport
    from vitascope.coursework.exercises import TaskPoints


class CheckLimits(TypedDict):
    """The keyword arguments of `check_file` that are the same for all files."""

    part: str | None
    time_limit_seconds: float
    memory_limit_gib: float


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
        _check_part_exists(part)
    limits = CheckLimits(part=part, time_limit_seconds=seconds, memory_limit_gib=memory)
    exit_code = (
        _check_folder_and_print_reports(folder, limits, as_json)
        if folder is not None
        else _check_file_and_print_reports(file or "", limits, as_json)
    )
    raise typer.Exit(exit_code)


def _check_part_exists(part: str) -> None:
    """Raise a UserError if there is no such part."""
    from vitascope.coursework.checker.check import PARTS
    from vitascope.errors import suggest_choice

    if part not in PARTS:
        raise UserError(f"There is no part {part}. {suggest_choice(part, PARTS)}")


def _check_file_and_print_reports(file_and_name: str, limits: CheckLimits, as_json: bool) -> ExitCode:
    from vitascope.coursework.checker.sandbox import check_file_in_sandbox

    path, _, name = file_and_name.rpartition(":") if ".py:" in file_and_name else (file_and_name, "", "")
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder. To check all files in it, run: vitascope check --all {path}")
    if as_json and not Path(path).is_file():
        print(json.dumps({"parts": [], "error": f"There is no file {path}."}, indent=1))
        return 2
    reports = check_file_in_sandbox(Path(path), name or None, **limits)
    if as_json:
        print(json.dumps(reports.to_json_summary(), indent=1))
        return reports.exit_code
    for report in reports.part_reports:
        print(f"{report}\n")
    advice = (
        _format_advice_to_check_unrecognized(path, reports.unrecognized_names, limits["part"])
        if reports.unrecognized_names
        else ""
    )
    if advice and not reports.is_empty:
        print(f"Not recognised: {', '.join(reports.unrecognized_names)}.{advice}")
    if reports.error is not None:
        suffix = advice if reports.is_empty else ""
        print(f"vitascope: {path} could not be checked. {reports.error}{suffix}", file=sys.stderr)
    elif len(reports.part_reports) > 1:
        print(
            f"{sum(report.passed for report in reports.part_reports)} of {len(reports.part_reports)} parts are correct."
        )
    return reports.exit_code


def _format_advice_to_check_unrecognized(path: str, unrecognized_names: list[str], part: str | None) -> str:
    """Return a sentence with the command that checks a function whose part was not recognised."""
    from vitascope.coursework.checker.check import PARTS

    others = "" if part else f" (other parts: {', '.join(PARTS[1:])})"
    target = "it" if len(unrecognized_names) == 1 else "one of them"
    return f" To check {target}, run: vitascope check {path}:{unrecognized_names[0]} --part {part or PARTS[0]}{others}"


def _check_folder_and_print_reports(folder: Path, limits: CheckLimits, as_json: bool) -> ExitCode:
    from vitascope.coursework.checker.sandbox import check_file_in_sandbox

    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.")
    relative_paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    paths = sorted(folder / path for path in relative_paths if not any(part[0] in "._" for part in path.parts))
    if not paths:
        raise UserError(f"There is no .py file in {folder}.")
    with ThreadPoolExecutor(max_workers=2) as pool:
        reports_by_path = dict(
            zip(paths, pool.map(lambda path: check_file_in_sandbox(path, **limits), paths), strict=True)
        )
    if as_json:
        print(json.dumps(_build_folder_report_json(reports_by_path, folder), indent=1))
    else:
        _print_results_and_sheet_e_points(reports_by_path, folder)
    return max((reports.exit_code for reports in reports_by_path.values() if not reports.is_empty), default=2)


def _build_folder_report_json(reports_by_path: "dict[Path, FileReport]", folder: Path) -> dict[str, Any]:
    from vitascope.coursework.exercises import grade_sheet_e_code

    parts, files = [], []
    for path, reports in reports_by_path.items():
        name = str(path.relative_to(folder))
        parts += [report.to_json_summary() | {"file": name} for report in reports.part_reports]
        points = [task._asdict() for task in grade_sheet_e_code(reports.part_reports)]
        files.append(
            {"file": name, "error": reports.error, "points": sum(task["given"] for task in points), "for": points}
        )
    return {"parts": parts, "files": files}


def _print_results_and_sheet_e_points(reports_by_path: "dict[Path, FileReport]", folder: Path) -> None:
    from vitascope.coursework.exercises import SHEET_E_PARTS, UNCHECKED_POINTS_NOTE, grade_sheet_e_code

    rows = []
    graded = {
        path
        for path, reports in reports_by_path.items()
        if any(report.part in SHEET_E_PARTS for report in reports.part_reports)
    }
    for path, reports in reports_by_path.items():
        name = str(path.relative_to(folder))
        tasks = grade_sheet_e_code(reports.part_reports)
        points = (
            _format_points_per_task(tasks, {report.part for report in reports.part_reports}) if path in graded else "–"
        )
        lines = [
            [report.name, report.part, "correct" if report.passed else report.verdict or ", ".join(report.mistakes)]
            for report in reports.part_reports
        ]
        if reports.error is not None:
            lines.append(["", "", "nothing to check" if reports.is_empty else f"could not be checked. {reports.error}"])
        rows += [[name if n == 0 else "", *line, points if n == 0 else ""] for n, line in enumerate(lines)]
    create_console().print(
        create_table(f"Results for {folder}", ["file", "name", "part", "result", "points (sheet E)"], rows)
    )
    if graded:
        print(UNCHECKED_POINTS_NOTE)


def _format_points_per_task(tasks: "list[TaskPoints]", parts_in_file: set[str]) -> str:
    """Return the points given, of those possible for the parts in the file, and of the whole sheet."""
    given, possible = (sum(task.given for task in tasks), sum(task.of for task in tasks if task.part in parts_in_file))
    total = sum(task.of for task in tasks)
    return f"{given} of {possible}" + (f" (sheet E: {total})" if possible < total else "")


@exercises.command("list")
def print_exercises() -> None:
    """List the exercises."""
    from vitascope.coursework.exercises import EXERCISES, UNCHECKED_POINTS_NOTE

    rows = [[name, task] for name, task in EXERCISES.items()]
    create_console().print(create_table("Exercises", ["name", "task"], rows))
    print(UNCHECKED_POINTS_NOTE)
    print("The sheets are coursework. For a one-line summary of each sheet, run: vitascope sheet --help")
    print("To start an exercise, run: vitascope exercise start NAME")


@exercises.command("start")
def write_exercise_skeleton(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of an exercise. See: vitascope exercise list.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: the name with _ for -, e.g. sheet-e gives sheet_e.py.")
    ] = None,
) -> None:
    """Write an exercise file. Replace each `...` in it with your own code."""
    from vitascope.coursework.exercises import write_new_exercise_file

    path = write_new_exercise_file(name, out)
    print(f"Wrote {path}. Replace every ... in it. Then run: vitascope check {path}")
