"""What a sheet found -> its report: text, tables, pictures in order, as Markdown and as one page that stands alone."""

import re
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vitascope.draw.html import drawn, html_table
from vitascope.draw.look import save
from vitascope.records.reading import markdown
from vitascope.run.files import make_folder, write_json, write_whole
from vitascope.run.machine import machine_name, record_of_machine
from vitascope.training.hardware import choose_device

STYLE = (
    "body{font-family:sans-serif;max-width:56em;margin:2em auto;padding:0 1em;line-height:1.5}"
    "td,th{padding:.2em .7em;text-align:left;border-bottom:1px solid #ddd}code{background:#f4f4f4}"
)


@dataclass
class Report:
    """Parts in the order in which they are added; `numbers` are what was measured, for numbers.json."""

    sheet: str
    title: str
    quick: bool
    folder: Path
    parts: list[tuple[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def heading(self, text: str) -> None:
        self.parts.append(("heading", text))

    def text(self, text: str) -> None:
        self.parts.append(("text", " ".join(text.split())))

    def code(self, text: str) -> None:
        self.parts.append(("code", text))

    def table(self, head: list[str], rows: list[list[str]]) -> None:
        self.parts.append(("table", (head, rows)))

    def picture(self, name: str, figure: Figure) -> None:
        self.parts.append(("picture", (f"{self.sheet}-{name}", figure)))

    def questions(self, **numbers: Any) -> None:
        """The sheet's questions and our answers, from questions/SHEET.md; `numbers` fill what stands in {}."""
        self.heading("The questions")
        place = resources.files("vitascope.sheets") / "questions" / f"{self.sheet}.md"
        for part in place.read_text(encoding="utf-8").split("## ")[1:]:
            question, _, answer = part.partition("\n")
            self.parts.append(("asked", (question.strip(), " ".join(answer.split()).format(**numbers))))

    def write(self, commit: str | None = None) -> Path:
        """SHEET.md, its pictures, SHEET.html and SHEET.json; the page's path comes back."""
        make_folder(self.folder, "Choose another place with --out.")
        machine = record_of_machine(commit)
        first = [("text", _made_by(self.sheet, self.quick, machine))]
        lines = [f"# Sheet {self.sheet}: {self.title}"]
        body = [f"<h1>Sheet {self.sheet}: {escape(self.title)}</h1>"]
        for kind, content in first + self.parts:
            lines.append(self._as_markdown(kind, content))
            body.append(_as_html(kind, content))
        write_whole(self.folder / f"{self.sheet}.md", "\n\n".join(lines) + "\n")
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Sheet {self.sheet}</title>'
        page = self.folder / f"{self.sheet}.html"
        write_whole(page, f"{head}<style>{STYLE}</style>{''.join(body)}</html>\n")
        told = {"sheet": self.sheet, "quick": self.quick} | self.numbers | machine
        write_json(self.folder / f"{self.sheet}.json", told)
        return page

    def _as_markdown(self, kind: str, content: Any) -> str:
        if kind == "heading":
            return f"## {content}"
        if kind == "code":
            return f"```\n{content}\n```"
        if kind == "table":
            return markdown(*content)
        if kind == "picture":
            name, figure = content
            save(figure, self.folder / f"{name}.png")
            return f"![{name.split('-', 1)[1].replace('-', ' ')}]({name}.png)"
        if kind == "asked":
            return f"**{content[0]}** {content[1]}"
        return content


def _made_by(sheet: str, quick: bool, machine: dict[str, Any]) -> str:
    on = machine_name(machine["machine"], choose_device("auto"))
    short = (
        "Shortened: fewer epochs, seeds and images than the sheet asks for, so the numbers are only a taste. "
        if quick
        else ""
    )
    return f"{short}Made by `vitascope sheet {sheet}{' --quick' if quick else ''}` on {on}."


def _as_html(kind: str, content: Any) -> str:
    if kind == "heading":
        return f"<h2>{escape(content)}</h2>"
    if kind == "code":
        return f"<pre>{escape(content)}</pre>"
    if kind == "table":
        return html_table(*content)
    if kind == "picture":
        return f"<p>{drawn(content[1])}</p>"
    if kind == "asked":
        return f"<p><b>{escape(content[0])}</b> {_marked(content[1])}</p>"
    return f"<p>{_marked(content)}</p>"


def _marked(text: str) -> str:
    """`code` as such."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
