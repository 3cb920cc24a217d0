"""Write a sheet's report as Markdown and as a single HTML page."""

import re
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from vitascope.draw.html import drawn, html_page, html_table
from vitascope.draw.look import save
from vitascope.records.arms import ENOUGH
from vitascope.records.reading import markdown
from vitascope.run.files import make_folder, write_json, write_whole
from vitascope.run.machine import record_of_machine


@dataclass
class Report:
    """The parts of a report in order, each as Markdown and HTML; `numbers` are the measurements."""

    sheet: str
    title: str
    quick: bool
    folder: Path
    parts: list[tuple[str, str]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)  # as printed on the page

    def heading(self, text: str) -> None:
        self.parts.append((f"## {text}", f"<h2>{escape(text)}</h2>"))

    def text(self, text: str) -> None:
        text = " ".join(text.split())
        self.parts.append((text, f"<p>{_marked(text)}</p>"))

    def code(self, text: str) -> None:
        self.parts.append((f"```\n{text}\n```", f"<pre>{escape(text)}</pre>"))

    def table(self, head: list[str], rows: list[list[str]]) -> None:
        self.parts.append((markdown(head, rows), html_table(head, rows)))
        self.tables.append({"head": head, "rows": rows})

    def picture(self, name: str, figure: Figure) -> None:
        make_folder(self.folder, "Choose another folder with --out.")
        file = f"{self.sheet}-{name}.png"
        save(figure, self.folder / file)
        self.parts.append((f"![{name.replace('-', ' ')}]({file})", f"<p>{drawn(figure)}</p>"))

    def questions(self, **numbers: Any) -> None:
        """Add the sheet's questions and answers from questions/SHEET.md; `numbers` fill the {} placeholders."""
        self.heading("The questions")
        place = resources.files("vitascope.sheets") / "questions" / f"{self.sheet}.md"
        for part in place.read_text(encoding="utf-8").split("## ")[1:]:
            question, _, answer = part.partition("\n")
            question, answer = question.strip(), " ".join(answer.split()).format(**numbers)
            self.parts.append((f"**{question}** {answer}", f"<p><b>{escape(question)}</b> {_marked(answer)}</p>"))

    def write(self, machines: list[str], commit: str | None = None) -> Path:
        """Write SHEET.md, SHEET.html and SHEET.json and return the page's path. `machines` trained the runs; this one
        writes the report."""
        make_folder(self.folder, "Choose another folder with --out.")
        machine, title = record_of_machine(commit), f"Sheet {self.sheet}: {self.title}"
        made = f"{_made_by(self.sheet, self.quick, machines)} {_explain_interval(self.numbers.get('seeds'))}"
        first = [(f"# {title}", f"<h1>{escape(title)}</h1>"), (made, f"<p>{_marked(made)}</p>")]
        lines, body = zip(*first, *self.parts, strict=True)
        write_whole(self.folder / f"{self.sheet}.md", "\n\n".join(lines) + "\n")
        write_whole(self.folder / f"{self.sheet}.html", html_page(f"Sheet {self.sheet}", "".join(body)))
        command = f"vitascope sheet {self.sheet}{' --quick' if self.quick else ''}"
        told = {"sheet": self.sheet, "quick": self.quick, "command": command, "runs_on": machines} | self.numbers
        told |= {"tables": self.tables, "written_on": machine}
        write_json(self.folder / f"{self.sheet}.json", told)
        return self.folder / f"{self.sheet}.html"


def _made_by(sheet: str, quick: bool, machines: list[str]) -> str:
    short = (
        "Shortened: fewer epochs, seeds and images than the sheet requires, and smaller models. The numbers are not "
        "comparable with those of a full report. "
        if quick
        else ""
    )
    return f"{short}Made by `vitascope sheet {sheet}{' --quick' if quick else ''}` on {', '.join(machines)}."


def _explain_interval(seeds: int | None) -> str:
    if seeds is not None and seeds < ENOUGH:
        return "One seed." if seeds == 1 else "Two seeds: both values are shown, in the order of the seeds."
    return f"± is the 95 % confidence interval of the mean over {seeds or 'the'} seeds (Student's t)."


def _marked(text: str) -> str:
    """Escape the text and mark `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def shape_of(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape))
