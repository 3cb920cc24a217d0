"""A sheet's letter -> its report."""

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
    """Runs all of it, or goes on; the page's path comes back."""
    sheet = SHEETS.get(letter.upper())
    if sheet is None:
        raise UserError(f"There is no sheet {letter}. Choose one of {', '.join(SHEETS)}.")
    count = seeds if seeds is not None else QUICK_SEEDS if quick else 5
    if count < 1:
        raise UserError(f"--seeds {count} must be at least 1.")
    if together is not None and together < 1:
        raise UserError(f"--batch-runs {together} must be at least 1.")
    choose_device(device)  # says what is not there, before anything is kept
    letter = letter.upper()
    if weights is not None and letter != "D":
        raise UserError(f"--weights is for sheet D; sheet {letter} starts from none.")
    if quick and read_json(out / f"{letter}.json").get("quick") is False:
        raise UserError(f"{out / f'{letter}.md'} is a full report. Choose another place for a quick one: --out.")
    work = out / f"{letter}-{'quick' if quick else 'full'}"
    report = Report(letter, sheet.TITLE, quick, out)
    lab = Lab(work, count, quick, console, device, together, weights)
    report.numbers["seeds"] = count
    sheet.run(lab, report)
    return report.write(lab.machines, commit)
