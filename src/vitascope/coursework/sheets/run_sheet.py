"""Run a coursework sheet and write its report."""

from pathlib import Path

from rich.console import Console

from vitascope.coursework.sheets import a, b, c, d, e
from vitascope.coursework.sheets.experiments import QUICK_SEEDS, SheetExperiments
from vitascope.coursework.sheets.report import SheetReport
from vitascope.errors import UserError
from vitascope.run.files import read_json_or_empty
from vitascope.training.hardware import choose_or_check_device

SHEET_MODULES = {"A": a, "B": b, "C": c, "D": d, "E": e}


def run_sheet_and_write_report(
    sheet_letter: str,
    output_folder: Path,
    *,
    num_seeds: int | None = None,
    quick: bool = False,
    device: str = "auto",
    max_batched_runs: int | None = None,
    weights_ref: str | None = None,
    git_commit: str | None = None,
    console: Console,
) -> Path:
    """Run a sheet, or resume it, and return the path of its page."""
    sheet = SHEET_MODULES.get(sheet_letter.upper())
    if sheet is None:
        raise UserError(f"There is no sheet {sheet_letter}. Choose one of {', '.join(SHEET_MODULES)}.")
    num_seeds = num_seeds if num_seeds is not None else QUICK_SEEDS if quick else 5
    if num_seeds < 1:
        raise UserError(f"--seeds {num_seeds} must be at least 1.")
    if max_batched_runs is not None and max_batched_runs < 1:
        raise UserError(f"--batch-runs {max_batched_runs} must be at least 1.")
    choose_or_check_device(device)  # reports a missing device before anything is written
    sheet_letter = sheet_letter.upper()
    if weights_ref is not None and sheet_letter != "D":
        raise UserError(f"--weights is only for sheet D. Sheet {sheet_letter} uses no pretrained weights.")
    if quick and read_json_or_empty(output_folder / f"{sheet_letter}.json").get("quick") is False:
        path = output_folder / f"{sheet_letter}.md"
        raise UserError(f"{path} is a full report. Choose another folder for the quick one with --out.")
    runs_folder = output_folder / f"{sheet_letter}-{'quick' if quick else 'full'}"
    report = SheetReport(sheet_letter, sheet.TITLE, quick, output_folder)
    experiments = SheetExperiments(
        runs_folder, num_seeds, quick, console, device, max_batched_runs, weights_ref, study_titles=sheet.EXPERIMENTS
    )
    report.measurements["seeds"] = num_seeds
    sheet.run_experiments(experiments, report)
    return report.write_pages(experiments.machine_names, git_commit)
