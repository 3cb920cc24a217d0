"""Render the templates of pages, notebook views and model cards. Text is escaped for HTML or for Markdown."""

import io
import re
from base64 import b64encode
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitascope.errors import format_count

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

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
        "decimals": "{:z.4f}".format,
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
