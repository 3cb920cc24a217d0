"""A document of headings, text, tables and figures. It is written as Markdown, as one HTML file or for a notebook."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitascope.draw.html import encode_png_as_data_url, render_template
from vitascope.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_DPI, SCREEN_DPI = 150, 96  # of figures (see `create_figure`), and of CSS pixels


class Heading(NamedTuple):
    text: str
    kind = "heading"


class Text(NamedTuple):
    """A paragraph; `code` between backticks is its only markup. `lead`: words in bold before it."""

    text: str
    lead: str = ""
    kind = "text"


class Code(NamedTuple):
    text: str
    kind = "code"


class Table(NamedTuple):
    header: list[str]
    rows: list[list[str]]
    kind = "table"


class Picture(NamedTuple):
    """A figure as a PNG file: embedded in HTML, and a link in Markdown to `file_name` in the document's folder."""

    description: str
    png: bytes
    file_name: str = ""
    kind = "picture"

    @classmethod
    def from_figure(cls, description: str, figure: "Figure", file_name: str = "") -> "Picture":
        file = io.BytesIO()
        figure.savefig(file, format="png")
        return cls(description, file.getvalue(), file_name)

    @classmethod
    def from_file(cls, path: Path) -> "Picture":
        return cls(path.stem.replace("-", " "), path.read_bytes(), path.name)

    @property
    def url(self) -> str:
        return encode_png_as_data_url(self.png)

    @property
    def width(self) -> int:
        """The width in CSS pixels; the file has more, for sharp text on dense screens."""
        return round(int.from_bytes(self.png[16:20]) * SCREEN_DPI / FILE_DPI)  # PNG header: columns at byte 16


Part = Heading | Text | Code | Table | Picture


@dataclass
class Document:
    title: str
    parts: list[Part] = field(default_factory=list)

    def format_markdown(self) -> str:
        return render_template("document.md.j2", title=self.title, parts=self.parts)

    def format_html_page(self) -> str:
        return render_template("document.html.j2", title=self.title, parts=self.parts)


def format_parts_for_notebook(parts: list[Part]) -> str:
    """Return the parts as HTML without a page around them."""
    return render_template("notebook.html.j2", parts=parts)


def write_picture(picture: Picture, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / picture.file_name).write_bytes(picture.png)
    except OSError as error:
        raise UserError(f"The figure could not be written to {folder}: {error.strerror}.") from error
