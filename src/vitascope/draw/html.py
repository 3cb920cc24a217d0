"""Render the templates of pages, notebook views and model cards, and documents of text, tables and figures.

A template's text is escaped for HTML or for Markdown. A document is written as Markdown, as one HTML file or
for a notebook.
"""

import io
import re
from base64 import b64encode
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitascope.errors import UserError, format_count
from vitascope.number_format import format_percent

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.figure import Figure

TEMPLATES_FOLDER = Path(__file__).parents[1] / "templates"
Markdown = str  # text in which Markdown markup counts
CODE_SPAN = re.compile(r"`([^`]+)`")
# What Markdown takes for markup within a line.
MARKDOWN_MARKUP = re.compile(
    r"\\(?=[!-/:-@\[-`{-~])|[`~]|(?<!\s)\*|\*(?!\s)|(?<!\w)_|_(?!\w)|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<=\])[(\[]"
)
NUMBER = re.compile(r"[+\-−×]?\d[\d,.]*( ?[%kMG])?( ± [\d.]+( ?%)?)?|–|")


def render_template(name: str, **values: Any) -> str:
    """Fill a file of `templates/`. A value that a template needs and does not get is an error."""
    return _create_template_environment().get_template(name).render(values)


def make_html_table(columns: list[str], rows: list[list[str]]) -> str:
    """Return an HTML table of text cells, for a notebook."""
    return render_template("table.html.j2", columns=columns, rows=rows)


@cache
def _create_template_environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES_FOLDER),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "image_url": encode_image_as_data_url,
        "mark_code": _escape_html_and_tag_code,
        "number_columns": find_number_columns,
        "md": escape_markdown,
        "md_text": escape_markdown_except_code,
        "md_code": format_markdown_inline_code,
        "md_table": format_markdown_table,
        "count": format_count,
        "percent": format_percent,
    }
    return environment


def encode_image_as_data_url(image: NDArray[np.uint8]) -> str:
    """Return an image (rows × columns × 1 or 3) as the URL of an HTML image."""
    file = io.BytesIO()
    Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(file, "PNG")
    return encode_png_as_data_url(file.getvalue())


def encode_png_as_data_url(png_bytes: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png_bytes).decode()}"


def find_number_columns(rows: list[list[str]]) -> list[bool]:
    """Return for each column whether all its cells are numbers, with unit or interval, or empty."""
    return [all(NUMBER.fullmatch(cell) for cell in column) for column in zip(*rows, strict=True)]


def _escape_html_and_tag_code(text: str) -> "Markup":
    """Escape the text and mark `code`."""
    from markupsafe import Markup

    return Markup(CODE_SPAN.sub(r"<code>\1</code>", escape(text)))


def escape_markdown(text: str) -> Markdown:
    """Escape plain text within a line, such as a class name, so that Markdown shows it unchanged."""
    return MARKDOWN_MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def escape_markdown_except_code(text: str) -> Markdown:
    """Escape a paragraph in which only `code` is markup."""
    parts = CODE_SPAN.split(" ".join(text.split()))  # alternately text and code
    return "".join(
        f"`{part}`" if index % 2 else MARKDOWN_MARKUP.sub(r"\\\g<0>", part) for index, part in enumerate(parts)
    )


def format_markdown_inline_code(text: str) -> Markdown:
    """Return text as inline code, with more backticks around it than it contains in a row."""
    text = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def format_markdown_table(header: list[str], rows: list[list[Markdown]]) -> Markdown:
    """Return a table; cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


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
