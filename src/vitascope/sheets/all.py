"""Run a coursework sheet and write its report."""

from pathlib import Path

from rich.console import Console

from vitascope.errors import UserError
from vitascope.run.files import read_json
from vitascope.sheets import a, b, c, d, e
from vitascope.sheets.lab import QUICK_SEEDS, Lab
from vitascope.sheets.writing import Report
from vitascope.training.hardware import choose_device

SHEETS = {"A": a, "B": b, "C": c, "D": d, "E": e}


def run_sheet(
    letter: str,
    out: Path,
    *,
    seeds: int | None = None,
    quick: bool = False,
    device: str = "auto",
    together: int | None = None,
    weights: str | None = None,
    commit: str | None = None,
    console: Console,
) -> Path:
    """Run a sheet, or resume it, and return the path of its page."""
    sheet = SHEETS.get(letter.upper())
    if sheet is None:
        raise UserError(f"There is no sheet {letter}. Choose one of {', '.join(SHEETS)}.")
    count = seeds if seeds is not None else QUICK_SEEDS if quick else 5
    if count < 1:
        raise UserError(f"--seeds {count} must be at least 1.")
    if together is not None and together < 1:
        raise UserError(f"--batch-runs {together} must be at least 1.")
    choose_device(device)  # reports a missing device before anything is written
    letter = letter.upper()
    if weights is not None and letter != "D":
        raise UserError(f"--weights is only for sheet D. Sheet {letter} uses no pretrained weights.")
    if quick and read_json(out / f"{letter}.json").get("quick") is False:
        raise UserError(f"{out / f'{letter}.md'} is a full report. Choose another folder for the quick one with --out.")
    work = out / f"{letter}-{'quick' if quick else 'full'}"
    report = Report(letter, sheet.TITLE, quick, out)
    lab = Lab(work, count, quick, console, device, together, weights, experiments=sheet.EXPERIMENTS)
    report.numbers["seeds"] = count
    sheet.run(lab, report)
    return report.write(lab.machines, commit)
