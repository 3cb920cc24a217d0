"""Run a coursework sheet, and write its report as Markdown and as a single HTML page."""

from dataclasses import dataclass, field
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from vitascope.coursework.sheets.experiments import QUICK_SEEDS, SheetExperiments
from vitascope.draw.html import Code, Document, Heading, Part, Picture, Table, Text, write_picture
from vitascope.errors import UserError
from vitascope.inference.hardware import choose_or_check_device
from vitascope.records.ablation import MIN_SEEDS_FOR_INTERVAL
from vitascope.run.files import make_folder, read_json_object_or_empty, write_atomically, write_json
from vitascope.run.machine import collect_machine_info

SHEET_LETTERS = ("A", "B", "C", "D", "E")  # each has a module of its name


@dataclass
class SheetReport:
    """The parts of a report in order, and the measurements that are stored as JSON."""

    sheet_letter: str
    title: str
    quick: bool
    folder: Path
    parts: list[Part] = field(default_factory=list)
    measurements: dict[str, Any] = field(default_factory=dict)

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The tables as they are stored in SHEET.json."""
        return [{"head": part.header, "rows": part.rows} for part in self.parts if isinstance(part, Table)]

    def add_heading(self, text: str) -> None:
        self.parts.append(Heading(text))

    def add_text(self, text: str) -> None:
        self.parts.append(Text(text))

    def add_code(self, text: str) -> None:
        self.parts.append(Code(text))

    def add_table(self, header: list[str], rows: list[list[str]]) -> None:
        self.parts.append(Table(header, rows))

    def save_and_add_figure(self, name: str, figure: Figure) -> None:
        make_folder(self.folder, "Choose another folder with --out.")
        picture = Picture.from_figure(name.replace("-", " "), figure, f"{self.sheet_letter}-{name}.png")
        write_picture(picture, self.folder)
        self.parts.append(picture)

    def add_questions_from_template(self, **placeholder_values: Any) -> None:
        """Add the sheet's questions and answers from questions/SHEET.md, with values for the {} placeholders."""
        self.add_heading("The questions")
        path = resources.files("vitascope.coursework.sheets") / "questions" / f"{self.sheet_letter}.md"
        for part in path.read_text(encoding="utf-8").split("## ")[1:]:
            question, _, answer = part.partition("\n")
            self.parts.append(Text(answer.format(**placeholder_values), lead=question.strip()))

    def write_pages(self, machine_names: list[str], git_commit: str | None = None) -> Path:
        """Write SHEET.md, SHEET.html and SHEET.json and return the path of the HTML page. `machine_names`: the machines
        that trained the runs."""
        make_folder(self.folder, "Choose another folder with --out.")
        machine = collect_machine_info(git_commit)
        provenance = _format_provenance(self.sheet_letter, self.quick, machine_names)
        intro = Text(f"{provenance} {_explain_seeds_or_interval(self.measurements.get('seeds'))}")
        document = Document(f"Sheet {self.sheet_letter}: {self.title}", [intro, *self.parts])
        write_atomically(self.folder / f"{self.sheet_letter}.md", document.format_markdown())
        write_atomically(self.folder / f"{self.sheet_letter}.html", document.format_html_page())
        command = f"vitascope sheet {self.sheet_letter}{' --quick' if self.quick else ''}"
        content = {
            "sheet": self.sheet_letter,
            "quick": self.quick,
            "command": command,
            "runs_on": machine_names,
        } | self.measurements
        content |= {"tables": self.tables, "written_on": machine}
        write_json(self.folder / f"{self.sheet_letter}.json", content)
        return self.folder / f"{self.sheet_letter}.html"


def _format_provenance(sheet_letter: str, quick: bool, machine_names: list[str]) -> str:
    short = (
        "Shortened: fewer epochs, seeds and images than the sheet requires, and smaller models. The numbers are not "
        "comparable with those of a full report. "
        if quick
        else ""
    )
    return (
        f"{short}Made by `vitascope sheet {sheet_letter}{' --quick' if quick else ''}` on {', '.join(machine_names)}."
    )


def _explain_seeds_or_interval(num_seeds: int | None) -> str:
    if num_seeds is not None and num_seeds < MIN_SEEDS_FOR_INTERVAL:
        return "One seed." if num_seeds == 1 else "Two seeds: both values are shown, in the order of the seeds."
    return f"± is the 95 % confidence interval of the mean over {num_seeds or 'the'} seeds (Student's t)."


def format_shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape))


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
    if sheet_letter.upper() not in SHEET_LETTERS:
        raise UserError(f"There is no sheet {sheet_letter}. Choose one of {', '.join(SHEET_LETTERS)}.")
    num_seeds = num_seeds if num_seeds is not None else QUICK_SEEDS if quick else 5
    if num_seeds < 1:
        raise UserError(f"--seeds {num_seeds} must be at least 1.")
    if max_batched_runs is not None and max_batched_runs < 1:
        raise UserError(f"--batch-runs {max_batched_runs} must be at least 1.")
    choose_or_check_device(device)  # reports a missing device before anything is written
    sheet_letter = sheet_letter.upper()
    if weights_ref is not None and sheet_letter != "D":
        raise UserError(f"--weights is only for sheet D. Sheet {sheet_letter} uses no pretrained weights.")
    if quick and read_json_object_or_empty(output_folder / f"{sheet_letter}.json").get("quick") is False:
        path = output_folder / f"{sheet_letter}.md"
        raise UserError(f"{path} is a full report. Choose another folder for the quick one with --out.")
    runs_folder = output_folder / f"{sheet_letter}-{'quick' if quick else 'full'}"
    sheet = import_module(f"vitascope.coursework.sheets.{sheet_letter.lower()}")
    report = SheetReport(sheet_letter, sheet.TITLE, quick, output_folder)
    experiments = SheetExperiments(
        runs_folder, num_seeds, quick, console, device, max_batched_runs, weights_ref, study_titles=sheet.EXPERIMENTS
    )
    report.measurements["seeds"] = num_seeds
    sheet.run_studies_and_fill_report(experiments, report)
    return report.write_pages(experiments.machine_names, git_commit)
