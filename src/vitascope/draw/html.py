"""Write tables, images and bars as self-contained HTML, for notebooks and reports."""

import io
from base64 import b64encode
from collections.abc import Collection
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitascope.draw import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em;line-height:1.5}"
    "td,th{padding:.2em .7em;text-align:left;border-bottom:1px solid #ddd}code{background:#f4f4f4}"
)


def make_html_table(columns: list[str], rows: list[list[str]], html_columns: Collection[str] = ()) -> str:
    """Return an HTML table; cells are text, except in `html_columns`, which hold HTML."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{cell if column in html_columns else escape(cell)}</td>"
            for column, cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def make_html_page(title: str, html_body: str) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{PAGE_STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}{html_body}</html>\n'


def encode_image_as_html(image: NDArray[np.uint8], width_pixels: int = 64) -> str:
    """Return an image (rows × columns × 1 or 3) as HTML, enlarged without smoothing."""
    file = io.BytesIO()
    Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(file, "PNG")
    return _make_img_tag(file.getvalue(), f'width="{width_pixels}" style="image-rendering: pixelated"')


def encode_figure_as_html(figure: "Figure") -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return _make_img_tag(file.getvalue(), 'style="max-width: 100%"')


def make_html_bar(label: str, fraction: float) -> str:
    """Return a label, a bar and the fraction in percent."""
    style = f"display:inline-block;height:0.7em;width:{80 * fraction:.0f}px;background:{COLOURS[0]}"
    return f'{escape(label)} <span style="{style}"></span> {fraction:.1%}'


def _make_img_tag(png_bytes: bytes, html_attributes: str) -> str:
    return f'<img src="data:image/png;base64,{b64encode(png_bytes).decode()}" {html_attributes}>'
